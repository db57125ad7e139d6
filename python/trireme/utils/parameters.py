"""What training holds of one parameter: fp32 value, optimizer states, gradient. The parameter itself finds its engine.

Full values have the parameter's shape, local ones are flat: the elements that this rank updates, at stage 0 all. All are copies in
fp32. Collective are all of these but the local functions and safe_set_full_optimizer_state().

A frozen parameter has no master, states or gradient: getters return None, so a loop over all parameters needs no condition.

Raises  StateError: no parameter of an engine, a frozen one is set, or a gradient without a backward since the last step.
        ConfigError: an optimizer state that is not there, with those that are. ShapeError: a value of another shape. Nothing has
        changed then.
"""
from .._native import core


def safe_get_full_fp32_param(param):
    """The fp32 master; of an fp32 parameter its weights."""
    return core.safe_get_full_fp32_param(param)


def safe_get_full_optimizer_state(param, optim_state_key):
    """A state by its name, such as "exp_avg"."""
    return core.safe_get_full_optimizer_state(param, optim_state_key)


def safe_get_full_grad(param):
    """The mean over ranks and micro-batches so far, before clipping; None for a parameter that no rank used.

    Inside no_sync() and coalesce_grad_reduction(): this rank's sum since the last reduction, each micro-batch counted as in the mean.
    """
    return core.safe_get_full_grad(param)


def safe_set_full_fp32_param(param, value):
    """The weight becomes `value`, rounded to its dtype."""
    core.safe_set_full_fp32_param(param, value)


def safe_set_full_optimizer_state(param, value, optim_state_key):
    """A state by its name."""
    core.safe_set_full_optimizer_state(param, value, optim_state_key)


def safe_set_full_grad(param, value):
    """What the next step() uses; later backward passes add to it."""
    core.safe_set_full_grad(param, value)


def safe_get_local_fp32_param(param):
    """This rank's part of the fp32 master."""
    return core.safe_get_local_fp32_param(param)


def safe_get_local_optimizer_state(param, optim_state_key):
    """This rank's part of a state."""
    return core.safe_get_local_optimizer_state(param, optim_state_key)


def safe_get_local_grad(param):
    """This rank's part of the gradient."""
    return core.safe_get_local_grad(param)


def safe_set_local_fp32_param(param, value):
    """This rank's part of the fp32 master."""
    core.safe_set_local_fp32_param(param, value)


def safe_set_local_optimizer_state(param, value, optim_state_key):
    """This rank's part of a state."""
    core.safe_set_local_optimizer_state(param, value, optim_state_key)


def safe_set_local_grad(param, value):
    """This rank's part of the gradient."""
    core.safe_set_local_grad(param, value)


def safe_update_full_grad_vectorized(param_list, update_func):
    """Each parameter's gradient becomes update_func(gradient, parameter), the same on every rank, with the reductions done once."""
    core.safe_update_full_grad_vectorized(list(param_list), update_func)
