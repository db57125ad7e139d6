"""DistributedOptimizer: the program's optimizer object, whose step() is that of the model's stages."""
import math
import types

from ..errors import ConfigError, StateError, UnsupportedError
from ..training.client_optimizer import refuse_known
from ..training.optimizer_copy import is_optimizer, without_global_hooks
from ..training.own_step import set_step
from . import gradients, joining, program, settings, states
from .config import state
from .optimizers import FusedLamb


def DistributedOptimizer(optimizer, static_loss_scale=1.0, dynamic_loss_scale=False, dynamic_loss_args=None):  # pylint: disable=invalid-name
    """`optimizer` itself, made before or after the model. Its step() takes the gradients that step functions have added
    up, on every stage, and its zero_grad() drops them. Schedulers steer its param_groups as ever.

    The others are for `fp16`: a fixed scale of the loss, or one that follows overflows, by `init_scale`,
    `scale_factor`, `scale_window`, `min_scale`, `delayed_shift` and `consecutive_hysteresis`.

    Raises  ConfigError, UnsupportedError: arguments of the loss scale.
    """
    if not is_optimizer(optimizer):
        raise ConfigError(f"smp.DistributedOptimizer: {type(optimizer).__name__} is no torch.optim.Optimizer")
    section = settings.loss_scale(static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
    refuse_known(optimizer)
    settings.set_loss_scale_of(optimizer, section)
    optimizer.overflow, optimizer.loss_scale = False, settings.first_scale(section)
    optimizer._global_grad_norm = None  # smp's name
    optimizer.steps_engine = True  # for those who look at every optimizer
    optimizer._step_supports_amp_scaling = False  # a scaler unscales gradients before step(), a fused update's too
    if isinstance(optimizer, FusedLamb):
        optimizer.limits_norm = False  # it would see the gradients of one stage
    set_step(optimizer, _step)
    optimizer.zero_grad = types.MethodType(_zero_grad, optimizer)
    optimizer.optimizer = optimizer  # smp's stands around it
    optimizer.clip_master_grads = types.MethodType(_clip_master_grads, optimizer)
    optimizer.local_state_dict = types.MethodType(_local_state_dict, optimizer)
    optimizer.state_dict = types.MethodType(_state_dict, optimizer)
    optimizer.load_state_dict = types.MethodType(_load_state_dict, optimizer)
    program.add_optimizer(optimizer)
    return optimizer


def _step(optimizer, closure=None):
    """The end of a window. Collective."""
    if closure is not None:
        raise UnsupportedError("optimizer.step(closure) is not there yet; call the @smp.step function first")
    engine = _engine(optimizer, "optimizer.step()")
    model = program.model_of(optimizer)
    if model is not None and model.joined is not None:
        model.joined.meet_update(optimizer)
    with without_global_hooks():
        if isinstance(optimizer, FusedLamb) and math.isfinite(optimizer.max_grad_norm):
            gradients.limit(engine, "optimizer.step()", optimizer.max_grad_norm)
        engine.step_by(optimizer)
    _tell_scale(optimizer, engine)


def _tell_scale(optimizer, engine):
    """Sets what programs read of FP16_Optimizer: whether the step was skipped, the next one's scale, and the norm where
    `sdp_gradient_clipping` has limited it. Waits for a device."""
    if state.cfg.half is not None:
        optimizer.overflow = not engine.core.was_step_applied()
    if state.cfg.fp16:
        optimizer.loss_scale = engine.core.loss_scale
    if state.cfg.sharded_data_parallel_degree > 1:
        optimizer._global_grad_norm = engine.core.get_global_grad_norm()


def _zero_grad(optimizer, set_to_none=True):
    """Drops gradients. Collective."""
    if not set_to_none:
        raise UnsupportedError("zero_grad(set_to_none=False): gradients of zeros are not kept; leave the argument out")
    model = program.model_of(optimizer)
    if model is not None:
        model.zero_grad()


def _clip_master_grads(optimizer, max_norm, norm_type=2.0):
    """As torch.nn.utils.clip_grad_norm_(), of the gradients of all stages. Returns their norm before. Collective."""
    model = program.model_of(optimizer)
    if model is not None and model.joined is not None:
        model.joined.meet("optimizer.clip_master_grads()", max_norm=float(max_norm), norm_type=float(norm_type))
    return gradients.clip(_engine(optimizer, "optimizer.clip_master_grads()"), "optimizer.clip_master_grads()", max_norm, norm_type)


def _local_state_dict(optimizer, gather_if_shard=True):
    """As torch's state_dict(), with the states of this stage's parameters, under their numbers in the whole. Where
    ranks share them (`shard_optimizer_state`) collective over these, and without `gather_if_shard` each has some."""
    joining.refuse(program.model_of(optimizer), "optimizer.local_state_dict()")
    return states.optimizer_local("optimizer.local_state_dict()", optimizer, _engine(optimizer, "optimizer.local_state_dict()"), gather_if_shard)


def _state_dict(optimizer):
    """As torch's, of the whole model, on the host. Collective over the stages once tensors have their homes."""
    model = program.model_of(optimizer)
    joining.refuse(model, "optimizer.state_dict()")
    if model is None or not model.partitioned:
        waiting = program.waiting_states(optimizer) or {}
        return {**waiting, **type(optimizer).state_dict(optimizer), **({"state": waiting["state"]} if waiting else {})}
    return states.optimizer_whole("optimizer.state_dict()", optimizer, model.engine("optimizer.state_dict()"))


def _load_state_dict(optimizer, state_dict, gather_if_shard=True):  # pylint: disable=unused-argument
    """As torch's, of a whole state dict, or of one of each stage, of whatever partition. Collective over the stages
    where it is partial. Before tensors have their homes states wait for that.

    Raises  StateError, ShapeError: it does not fit.
    """
    joining.refuse(program.model_of(optimizer), "optimizer.load_state_dict()")
    if states.is_partial(state_dict):
        state_dict = states.optimizer_joined("optimizer.load_state_dict()", state_dict)
    type(optimizer).load_state_dict(optimizer, {**state_dict, "state": {}})
    model = program.model_of(optimizer)
    if model is not None and model.partitioned:
        states.load_optimizer(optimizer, state_dict, model.engine("optimizer.load_state_dict()"))
    else:
        program.wait_with_states(optimizer, state_dict)


def _engine(optimizer, call):
    model = program.model_of(optimizer)
    if model is None and program.models():
        raise StateError(f"{call}: its parameters are of none of the program's {len(program.models())} models; make it of the parameters of one")
    return (model or program.model(call)).engine(call)
