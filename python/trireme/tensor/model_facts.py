"""Facts of a model for partition rules beside its parameters: its configuration and its tp_plan, where it is one of
transformers."""
import dataclasses
import json
import sys

from ..errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """The facts of a model; one that is not of transformers has none, and names decide."""

    config: str = ""  # JSON text of its config.json; "": it has none
    # Pairs of a module or parameter, with "*" for a number, and a style
    tp_plan: list[tuple[str, str]] = dataclasses.field(default_factory=list)


# Keys of a config.json that count heads.
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")


def _base():
    """The class of transformers' models; (): there are none, since nobody has imported it."""
    return getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())


def pretrained(module, prefix=""):
    """(place, model) of transformers' models in `module` that are in no other one; the place ends with a dot, or is
    ""."""
    if isinstance(module, _base()):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from pretrained(child, f"{prefix}{name}.")


def _plan_of(model):
    """As transformers has merged it in the instance, of its class, its children, and what it adds itself."""
    return dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})


def _config_of(model):
    """As its config.json. Where that of a model of several parts has no heads, those of the parts that have a plan, if
    they are alike."""
    config = model.config.to_dict()
    parts = [part.config for part in model.modules() if isinstance(part, _base()) and part.config.base_model_tp_plan]
    for part in (model.config, *parts):
        for key in (*_HEADS, *_KEY_VALUE_HEADS):
            if key in (getattr(part, "per_layer_attributes", None) or ()):
                raise ConfigError(f"tensor_parallel: layers of {type(model).__name__} have numbers of their own of `{key}`, which rules do not know; set "
                                  "tensor_parallel.autotp_size to 1")
    if not any(config.get(key) for key in _HEADS):
        given = [part.to_dict() for part in parts]
        counts = {tuple((key, part[key]) for key in (*_HEADS, *_KEY_VALUE_HEADS) if part.get(key)) for part in given}
        if len(counts) == 1:
            config.update(*counts)
    return config


def facts_of(module):
    """The ModelFacts of a torch.nn.Module, which may be a model of transformers or have one in it.

    Raises  ConfigError: several of them whose configurations differ; one whose layers have other numbers of heads.
    """
    found = list(pretrained(module))
    configs = {json.dumps(_config_of(model), default=str, sort_keys=True): place for place, model in found}
    if len(configs) > 1:
        places = [place.removesuffix(".") for place, _ in found]
        raise ConfigError(f"tensor_parallel: {places[0]} and {places[1]} are models of transformers with other configurations, and rules are for one; train each "
                          "by an engine of its own, or set tensor_parallel.autotp_size to 1")
    plan = [(place + key, style) for place, model in found for key, style in _plan_of(model).items()]
    return ModelFacts(next(iter(configs), ""), plan)


def parameters_of(module):
    """[(name, sizes, other names)] of the module's parameters in their order, as rules take them."""
    names = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append((name, list(getattr(parameter, "ds_shape", parameter.shape))))
    return [(found[0][0], found[0][1], [name for name, _ in found[1:]]) for found in names.values()]
