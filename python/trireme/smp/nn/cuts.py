"""Which parameters ranks along the axis "tensor" share: the rules by which the library cuts them, of marks on modules
and of smp's own modules."""
import collections

import torch

from ... import config as configs
from ...errors import ConfigError, UnsupportedError
from ...log import logger
from ...tensor import model_facts
from . import registry
from .attention import DistributedAttentionLayer
from .module import DistributedModule
from .transformer import DistributedTransformerLMHead, DistributedTransformerOutputLayer

#: Options of marks that change how smp computes, and no number.
_WITHOUT_EFFECT = frozenset("distribute_embedding flash_attention fused_bias_gelu fused_dropout fused_softmax".split())
_WHOLE, _FAMILY = "skip", "family"  # in place of a cut: none, or that of a model of transformers
_COLUMN, _ROW = ("column", 0), ("row", 1)  # a partition_type with the dim of a weight
_VOCABULARY, _VECTORS = ("column", 0), ("column", 1)  # of an embedding


def section_of(module, degree):
    """The section `tensor_parallel` of the library's configuration that cuts what is marked in `module`, and smp's own
    modules, over `degree` ranks; all else is whole on each.

    Raises  UnsupportedError: a mark asks for what is not there yet.
    """
    cuts = _cuts_of(module, degree)
    if cuts and all(cut == _FAMILY for cut in cuts.values()):
        return {"autotp_size": degree}
    specs = collections.defaultdict(list)
    for name, cut in cuts.items():
        if cut != _FAMILY:
            specs[cut].append(_pattern(name))
    rules = [_rule(cut, patterns) for cut, patterns in specs.items()]
    families = {model.config.model_type for _, model in model_facts.pretrained(module)} if _FAMILY in cuts.values() else set()
    for family in families:
        _check_family(family)
    return {"autotp_size": degree, "partition_config": {"layer_specs": rules, "use_default_specs": bool(families)},
            **{"preset_model": family for family in families}}


def _check_family(family):
    try:
        configs.resolve({"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"preset_model": family}}, 1, "smp")
    except ConfigError:
        raise UnsupportedError(f"smp: modules of a \"{family}\" of transformers are marked for tensor parallelism, and other matrices of the wrapped module are not: for "
                               "this family that is not there yet; mark all of it, or nothing") from None


def _rule(cut, patterns):
    if cut == _WHOLE:
        return {"patterns": patterns, "partition_type": _WHOLE}
    return {"patterns": patterns, "partition_type": cut[0], "partition_dim": cut[1]}


def _pattern(name):
    return name.replace(".", r"\.") + "$"


def _cuts_of(module, degree):
    """{name: cut} of every matrix of `module`, under each name that it has."""
    named = collections.defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.dim() > 1:
            named[parameter].append(name)
    of_owners = _cuts_of_modules(module, degree)
    cuts = {}
    for names in named.values():
        of_names = {of_owners.get(name.rpartition(".")[0], _WHOLE) for name in names}
        cuts.update(dict.fromkeys(names, of_names.pop() if len(of_names) == 1 else _WHOLE))
    return cuts


def _cuts_of_modules(module, degree):
    """{name of a module: the cut of its own weight}, of those that are to be cut."""
    places = tuple(place for place, _ in model_facts.pretrained(module))
    owners = {id(child): (name, inner) for inner in module.modules() for name, child in inner.named_children()}
    cuts = {}
    for name, inner in module.named_modules():
        if not _is_wanted(name, inner):
            continue
        if any(f"{name}.".startswith(place) for place in places):
            cuts[name] = _FAMILY
        elif isinstance(inner, (torch.nn.Linear, torch.nn.Embedding)):
            cut, count = _cut_of(inner, *owners.get(id(inner), ("", None)))
            if _fits(inner, count, degree, owners):
                cuts[name] = cut
            else:
                logger.info("smp: '%s' (%s) is whole on every rank: its %d %s do not divide over %d", name, type(inner).__name__, count,
                            "heads" if _is_of_heads(inner, owners) else "features", degree)
    return cuts


def _is_wanted(name, inner):
    mark = registry.mark_of(inner)
    if mark is None:
        return isinstance(inner, DistributedModule)
    if mark.enabled:
        _check_mark(name, inner, mark)
    return mark.enabled


def _check_mark(name, inner, mark):
    where = f"'{name}' ({type(inner).__name__})" if name else type(inner).__name__
    if (pair := registry.pair_of(type(inner))) is not None:
        raise UnsupportedError(f"smp.tp_register: {where} is marked, and {pair.distributed.__name__} in the place of it is not there yet with tensor_parallel_degree "
                               "above 1; make one of those directly")
    for option, value in mark.options.items():
        if value and option == "zero_init":
            raise UnsupportedError(f"smp.tensor_parallelism(zero_init={value!r}) of {where} is not there yet with tensor_parallel_degree above 1: smp's documentation does not tell "
                                   "which weights begin at 0; leave it out, and set those that are to do so by torch.nn.init.zeros_()")
        if value and option not in _WITHOUT_EFFECT:
            raise UnsupportedError(f"smp.tensor_parallelism({option}={value!r}) of {where} is not there yet with tensor_parallel_degree above 1, where modules stay those "
                                   "that the program has made; leave it out, or make the module with it")


def _cut_of(inner, name, owner):
    """(cut, the number that ranks share) of a linear layer or an embedding, of this name in the module `owner`."""
    if isinstance(inner, torch.nn.Embedding):
        if isinstance(owner, DistributedTransformerLMHead):  # vectors of others would be gathered before each norm
            return (_VOCABULARY if name == "word_embedding" else _WHOLE), inner.num_embeddings
        return _VECTORS, inner.embedding_dim
    if isinstance(owner, DistributedAttentionLayer):
        return (_ROW if name == "dense" else _COLUMN), owner.num_attention_heads
    if isinstance(owner, DistributedTransformerOutputLayer):
        return (_ROW if name == "dense2" else _COLUMN), owner.dense1.out_features
    return _ROW, inner.in_features


def _is_of_heads(inner, owners):
    return isinstance(owners.get(id(inner), ("", None))[1], DistributedAttentionLayer)


def _fits(inner, count, degree, owners):
    """Heads are never split; all else may be of other sizes on other ranks."""
    return count % degree == 0 if _is_of_heads(inner, owners) else count >= degree
