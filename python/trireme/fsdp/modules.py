"""fully_shard(), and the methods that a wrapped module gets."""
import collections
import functools
import weakref

import torch

from .. import agreement, ranks
from .._native import core
from ..errors import ConfigError, ShapeError, StateError, UnsupportedError
from . import dcp, optimizers, registry, tensors
from .policies import MixedPrecisionPolicy, OffloadPolicy, choice_of
from .root import Root
from .tensors import Form, ShardedParameter, as_shown, form_of, show
from .tree import managed_parameters
from .values import plain


class _Wrap:
    """The arguments of one call of fully_shard(), and the wrapped module around it."""

    def __init__(self, module, choice, ignored):
        self.choice, self.outer, self._root = choice, None, None
        self._module = weakref.ref(module)
        # By place: to_empty() makes other parameters.
        self._ignored = {(part, name) for part in self._parts() for name, parameter in part._parameters.items() if parameter in ignored}  # pylint: disable=protected-access

    def _parts(self):
        """The module and those inside, without what other calls have wrapped."""
        found, left = [], [self._module()]
        while left:
            found.append(left.pop())
            left += [child for child in found[-1].children() if not isinstance(child, Wrapped)]
        return found

    def managed(self):
        """The unit's parameters: without those that the program keeps."""
        return {parameter for part in self._parts() for name, parameter in part._parameters.items()  # pylint: disable=protected-access
                if parameter is not None and (part, name) not in self._ignored}

    def root(self):
        """The Root of the outermost wrapped module."""
        if self.outer is not None:
            return self.outer.root()
        if self._root is None:
            self._root = Root(self._module())
        return self._root


def fully_shard(module, *, mesh=None, reshard_after_forward=None, shard_placement_fn=None, mp_policy=MixedPrecisionPolicy(),
                offload_policy=OffloadPolicy(), ignored_params=None, stochastic_rounding=False):
    """Marks `module`, or each of a list, as a unit of sharding; the outermost one is sharded with all inside when it is
    first used. Returns it.

    stochastic_rounding  ours, of a model in bf16: updates are computed in fp32, and weights and states rounded by
                         chance (docs/precision.md)

    Raises  ConfigError: no module, or a container without a forward. StateError: it, or a part of it, is sharded
            already. UnsupportedError: an argument that is not there yet.
    """
    if shard_placement_fn is not None:
        raise UnsupportedError("fully_shard(shard_placement_fn=…): shards are even parts of a unit's flattened parameters; leave it out")
    ignored = parameters_of("fully_shard(ignored_params=…)", ignored_params)
    choice = choice_of(mesh, reshard_after_forward, mp_policy, offload_policy, stochastic_rounding)
    for one in module if isinstance(module, (list, tuple)) else [module]:
        _check(one)
        wrap(one, choice, FSDPModule, ignored)
    return module


def parameters_of(argument, values):
    """A set of parameters that a program keeps. Raises ShapeError: something else is among them; StateError: one is
    sharded already."""
    ignored = set(values or ())
    for one in ignored:
        if not isinstance(one, torch.nn.Parameter):
            raise ShapeError(f"{argument}: expected parameters, got a {type(one).__name__}; give it module.parameters()")
        if core.is_managed(one):
            raise StateError(f"{argument}: a parameter of shape {tuple(one.shape)} is sharded already; name it before the first forward")
    return ignored


def _check(module):
    if not isinstance(module, torch.nn.Module):
        raise ShapeError(f"fully_shard: expected a torch.nn.Module or a list of them, got {type(module).__name__}")
    if isinstance(module, Wrapped):
        raise StateError(f"fully_shard: this {type(module).__name__} was given to fully_shard() already; call it once for each module")
    if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        raise ConfigError(f"fully_shard does not support containers that do not implement forward: {type(module).__name__}; wrap its modules")


def wrap(module, choice, kind, ignored=frozenset()):
    """Marks `module` as a unit without the parameters in `ignored`; its class gets `kind` before it.

    Raises  StateError: it, or a part of it, is sharded already, or another call's kind.
    """
    inside = [part for part in module.modules() if isinstance(part, Wrapped)]
    if any(not isinstance(part, kind) for part in inside):
        raise StateError(f"{kind.__name__}: a part of this {type(module).__name__} was wrapped by {_other(kind)}; use one of the two for the whole model")
    inner = [part.fsdp_wrap for part in inside]
    if any(wrap.root().tree.is_sharded for wrap in inner):
        raise StateError("fully_shard: a part of this module has been used, and so sharded, already; call fully_shard() on the layers, then on the model, "
                         "before the first forward")
    made = _Wrap(module, choice, ignored)
    for part in inner:
        if part.outer is None:
            part.outer = made
    for parameter in made.managed().union(*(part.managed() for part in inner)):
        show(parameter, made.root)
    module.__dict__["fsdp_wrap"] = made
    module.__class__ = _class_of(kind, type(module))
    registry.modules.add(module)
    for room in (optimizers.PATCHES, tensors.PATCHES, dcp.PATCHES):
        room.apply()


def _other(kind):
    return "FullyShardedDataParallel" if kind is FSDPModule else "fully_shard"


@functools.cache  # a class of modules has one
def _class_of(kind, original):
    return type(f"FSDP{original.__name__}", (kind, original), {"__module__": original.__module__, "__doc__": original.__doc__})


class UnshardHandle:
    """The handle that unshard(async_op=True) returns."""

    def wait(self):
        """Nothing is left to wait for: operators gather what they touch."""


class Wrapped:
    """A module that was marked as a unit; its class comes after this one."""

    fsdp_has_parts = False  # whether numbers of a gradient are of this rank's elements

    def __call__(self, *args, **kwargs):
        return self._fsdp_root().sharded().calls.forward(self, super().__call__, args, kwargs)

    def _fsdp_root(self):
        return self.fsdp_wrap.root()

    def _apply(self, *args, **kwargs):
        made = super()._apply(*args, **kwargs)
        self._fsdp_show()  # to_empty() of a model on the device "meta" makes new parameters
        return made

    def _fsdp_show(self):
        for parameter in managed_parameters(self):
            show(parameter, self.fsdp_wrap.root)

    def load_state_dict(self, state_dict, strict=True, assign=False):
        """As the module's, of whole tensors and DTensors; parameters stay, and take the values, with `assign`, too.
        Collective once parameters are sharded.

        Raises  StateError: a tensor has other values on another rank. UnsupportedError: `assign` would change a dtype.
        """
        state_dict = _with_plain(state_dict)
        if assign:
            self._fsdp_fill(state_dict)
        ignored = self._fsdp_root().tree.ignored()
        own = {name for name, parameter in self.named_parameters(remove_duplicate=False) if parameter in ignored}
        if self._fsdp_root().tree.is_sharded:  # before it rank 0's become everybody's
            agreement.check_tensors(ranks.world(), "load_state_dict()", {name: value for name, value in state_dict.items() if name not in own})
        return super().load_state_dict(state_dict, strict)

    def _fsdp_fill(self, state_dict):
        """Memory for tensors on the device "meta" that `state_dict` has, with its dtypes; tied ones stay tied."""
        made, names = {}, {}
        for path, part in self.named_modules(remove_duplicate=False):
            for table, name, tensor in [(table, name, tensor) for table in (part._parameters, part._buffers) for name, tensor in table.items()]:  # pylint: disable=protected-access
                value = state_dict.get(f"{path}.{name}" if path else name)
                if tensor is not None and isinstance(value, torch.Tensor):
                    names.setdefault(tensor, (f"{path}.{name}" if path else name, value))
        for tensor, (name, value) in names.items():
            if tensor.is_meta:
                empty = torch.empty(tensor.shape, dtype=value.dtype, device=value.device)
                made[tensor] = torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty
            elif value.dtype != self._fsdp_root().exact.shown_dtype(tensor):
                raise UnsupportedError(f"load_state_dict(assign=True): '{name}' is in {value.dtype}, and the model's in {self._fsdp_root().exact.shown_dtype(tensor)}, which stays: "
                                       "cast the tensor, or leave assign out")
        for part in self.modules():
            for table in (part._parameters, part._buffers):  # pylint: disable=protected-access
                table.update({name: made[tensor] for name, tensor in table.items() if tensor in made})
        self._fsdp_show()

    def zero_grad(self, set_to_none=True):
        """Drops gradients, all of the root's. Raises UnsupportedError: of a part alone; set_to_none=False."""
        optimizers.check_none(set_to_none)
        root = self._fsdp_root()
        if root.tree.module is not self:
            raise UnsupportedError("zero_grad() of a layer alone is not there; call it on the model, or on the optimizer")
        root.window.zero_grad()
        for parameter in root.tree.ignored():
            parameter.grad = None

    def __deepcopy__(self, memo):
        raise StateError("a model that was given to fully_shard() cannot be copied; copy it before, or take state_dict()")

    def __reduce_ex__(self, protocol):
        raise StateError("a model that was given to fully_shard() cannot be pickled; save state_dict()")


def _with_plain(state_dict):
    """A state dict with whole tensors in place of DTensors, its metadata kept. Collective where there are some."""
    wholes = {name: plain(value) for name, value in state_dict.items()}
    if all(wholes[name] is value for name, value in state_dict.items()):
        return state_dict
    made = collections.OrderedDict(wholes)
    made._metadata = getattr(state_dict, "_metadata", {})  # pylint: disable=protected-access
    return made


def remade(cls, *args, **kwargs):
    """A module of the class that `cls` was made of."""
    original = cls.__mro__[cls.__mro__.index(Wrapped) + 1]
    made = original.__new__(original, *args, **kwargs)
    made.__init__(*args, **kwargs)
    return made


class FSDPModule(Wrapped):
    """Methods of a module that was given to fully_shard(); its class comes after this one."""

    def __new__(cls, *args, **kwargs):
        """A module of the original class, as slices of an nn.Sequential are made."""
        return remade(cls, *args, **kwargs)

    def state_dict(self, *args, **kwargs):
        """As the module's; values are whole where an operator reads them, and have full_tensor(). Shards first, but for
        a model on the device "meta", whose tensors tell where DTensors go that load_state_dict(assign=True) takes."""
        root = self._fsdp_root()
        if not root.tree.is_sharded and any(parameter.is_meta for parameter in managed_parameters(self)):
            state = super().state_dict(*args, **kwargs | {"keep_vars": True})
            for name, tensor in state.items():
                if isinstance(tensor, ShardedParameter) and tensor.is_meta:
                    state[name] = form_of(tensor)
                elif isinstance(tensor, torch.Tensor) and not isinstance(tensor, Form):
                    # a wrapped module inside has made that
                    state[name] = tensor.detach()
            return state
        root.engine()
        return as_shown(super().state_dict(*args, **kwargs))

    def set_requires_gradient_sync(self, requires_gradient_sync, *, recurse=True):
        """Whether backward passes reduce gradients, from the next one on. Raises UnsupportedError: of a part alone."""
        root = self._fsdp_root()
        if root.tree.module is not self or not recurse:
            raise UnsupportedError("set_requires_gradient_sync: of a layer alone is not there; call it on the model that was given to fully_shard() last, "
                                   "with recurse=True")
        root.window.set_sync(bool(requires_gradient_sync))

    def set_requires_all_reduce(self, requires_all_reduce, *, recurse=True):
        """Whether backward passes reduce gradients over replicas; of a mesh without them nothing. Raises
        UnsupportedError: of a part alone."""
        root = self._fsdp_root()
        if root.tree.module is not self or not recurse:
            raise UnsupportedError("set_requires_all_reduce: of a layer alone is not there; call it on the model that was given to fully_shard() last, with recurse=True")
        mesh = self.fsdp_wrap.choice.mesh
        if mesh is not None and mesh.ndim == 2:
            root.window.set_all_reduce(bool(requires_all_reduce))

    def set_reshard_after_forward(self, reshard_after_forward, recurse=True):
        """As fully_shard(reshard_after_forward=…) says it. Raises StateError: after the first use."""
        if self._fsdp_root().tree.is_sharded:
            raise StateError("set_reshard_after_forward: the model is sharded already; call it before the first forward, or give fully_shard() the argument "
                             "reshard_after_forward")
        for part in self.modules() if recurse else [self]:
            if isinstance(part, FSDPModule):
                choice = part.fsdp_wrap.choice
                part.fsdp_wrap.choice = choice_of(choice.mesh, reshard_after_forward, choice.precision, choice.offload, choice.stochastic_rounding)

    def set_reshard_after_backward(self, reshard_after_backward, *, recurse=True):
        """Accepted: units are released when they are no longer used."""

    def set_is_last_backward(self, is_last_backward):
        """Accepted: a backward pass ends its own reductions."""

    def set_modules_to_forward_prefetch(self, modules):
        """Accepted: what comes next is known from the step before."""

    set_modules_to_backward_prefetch = set_modules_to_forward_prefetch

    def unshard(self, async_op=False):
        """Accepted: operators gather what they touch."""
        self._fsdp_root().engine()
        return UnshardHandle() if async_op else None

    def reshard(self):
        """Accepted: units are released when they are no longer used."""


def _refused(name, fix):
    def refuse(self, *args, **kwargs):  # pylint: disable=unused-argument
        raise UnsupportedError(f"FSDPModule.{name}() is not there yet; {fix}")

    refuse.__name__, refuse.__doc__ = name, "Raises UnsupportedError."
    return refuse


for _name, _fix in {
        "set_gradient_divide_factor": "gradients are means over ranks; multiply the loss",
        "set_reduce_scatter_divide_factor": "gradients are means over ranks; multiply the loss",
        "set_force_sum_reduction_for_comms": "leave it out",
        "set_custom_all_gather": "leave it out",
        "set_custom_reduce_scatter": "leave it out",
        "set_all_reduce_hook": "leave it out",
        "set_post_optim_event": "leave it out",
        "set_unshard_in_backward": "leave it out",
        "set_allocate_memory_from_process_group_for_comm": "leave it out",
}.items():
    setattr(FSDPModule, _name, _refused(_name, _fix))


def register_fsdp_forward_method(module, method_name):
    """Lets another method of a wrapped module be called as its forward. Nothing where the module is not wrapped."""
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ConfigError(f"register_fsdp_forward_method: {type(module).__name__} has no method '{method_name}'; correct the name")
    method = getattr(module, method_name)

    @functools.wraps(method)
    def sharded(*args, **kwargs):
        return module.fsdp_wrap.root().sharded().calls.method(module, method, args, kwargs)

    module.__dict__[method_name] = sharded


def save_checkpoint(model, optimizer, folder, tag=None):
    """Saves the weights and the states of `optimizer` as folder/tag, by default global_stepN. Collective."""
    _root_of_model("save_checkpoint", model).save(optimizer, folder, tag)


def load_checkpoint(model, optimizer, folder, tag=None):
    """Goes on where save_checkpoint() has saved, at any number of ranks; False: there is nothing in `folder`.
    Collective."""
    return _root_of_model("load_checkpoint", model).load(optimizer, folder, tag)


def _root_of_model(call, model):
    if not isinstance(model, FSDPModule) or model.fsdp_wrap.root().tree.module is not model:
        raise StateError(f"{call}: give it the model that was given to fully_shard() last")
    return model.fsdp_wrap.root()


def share_comm_ctx(modules):
    """Accepted: roots have nothing to share."""
