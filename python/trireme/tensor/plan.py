"""How a model would be cut over ranks that share its layers, to read before it is trained."""
from .._native import core
from . import model_facts


def partition_text(model, ranks, *, preset_model="", partition_config=None):
    """Each parameter's rule, ranks' slices, exchanges and why, as `trireme plan --tp` prints them. `model` may be on
    the device "meta".

    preset_model, partition_config  as keys of a configuration's section `tensor_parallel`; `ranks` is its
                                    `autotp_size`.
    Raises  ConfigError: what initialize() would refuse.
    """
    return core.partition_text(model_facts.facts_of(model), model_facts.parameters_of(model), ranks, preset_model,
                               partition_config)
