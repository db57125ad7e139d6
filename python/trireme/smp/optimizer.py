"""DistributedOptimizer: the program's optimizer object, whose step() is that of the model's stages."""
import types

from ..errors import ConfigError, UnsupportedError
from ..training.client_optimizer import refuse_known
from ..training.optimizer_copy import is_optimizer, without_global_hooks
from ..training.own_step import set_step
from . import program


def DistributedOptimizer(optimizer, static_loss_scale=1.0, dynamic_loss_scale=False, dynamic_loss_args=None):  # pylint: disable=invalid-name
    """`optimizer` itself, made before or after the model. Its step() takes the gradients that step functions have added
    up, on every stage, and its zero_grad() drops them. Schedulers steer its param_groups as ever.

    Raises  UnsupportedError: a loss scale.
    """
    if not is_optimizer(optimizer):
        raise ConfigError(f"smp.DistributedOptimizer: {type(optimizer).__name__} is no torch.optim.Optimizer")
    for name, value, default in (("static_loss_scale", static_loss_scale, 1.0), ("dynamic_loss_scale", dynamic_loss_scale, False)):
        if value != default:
            raise UnsupportedError(f"smp.DistributedOptimizer({name}={value!r}) is not there yet; leave it out")
    if dynamic_loss_args:
        raise UnsupportedError("smp.DistributedOptimizer(dynamic_loss_args=…) is not there yet; leave it out")
    refuse_known(optimizer)
    optimizer.steps_engine = True  # for those who look at every optimizer
    optimizer._step_supports_amp_scaling = False  # a scaler unscales gradients before step(), a fused update's too
    set_step(optimizer, _step)
    optimizer.zero_grad = types.MethodType(_zero_grad, optimizer)
    for name in ("state_dict", "load_state_dict", "local_state_dict"):
        setattr(optimizer, name, types.MethodType(_later(name), optimizer))
    program.set_optimizer(optimizer)
    return optimizer


def _step(optimizer, closure=None):
    """The end of a window. Collective."""
    if closure is not None:
        raise UnsupportedError("optimizer.step(closure) is not there yet; call the @smp.step function first")
    engine = program.model("optimizer.step()").engine("optimizer.step()")
    with without_global_hooks():
        engine.step_by(optimizer)


def _zero_grad(_optimizer, set_to_none=True):
    """Drops gradients. Collective."""
    if not set_to_none:
        raise UnsupportedError("zero_grad(set_to_none=False): gradients of zeros are not kept; leave the argument out")
    model = program.model_or_none()
    if model is not None:
        model.zero_grad()


def _later(name):
    def refuse(optimizer, *_args, **_kwargs):
        raise UnsupportedError(f"{type(optimizer).__name__}.{name}() of an smp.DistributedOptimizer is not there yet: its states are on stages")

    return refuse
