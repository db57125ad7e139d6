"""The state that training keeps for one parameter: fp32 value, optimizer states, gradient. The parameter itself finds
its engine.

Full values have the parameter's shape, local ones are flat: the elements that this rank updates, at ZeRO stage 0 all.
All are copies in fp32. Collective are all of these but the local functions and safe_set_full_optimizer_state().

A copy of a tied parameter of a PipelineModule gives what its owner has, where that is on the same stage; of an owner
elsewhere it has the value alone, if that is fp32. A frozen parameter has no master, states or gradient: getters return
None, so a loop over all parameters needs no condition.

Raises  StateError: no parameter of an engine, a frozen one is set, or a gradient without a backward since the last
        step. ConfigError: an optimizer state that is not there, with those that are. ShapeError: a value of another
        shape. Nothing has changed then.
"""
import torch

from ..._native import core
from ...errors import StateError


def _trained(param, call):
    """`param`, or of a copy of a tied parameter the one that is trained. Raises StateError: that is on another
    stage."""
    owner = getattr(param, "tied_owner", None)
    if owner is None:
        return param
    if owner.parameter is None:
        raise StateError(f"{call}: the parameter is a copy of the tied parameter '{owner.name}', and the gradient and the states are those of stage "
                         f"{owner.stage}; call it there, or skip parameters that have ds_pipe_replicated")
    return owner.parameter


def _writable(param, call):
    """`param`. Raises StateError: it is a copy, which follows its owner."""
    owner = getattr(param, "tied_owner", None)
    if owner is not None:
        raise StateError(f"{call}: the parameter is a copy of the tied parameter '{owner.name}' of stage {owner.stage}, which it follows after each "
                         "step; set that one, there")
    return param


def safe_get_full_fp32_param(param):
    """The fp32 master; of an fp32 parameter its weights."""
    owner = getattr(param, "tied_owner", None)
    if owner is not None and owner.parameter is None and param.dtype == torch.float32:
        return param.detach().clone()  # copies follow their owners after each step
    return core.safe_get_full_fp32_param(_trained(param, "safe_get_full_fp32_param"))


def safe_get_full_optimizer_state(param, optim_state_key):
    """A state by its name, such as "exp_avg"."""
    return core.safe_get_full_optimizer_state(_trained(param, "safe_get_full_optimizer_state"), optim_state_key)


def safe_get_full_grad(param):
    """The mean over ranks and micro-batches so far, before clipping; None for a parameter that no rank used.

    Inside no_sync() and coalesce_grad_reduction(): this rank's sum since the last reduction, each micro-batch counted
    as in the mean.
    """
    return core.safe_get_full_grad(_trained(param, "safe_get_full_grad"))


def safe_set_full_fp32_param(param, value):
    """The weight becomes `value`, rounded to its dtype."""
    core.safe_set_full_fp32_param(_writable(param, "safe_set_full_fp32_param"), value)


def safe_set_full_optimizer_state(param, value, optim_state_key):
    """A state by its name."""
    core.safe_set_full_optimizer_state(_writable(param, "safe_set_full_optimizer_state"), value, optim_state_key)


def safe_set_full_grad(param, value):
    """The gradient that the next step() uses; later backward passes add to it."""
    core.safe_set_full_grad(_writable(param, "safe_set_full_grad"), value)


def safe_get_local_fp32_param(param):
    """This rank's part of the fp32 master."""
    return core.safe_get_local_fp32_param(_trained(param, "safe_get_local_fp32_param"))


def safe_get_local_optimizer_state(param, optim_state_key):
    """This rank's part of a state."""
    return core.safe_get_local_optimizer_state(_trained(param, "safe_get_local_optimizer_state"), optim_state_key)


def safe_get_local_grad(param):
    """This rank's part of the gradient."""
    return core.safe_get_local_grad(_trained(param, "safe_get_local_grad"))


def safe_set_local_fp32_param(param, value):
    """This rank's part of the fp32 master."""
    core.safe_set_local_fp32_param(_writable(param, "safe_set_local_fp32_param"), value)


def safe_set_local_optimizer_state(param, value, optim_state_key):
    """This rank's part of a state."""
    core.safe_set_local_optimizer_state(_writable(param, "safe_set_local_optimizer_state"), value, optim_state_key)


def safe_set_local_grad(param, value):
    """This rank's part of the gradient."""
    core.safe_set_local_grad(_writable(param, "safe_set_local_grad"), value)


def safe_update_full_grad_vectorized(param_list, update_func):
    """Each parameter's gradient becomes update_func(gradient, parameter), the same on every rank, with the reductions
    done once."""
    core.safe_update_full_grad_vectorized(list(param_list), update_func)
