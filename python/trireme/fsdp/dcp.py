"""torch.distributed.checkpoint over wrapped modules. Each rank reads and writes tensors in an order of its own there,
so it gets whole copies."""
import collections
import functools

import torch
import torch.distributed.checkpoint.state_dict
from torch.utils import _pytree

from .._native import core
from ..patches import Patches, Wrapped
from . import kept, registry, states
from .tensors import ParameterValue


def _is_ours(value):
    """Whether a leaf of a state dict is a tensor of a wrapped module, or an fp32 value of one."""
    return isinstance(value, ParameterValue) or (isinstance(value, torch.Tensor) and not value.is_meta and core.is_managed(value))


def _whole(value):
    return value.full_tensor() if isinstance(value, ParameterValue) else core.whole_tensor(value)


def _with_wholes(values):
    """Containers with plain copies in place of tensors of a wrapped module. Collective."""
    return _pytree.tree_map(lambda value: _whole(value) if _is_ours(value) else value, values)


def _places(values):
    """[(container, key, tensor of a wrapped module)] of nested dicts and lists."""
    items = list(values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else [])
    return [place for key, value in items for place in ([(values, key, value)] if _is_ours(value) else _places(value))]


def _load(original, state_dict, *args, **kwargs):
    """Loads into copies, and then into the module. Collective."""
    places = _places(state_dict)
    for container, key, value in places:
        container[key] = _whole(value)
    try:
        original(state_dict, *args, **kwargs)
    finally:
        loaded = [container[key] for container, key, _ in places]
        for container, key, value in places:
            container[key] = value
    with torch.no_grad():
        for (_, _, value), copy in zip(places, loaded):
            value.copy_(copy)


def _init_states(original, optimizer):
    """States of zeros, as torch's has after a step of nothing; the library's are there without one. Collective."""
    own = registry.attached(optimizer)
    if own is None:
        original(optimizer)
    else:
        registry.root_of(own).begin(own)
        if kept.parameters(own):
            kept.begin(own)


def _unflatten(original, optimizer, *args, **kwargs):
    """Asks `optimizer.state` for the names of states."""
    own = registry.attached(optimizer)
    if own is None:
        return original(optimizer, *args, **kwargs)
    found = own.state
    own.state = collections.defaultdict(dict, states.names(own, registry.root_of(own).engine().client_steps) | kept.names(own))
    try:
        return original(optimizer, *args, **kwargs)
    finally:
        own.state = found


def _around(function):
    """A wrap() by which `function` gets the original first."""
    return functools.partial(functools.partial, function)


PATCHES = Patches(__name__, "`fully_shard()` or `FullyShardedDataParallel()` is first called", [
    Wrapped("torch.distributed.checkpoint.state_dict", "_init_optim_state", "states of a wrapped module's optimizer are there without a step", _around(_init_states)),
    Wrapped("torch.distributed.checkpoint.state_dict", "_unflatten_optim_state_dict", "asks the library for names of states", _around(_unflatten)),
    Wrapped("torch.distributed.checkpoint.state_dict", "_maybe_full_or_cpu_state_dict", "gives whole copies",
            _around(lambda original, values, info: original(_with_wholes(values) if info.full_state_dict or info.cpu_offload else values, info))),
    Wrapped("torch.distributed.checkpoint.state_dict_saver", "_stateful_to_state_dict", "saves whole copies",
            _around(lambda original, values: _with_wholes(original(values)))),
    Wrapped("torch.distributed.checkpoint.state_dict_loader", "_load_state_dict", "loads into copies, and then into the module", _around(_load)),
])  # optimizers.PATCHES, which is applied with these, knows who needs them
