"""The tensors that an FSDP program sees: parameters, their gradients, and what state_dict() gives."""
import functools

import torch
from torch.utils import _pytree

from .. import ranks
from .._native import core
from ..errors import StateError, UnsupportedError
from ..parameters import numbered

_aten = torch.ops.aten
# Elements of the result depend on the same elements of the arguments alone, so every rank computes its own.
_ELEMENTWISE = {_aten.mul, _aten.mul_, _aten.div, _aten.div_, _aten.add, _aten.add_, _aten.sub, _aten.sub_, _aten.neg, _aten.abs, _aten.pow, _aten.sqrt,
                _aten.square, _aten.zero_, _aten.fill_, _aten.copy_, _aten.clone, _aten.detach, _aten.alias, _aten.isnan, _aten.isinf, _aten.clamp,
                _aten.clamp_, _aten.clamp_min_, _aten.clamp_max_, _aten.nan_to_num, _aten.nan_to_num_, _aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt,
                _aten.ge, _aten._to_copy, _aten.zeros_like, _aten.logical_not, _aten.logical_or, _aten.logical_and}
_ALIASES = {_aten.detach, _aten.alias}
# Whole reductions: (of this rank's elements, or of none; how ranks' results are joined).
_REDUCTIONS = {_aten.sum: (lambda own: own.sum(), "sum"), _aten.mean: (lambda own: own.sum(), "sum"),
               _aten.any: (lambda own: own.any(), "max"), _aten.all: (lambda own: own.all(), "min"),
               _aten.max: (lambda own: own.max() if own.numel() else torch.full((), -torch.inf), "max"),
               _aten.min: (lambda own: own.min() if own.numel() else torch.full((), torch.inf), "min")}
_NORMS = {_aten.linalg_vector_norm, _aten.norm}


class Whole(torch.Tensor):
    """A tensor of which every rank has all, or gets all by any operator; with DTensor's methods."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pylint: disable=protected-access

    def full_tensor(self):
        """A copy, whole and plain. Of a parameter collective."""
        parameter = numbered(self) if core.is_managed(self) else None
        return core.whole_tensor(self) if parameter is None else parameter.fsdp_root().full_parameter(parameter)

    def __deepcopy__(self, memo):
        """A copy, whole and plain. Of a parameter collective."""
        memo[id(self)] = self.full_tensor()
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # files are read without this package


class ShardedParameter(torch.nn.Parameter):
    """A parameter of a wrapped module. Any operator finds it whole; `grad` is this rank's part of the reduced gradient."""

    fsdp_root = None  # a function that gives the Root

    @property
    def grad(self):
        """A Gradient; None: no rank's backward passes gave one. Collective when first read after a backward pass."""
        return self.fsdp_root().gradient_of(self)

    @grad.setter
    def grad(self, value):
        self.fsdp_root().set_gradient(self, value)

    @grad.deleter
    def grad(self):
        self.fsdp_root().set_gradient(self, None)

    def full_tensor(self):
        """A copy, whole and plain. Collective."""
        return self.fsdp_root().full_parameter(self)

    def register_post_accumulate_grad_hook(self, hook):
        """Raises UnsupportedError."""
        raise UnsupportedError("register_post_accumulate_grad_hook: gradients are reduced after the backward pass; step by optimizer.step() after it")

    def register_hook(self, hook):
        """As torch's, on one rank. Raises UnsupportedError: on several."""
        if ranks.world().size > 1:
            refuse_hook(f"of shape {tuple(self.shape)}")
        return super().register_hook(hook)

    def to_local(self):
        """A copy of the elements that this rank updates, [n] of the flattened parameter. Collective."""
        root = self.fsdp_root()
        root.engine()
        return root.local_parameter(self)


def refuse_hook(which):
    """Raises UnsupportedError: hooks of a parameter run before ranks' gradients are averaged."""
    raise UnsupportedError(f"register_hook() of the parameter {which}: the hook would get this rank's own gradient, before the mean over ranks; change or read "
                           "parameter.grad after backward()")


def watch():
    """From here on torch.autograd.grad() knows sharded parameters. Called once."""
    original = torch.autograd.grad

    @functools.wraps(original)
    def grad(outputs, inputs, *args, **kwargs):
        inputs = inputs if isinstance(inputs, (torch.Tensor, torch.autograd.graph.GradientEdge)) else tuple(inputs)
        found = [one for one in (inputs if type(inputs) is tuple else [inputs]) if isinstance(one, ShardedParameter)]
        if found and ranks.world().size > 1:
            raise UnsupportedError(f"torch.autograd.grad() by a sharded parameter of shape {tuple(found[0].shape)}: it would be this rank's own gradient, not the mean "
                                   "over ranks; call loss.backward() and read parameter.grad")
        return original(outputs, inputs, *args, **kwargs)

    torch.autograd.grad = grad


def show(parameter, root):
    """Makes `parameter` a ShardedParameter, the same object. Raises UnsupportedError: it is a tensor of another class."""
    if type(parameter) not in (torch.nn.Parameter, ShardedParameter):
        raise UnsupportedError(f"fully_shard: a parameter of shape {tuple(parameter.shape)} is a {type(parameter).__name__}; only plain torch.nn.Parameter are "
                               "sharded: take those of subclasses, such as quantised or distributed ones, as buffers, or out of the module")
    if parameter._post_accumulate_grad_hooks:  # pylint: disable=protected-access
        raise UnsupportedError(f"fully_shard: a parameter of shape {tuple(parameter.shape)} has a hook of register_post_accumulate_grad_hook(); gradients are reduced "
                               "after the backward pass: step by optimizer.step() after it")
    if parameter.grad is not None and type(parameter) is torch.nn.Parameter:
        raise StateError(f"fully_shard: a parameter of shape {tuple(parameter.shape)} has a gradient already; set it to None first")
    parameter.__class__ = ShardedParameter
    parameter.fsdp_root = root


class Gradient(torch.Tensor):
    """This rank's elements of a parameter's reduced gradient, with the shape of the whole.

    Operators by element and whole reductions work; others are refused by name. Writes in place change what the optimizer sees.
    """

    @staticmethod
    def __new__(cls, parameter, own, pass_number=None):
        """`pass_number`: Root.pass_number() of the memory that the step reads; None: a value of the program's own."""
        made = torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=own.dtype, device=own.device)  # pylint: disable=protected-access
        made.parameter, made._own, made._pass_number = parameter, own, pass_number
        return made

    is_live = property(lambda self: self._pass_number is not None, doc="Whether the step reads this memory.")

    @property
    def own(self):
        """This rank's elements. Raises StateError: a later backward pass or step has changed them."""
        if self.is_live and self._pass_number != self.parameter.fsdp_root().pass_number():
            raise StateError("a gradient that was read before the last backward pass or step; read parameter.grad again, and clone() what is to stay")
        return self._own

    __torch_function__ = torch._C._disabled_torch_function_impl  # pylint: disable=protected-access

    def __repr__(self, **_):
        return f"Gradient(shape={list(self.shape)}, {self._own.numel()} elements here)"

    def to_local(self):
        """This rank's elements, [n] of the flattened gradient: the memory that the optimizer reads."""
        return self.own

    def full_tensor(self):
        """A copy, whole and plain. Collective."""
        return self.parameter.fsdp_root().full(self)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        packet, kwargs = func.overloadpacket, kwargs or {}
        gradients = [arg for arg in args if isinstance(arg, Gradient)]
        first = gradients[0] if gradients else None
        if packet is _aten._amp_foreach_non_finite_check_and_unscale_:
            return _unscale(*args)
        if first is not None and packet in _ELEMENTWISE and "out" not in kwargs and all(map(first.goes_with, args)):
            return first.by_element(func, args, kwargs)
        root = first.parameter.fsdp_root() if first is not None else None
        if root is not None and packet in _NORMS and len(gradients) == 1 and _is_whole_norm(args):
            return root.norm([first], 2.0 if len(args) < 2 else float(args[1])).as_subclass(Whole)
        if root is not None and packet in _REDUCTIONS and len(args) == 1 and not kwargs.get("keepdim"):
            compute, join = _REDUCTIONS[packet]
            total = root.reduce(compute(first.own), join)
            return (total / first.numel() if packet is _aten.mean else total).as_subclass(Whole)
        shapes = [tuple(one.shape) for one in _pytree.tree_leaves((args, kwargs)) if isinstance(one, Gradient)]
        raise UnsupportedError(f"{func} of gradients of which this rank has parts, of shapes {shapes}: operators by element, norms, "
                               "sum(), mean(), max(), min(), any() and all() work; take gradient.full_tensor() for others")

    def goes_with(self, arg):
        """Whether an operator by element may have `arg` beside this gradient."""
        if isinstance(arg, Gradient):
            return arg.parameter is self.parameter
        return not isinstance(arg, torch.Tensor) or arg.dim() == 0

    def by_element(self, func, args, kwargs):
        """func on this rank's elements."""
        own = [arg.own if isinstance(arg, Gradient) else arg for arg in args]
        result = func(*own, **{name: value for name, value in kwargs.items() if name != "memory_format"})
        if not func._schema.is_mutable:  # pylint: disable=protected-access
            return Gradient(self.parameter, result, self._pass_number if func.overloadpacket in _ALIASES else None)
        written = args[0]
        if isinstance(written, Gradient) and written.is_live:
            written.parameter.fsdp_root().written(written.parameter)
        return written


def _unscale(gradients, is_infinite, inverse_scale):
    """A scaler's: multiplies gradients by a number; `is_infinite` becomes 1 on every rank where one has an element that is not finite. Collective."""
    own = [one.own if isinstance(one, Gradient) else one for one in gradients]
    if own := [one for one in own if one.numel()]:
        torch._amp_foreach_non_finite_check_and_unscale_(own, is_infinite, inverse_scale)  # pylint: disable=protected-access
    for one in gradients:
        if isinstance(one, Gradient) and one.is_live:
            one.parameter.fsdp_root().written(one.parameter)
    ranks.world().all_reduce(is_infinite, "max")


def _is_whole_norm(args):
    return len(args) < 3 or args[2] in (None, []) or not args[2]
