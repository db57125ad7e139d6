"""Activation checkpointing under smp's names: modules whose forward is computed again in the backward pass."""
import dataclasses
import re
import types

import torch
from torch.utils import checkpoint as _torch

from ..errors import ConfigError, UnsupportedError
from . import program


def checkpoint(module, *args, preserve_rng_state=True, **kwargs):
    """module(*args, **kwargs), which keeps no activations but its arguments. Of any module, over any stages.

    preserve_rng_state   also outside of step functions what is random is the same when it is computed again; inside of
                         them it always is
    """
    _check_module("smp.checkpoint", module)
    return _torch.checkpoint(module, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)


def checkpoint_sequential(sequential, input, strategy="each", preserve_rng_state=True, pack_args_as_tuple=False):  # pylint: disable=redefined-builtin
    """sequential(input), checkpointed in parts.

    strategy             "each": every module by itself; "contiguous": neighbours that are on one stage together;
                         "group_N": as "contiguous", at most N of them
    pack_args_as_tuple   a module gets a tuple as one argument, as torch.nn.Sequential gives it, rather than its items
    """
    _check_module("smp.checkpoint_sequential", sequential, torch.nn.Sequential)
    for group in _groups(list(sequential), _limit("smp.checkpoint_sequential", strategy)):
        run = _Group(group, pack_args_as_tuple)
        input = _torch.checkpoint(run, input, use_reentrant=False, preserve_rng_state=preserve_rng_state)
    return input


def set_activation_checkpointing(module, preserve_rng_state=True, pack_args_as_tuple=False, strategy="each"):
    """From here on calls of `module` are checkpointed: of a torch.nn.Sequential as checkpoint_sequential() does, of any
    other module as a whole. In a DistributedModel or before it is made."""
    _check_module("smp.set_activation_checkpointing", module)
    _limit("smp.set_activation_checkpointing", strategy)
    standing = vars(module).get("forward")
    if standing is not None and getattr(standing, "__func__", None) is not _forward:
        raise UnsupportedError(f"smp.set_activation_checkpointing: {type(module).__name__} has a forward() of this object alone, which was set on it; call smp.checkpoint() "
                               "where the module is called")
    module._smp_checkpointing = _Options(preserve_rng_state, pack_args_as_tuple, strategy)  # pylint: disable=protected-access
    module.forward = types.MethodType(_forward, module)  # a copy of the module gets its own


@dataclasses.dataclass(frozen=True)
class _Options:
    preserve_rng_state: bool
    pack_args_as_tuple: bool
    strategy: str


def _forward(self, *args, **kwargs):
    options, forward = self._smp_checkpointing, type(self).forward  # pylint: disable=protected-access
    if forward is torch.nn.Sequential.forward:
        return checkpoint_sequential(self, *args, **{**dataclasses.asdict(options), **kwargs})
    return _torch.checkpoint(types.MethodType(forward, self), *args, use_reentrant=False, preserve_rng_state=options.preserve_rng_state, **kwargs)


@dataclasses.dataclass
class _Group:
    """Modules that are checkpointed together."""

    modules: list
    packs: bool

    def __call__(self, value):
        for module in self.modules:
            value = module(*value) if isinstance(value, tuple) and not self.packs else module(value)
        return value


def _limit(call, strategy):
    """How many modules are together at most. Raises ConfigError: there is no such strategy."""
    if strategy in ("each", "contiguous"):
        return 1 if strategy == "each" else None
    found = re.fullmatch(r"group_([1-9]\d*)", strategy) if isinstance(strategy, str) else None
    if found is None:
        raise ConfigError(f"{call}(strategy={strategy!r}): expected \"each\", \"contiguous\" or \"group_N\" with a number of modules")
    return int(found.group(1))


def _groups(modules, limit):
    """Lists of neighbours that are on one stage. What has no tensors is where its neighbours are."""
    groups, of_group = [], set()
    for module in modules:
        stages = _stages_of(module)
        if groups and len(groups[-1]) != limit and (not stages or not of_group or stages == of_group):
            groups[-1].append(module)
            of_group |= stages
        else:
            groups.append([module])
            of_group = stages
    return groups


def _stages_of(module):
    model = program.partitioned_or_none()
    if model is None:
        return set()
    core = model.engine("smp.checkpoint_sequential").core
    return {home for tensor in (*module.parameters(), *module.buffers()) if (home := core.home_of(tensor)) is not None}


def _check_module(call, module, kind=torch.nn.Module):
    if not isinstance(module, kind):
        raise ConfigError(f"{call}: {type(module).__name__} is no torch.nn.{kind.__name__}; torch.utils.checkpoint.checkpoint() takes functions, too")
