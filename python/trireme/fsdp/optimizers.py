"""Optimizers that a program makes of a wrapped module's parameters: step() ends the window, zero_grad() drops it; norms
of all gradients, and scalers."""
import sys
import types

import torch
import torch.distributed.fsdp.sharded_grad_scaler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import StateError, UnsupportedError
from ..patches import Added, Patches, Wrapped
from ..training.client_optimizer import refuse_known
from ..training.optimizer_copy import without_global_hooks
from ..training.own_step import set_step
from ..training.optimizers import EngineOptimizer
from .. import ranks
from . import kept, registry, states
from .gradients import Gradient, scale
from .tensors import ShardedParameter, Whole


class States(dict):
    """`optimizer.state` once the library has the states: by parameter {name: state}. What a program writes into a state
    is the library's; other changes are refused."""

    def __missing__(self, key):
        return ParameterStates()

    def _refuse_change(self, *_args, **_kwargs):
        raise UnsupportedError("optimizer.state: states are the library's shards, and this would change nothing; write into a state in place, give "
                               "optimizer.load_state_dict() other ones, or make another model and optimizer to begin without")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse_change

    def __reduce__(self):
        return dict, (dict(self),)

    def show(self, found):
        """`found` is what a program sees from here on."""
        dict.clear(self)
        dict.update(self, found)


class ParameterStates(States):
    """The states of one parameter, by name."""

    def __missing__(self, key):
        raise KeyError(key)

    def __setitem__(self, key, value):
        """Writes a tensor into a state. Collective then."""
        found = self.get(key)
        if found is value and found is not None:
            return
        if not isinstance(found, torch.Tensor) or not isinstance(value, torch.Tensor) or found.shape != value.shape:
            self._refuse_change()
        with torch.no_grad():
            found.copy_(value)


def _attaching(add):
    def add_and_attach(self, param_group):
        add(self, param_group)
        attach(self, self.param_groups[-1]["params"])

    return add_and_attach


def _of_gradients(total):
    def total_norm(tensors, norm_type=2.0, error_if_nonfinite=False, foreach=None):
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not any(isinstance(one, Gradient) for one in tensors):
            return total(tensors, norm_type, error_if_nonfinite, foreach)
        return _total_norm(tensors, float(norm_type), error_if_nonfinite)

    return total_norm


def _clipping(clip):
    def clip_with_norm(parameters, max_norm, total_norm, foreach=None):
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        gradients = [one for one in (parameter.grad for parameter in parameters) if one is not None]
        if not gradients or not all(isinstance(one, Gradient) for one in gradients):
            clip(parameters, max_norm, total_norm, foreach)
            return
        with torch.no_grad():
            factor = torch.clamp(float(max_norm) / (total_norm.as_subclass(torch.Tensor) + 1e-6), max=1.0)
            scale(gradients, factor)

    return clip_with_norm


def _unscaling(unscale):
    """A scaler's look for infinite gradients, of which each rank finds those of its parameters that the program keeps:
    all skip a step, or none."""
    def unscale_alike(self, optimizer, *args, **kwargs):
        found = unscale(self, optimizer, *args, **kwargs)
        if registry.attached(optimizer) is not None and kept.parameters(optimizer):
            for is_infinite in found.values():
                ranks.world().all_reduce(is_infinite, "max")
        return found

    return unscale_alike


def _compile_between(skipped):
    rules, before = sys.modules["torch._dynamo.trace_rules"], len(skipped)
    rules.add("trireme")
    added = skipped[before:]

    def undo():
        for one in added:
            skipped.remove(one)
        rules._recompile_re()  # pylint: disable=protected-access

    return undo


def _total_norm(gradients, norm_type, error_if_nonfinite):
    if not all(isinstance(one, Gradient) for one in gradients):
        raise UnsupportedError("clip_grad_norm_: gradients of sharded and of other parameters together; clip those of each alone")
    roots = {one.parameter.fsdp_root() for one in gradients}
    if len(roots) > 1:
        raise UnsupportedError("clip_grad_norm_: gradients of several models; clip those of each alone")
    norm = roots.pop().totals.norm(gradients, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped.")
    return norm.as_subclass(Whole)


def attach(optimizer, parameters):
    """`optimizer` has `parameters`; those of a wrapped module make its Root the one that steps."""
    roots = {parameter.fsdp_root() for parameter in parameters if isinstance(parameter, ShardedParameter)}
    if not roots or isinstance(optimizer, EngineOptimizer):
        return
    known = registry.attachment(optimizer)
    if len(roots | ({known.root} if known else set())) > 1:
        raise UnsupportedError(f"optimizer: {type(optimizer).__name__} has parameters of several models that were given to fully_shard(); call fully_shard() on "
                               "the module that holds them all, last, or make an optimizer of each")
    refuse_known(optimizer)
    root = roots.pop()
    registry.attach(optimizer, root)
    root.binding.attach(optimizer)
    optimizer.steps_engine = True
    optimizer._step_supports_amp_scaling = False  # a scaler unscales gradients before step(), a fused update's too
    set_step(optimizer, _step)
    optimizer.zero_grad = types.MethodType(_zero_grad, optimizer)
    optimizer.state_dict = types.MethodType(_state_dict, optimizer)
    optimizer.load_state_dict = types.MethodType(_load_state_dict, optimizer)


def _step(optimizer, closure=None):
    """The end of a window. Collective."""
    if registry.attachment(optimizer).shows_states and not isinstance(optimizer.state, States):
        raise UnsupportedError(f"{type(optimizer).__name__}.step(): optimizer.state was replaced, and the library's states were not; leave it, and give "
                               "optimizer.load_state_dict() other ones")
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    root = registry.root_of(optimizer)
    with without_global_hooks():
        root.step(optimizer)
    if kept.parameters(optimizer) and root.engine().core.was_step_applied():
        kept.step(optimizer)
    _keep_states(optimizer)
    return loss


def _keep_states(optimizer):
    """From here on `optimizer.state` is a States."""
    registry.attachment(optimizer).shows_states = True
    if not isinstance(optimizer.state, States):
        optimizer.state = States()
    root = registry.root_of(optimizer)
    shown = states.shown(optimizer, root.binding.has_begun, root.engine().client_steps)
    found = {parameter: ParameterStates(names) for parameter, names in shown.items()}
    if found.keys() != optimizer.state.keys() or any(one.keys() != optimizer.state[parameter].keys() for parameter, one in found.items()):
        optimizer.state.show({**found, **{parameter: ParameterStates(one) for parameter, one in kept.values(optimizer).items()}})


def _zero_grad(optimizer, set_to_none=True):
    """Drops gradients. Collective."""
    check_none(set_to_none)
    registry.root_of(optimizer).window.zero_grad()
    for parameter in kept.parameters(optimizer):
        parameter.grad = None


def _state_dict(optimizer):
    """As torch's, with whole states; hyperparameters alone before the first step. Collective after it."""
    root, made = registry.root_of(optimizer), type(optimizer).state_dict(optimizer)
    if root.binding.optimizer is optimizer:
        client = root.engine().client_steps
        states.check("optimizer.state_dict()", client, optimizer)
        made["state"] = states.of(optimizer, root.binding.has_begun, client)
    made["state"].update(kept.states_of(optimizer))
    return made


def _load_state_dict(optimizer, state_dict):
    """As torch's, of whole states that are the same on every rank. Collective where there are states."""
    root = registry.root_of(optimizer)
    type(optimizer).load_state_dict(optimizer, {**state_dict, "state": {}})
    if registry.attachment(optimizer).shows_states:
        _keep_states(optimizer)
    if state_dict["state"] or root.binding.optimizer is optimizer:
        root.use(optimizer)
        client = root.engine().client_steps
        states.check("optimizer.load_state_dict()", client, optimizer)
        states.load(optimizer, state_dict, client)
        kept.load(optimizer, state_dict)


def check_none(set_to_none):
    """Raises UnsupportedError: gradients of zeros."""
    if not set_to_none:
        raise UnsupportedError("zero_grad(set_to_none=False): gradients of zeros are not kept; leave the argument out")


def _refuse_stranger(optimizer, _args, _kwargs):
    if registry.attachment(optimizer) or isinstance(optimizer, EngineOptimizer):
        return
    if any(isinstance(parameter, ShardedParameter) for group in optimizer.param_groups for parameter in group["params"]):
        raise StateError(f"{type(optimizer).__name__}.step(): the optimizer was made before fully_shard(); make it of model.parameters() after that")


PATCHES = Patches(__name__, "`fully_shard()` or `FullyShardedDataParallel()` is first called", [
    Wrapped("torch.optim", "Optimizer.add_param_group", "an optimizer of a wrapped module's parameters steps its shards", _attaching),
    Added("torch.optim.optimizer", "_global_optimizer_pre_hooks", "refuses an optimizer that was made before `fully_shard()`",
          lambda _: register_optimizer_step_pre_hook(_refuse_stranger).remove),
    Wrapped("torch.nn.utils.clip_grad", "_get_total_norm", "norms are of all ranks' gradients", _of_gradients),
    Wrapped("torch.nn.utils.clip_grad", "_clip_grads_with_norm_", "clips gradients in shards", _clipping),
    Wrapped("torch.amp", "GradScaler._unscale_grads_", "all ranks skip a step, or none", _unscaling),
    Wrapped("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler._unscale_grads_", "all ranks skip a step, or none", _unscaling),
    Added("torch._dynamo.trace_rules", "SKIP_DIRS", "code of wrapped modules is compiled between calls of this package, as around PyTorch's own FSDP",
          _compile_between, also=("torch._dynamo.trace_rules.SKIP_DIRS_RE",)),
], lambda: [module for module in registry.modules if not module.fsdp_wrap.root().tree.is_gone])
