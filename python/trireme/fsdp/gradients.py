"""Gradients as an FSDP program sees them: this rank's elements, with the shape of the whole."""
import torch
from torch.utils import _pytree

from .. import agreement, ranks
from .._native import core
from ..errors import StateError, UnsupportedError
from ..operators import fills_at_random, gives_views, meaning
from .tensors import Placed, Whole, lent
from .values import Value, drawn

_aten = torch.ops.aten
# Whole reductions, by how they join parts: (of this rank's elements; how ranks' results are joined).
_JOINS = {"sum": (lambda func, own: func(own), "sum"), "mean": (lambda func, own: own.sum(), "sum"), "any": (lambda func, own: func(own), "max"),
          "all": (lambda func, own: func(own), "min"), "max": (lambda func, own: func(own) if own.numel() else own.new_full((), -torch.inf), "max"),
          "min": (lambda func, own: func(own) if own.numel() else own.new_full((), torch.inf), "min")}
# Those that no join of ranks' results gives: two sums, and one of powers.
_SPREADS = {_aten.std: lambda variance: variance.sqrt(), _aten.var: lambda variance: variance}
_NORMS = {_aten.linalg_vector_norm, _aten.norm}
_FOREACH = "_foreach_"
_ONE_OF = {"maximum_": "clamp_min_", "minimum_": "clamp_max_"}  # of what _foreach has in place and tensors have not


class Gradient(Placed, torch.Tensor):
    """This rank's elements of a parameter's reduced gradient, with the shape of the whole.

    Operators by element and whole reductions work; others are refused by name. Writes in place change what the
    optimizer sees.
    """

    @staticmethod
    def __new__(cls, parameter, own, pass_number=None, dtype=None):
        """`pass_number`: Window.pass_number() of the memory that the step reads; None: a value of the program's own.

        `own`: None: Window.reduced_part(), in `dtype`, when it is asked for.
        """
        dtype, device = (dtype, parameter.device) if own is None else (own.dtype, own.device)
        made = torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=dtype, device=device)  # pylint: disable=protected-access
        made.parameter, made._own, made._pass_number = parameter, own, pass_number
        return made

    takes_values = True  # operators of Values and Gradients are these
    is_live = property(lambda self: self._pass_number is not None, doc="Whether the step reads this memory.")

    @property
    def own(self):
        """This rank's elements. Collective when first asked for. Raises StateError: a later backward pass or step has
        changed them."""
        if self.is_past:
            raise StateError("a gradient that was read before the last backward pass or step; read parameter.grad again, and clone() what is to stay")
        if self._own is None:
            self._own = self.parameter.fsdp_root().window.reduced_part(self.parameter)
        return self._own

    is_past = property(lambda self: self.is_live and self._pass_number != self.parameter.fsdp_root().window.pass_number(), doc="Whether its memory has changed since.")
    __torch_function__ = torch._C._disabled_torch_function_impl  # pylint: disable=protected-access

    def _fsdp_parameter(self):
        return self.parameter

    def __repr__(self, **_):
        return f"Gradient(shape={list(self.shape)}, dtype={self.dtype})"

    def to_local(self):
        """This rank's elements, [n] of the flattened gradient: the memory that the optimizer reads."""
        return lent(self.own, self.parameter)

    _local_tensor = property(to_local)

    def full_tensor(self):
        """A copy, whole and plain. Collective."""
        return core.whole_of_parts(self.parameter, self.own).to(self.dtype)

    def _refuse_reading(self, *_args, **_kwargs):
        raise UnsupportedError(f"numpy(), tolist() and the like of a gradient of shape {tuple(self.shape)}, of which this rank has a part: take "
                               "gradient.full_tensor().numpy(), on every rank, or to_local()")

    numpy = tolist = __array__ = _refuse_reading

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = _with_wholes(func, args, kwargs or {})
        if func.overloadpacket.__name__.startswith(_FOREACH):
            return _one_by_one(func, args, kwargs)
        gradients = [arg for arg in args if isinstance(arg, Gradient)]
        first = gradients[0] if gradients else None
        if func.overloadpacket is _aten._amp_foreach_non_finite_check_and_unscale_:
            return _unscale(*args)
        if first is not None and meaning(func).is_each and all(one.parameter is first.parameter for one in gradients):
            if not func._schema.is_mutable or isinstance(args[0], Gradient):  # pylint: disable=protected-access
                if all(map(first.goes_with, args)):
                    return first.by_element(func, args, kwargs)
            elif isinstance(args[0], torch.Tensor):
                return first.into_whole(func, args, kwargs)
        found = first.of_all(func, args, kwargs) if len(gradients) == 1 and first is args[0] else None
        if found is not None:
            return found
        shapes = [tuple(one.shape) for one in _pytree.tree_leaves((args, kwargs)) if isinstance(one, Gradient)]
        raise UnsupportedError(f"{func} of gradients of which this rank has parts, of shapes {shapes}: operators by element work, and "
                               "norms, sum(), mean(), std(), max(), min(), any() and all() of the whole, without a dim; take gradient.full_tensor() for others")

    def goes_with(self, arg):
        """Whether an operator by element may have `arg` beside this gradient: a number, or a tensor that has one for
        each element."""
        if isinstance(arg, Gradient) or not isinstance(arg, torch.Tensor) or arg.dim() == 0:
            return True
        return arg.dim() <= self.dim() and all(size in (1, own) for size, own in zip(reversed(arg.shape), reversed(self.shape)))

    def of_all(self, func, args, kwargs):
        """A number of all elements, or random ones in their place; None: `func` is no such operator. Collective."""
        totals, packet = self.parameter.fsdp_root().totals, func.overloadpacket
        if packet in _NORMS and _is_whole_norm(args):
            return totals.norm([self], 2.0 if len(args) < 2 else float(args[1])).as_subclass(Whole)
        is_of_all = _is_of_all(args, kwargs)
        if meaning(func).reduction in _JOINS and is_of_all:
            compute, join = _JOINS[meaning(func).reduction]
            total = totals.reduce(compute(packet, self.own), join)
            return (total / self.numel() if meaning(func).reduction == "mean" else total).as_subclass(Whole)
        if packet in _SPREADS and is_of_all:
            correction = kwargs.get("correction")
            return _SPREADS[packet](totals.variance(self, 1 if correction is None else correction)).to(self.dtype).as_subclass(Whole)
        if packet is _aten._local_scalar_dense and self.numel() == 1:  # pylint: disable=protected-access
            return self.full_tensor().item()
        if not fills_at_random(func) or kwargs.get("dtype") not in (None, self.dtype):
            return None
        own = core.own_part(self.parameter, drawn(lambda tensor: func(tensor, *args[1:], **kwargs), self))
        if not func._schema.is_mutable:  # pylint: disable=protected-access
            return type(self)(self.parameter, own)
        self.own.copy_(own)
        return self.was_written()

    def was_written(self):
        """The program has written it. Returns it."""
        if self.is_live:
            core.gradient_written(self.parameter)
        return self

    def by_element(self, func, args, kwargs):
        """func on this rank's elements."""
        own = [self._part_of(func, arg) for arg in args]
        result = func(*own, **{name: value for name, value in kwargs.items() if name != "memory_format"})
        if result.is_complex() and not self.is_complex():
            raise UnsupportedError(f"{func} of a gradient gives complex numbers, of which only wholes are there; take gradient.full_tensor()")
        if not func._schema.is_mutable:  # pylint: disable=protected-access
            return type(self)(self.parameter, result, self._pass_number if gives_views(func) else None)
        return args[0].was_written()

    def _part_of(self, func, arg):
        """An operator's argument, of this rank's elements alone. Collective where it is no parameter. Raises
        StateError: it differs by rank."""
        if isinstance(arg, Gradient):
            return arg.own
        if not isinstance(arg, torch.Tensor) or arg.dim() == 0:
            return arg
        whole = arg.expand(self.shape)
        if not isinstance(whole, Whole) and not core.is_managed(whole):
            agreement.check_tensor(ranks.world(), f"{func} beside the gradient of '{self.parameter.fsdp_root().tree.name(self.parameter)}'", whole)
        return core.own_part(self.parameter, whole)

    def into_whole(self, func, args, kwargs):
        """func writes a tensor that every rank has whole, such as the parameter itself, by whole gradients.
        Collective."""
        wholes = [arg.full_tensor() if isinstance(arg, Gradient) else arg for arg in args[1:]]
        return func(args[0], *wholes, **kwargs)


class PartGradient(Gradient):
    """A Gradient under FSDP1, where PyTorch's are the elements of each rank: numbers of all elements are of these, and
    a program adds them up over ranks itself."""

    def numel(self):
        """The number of this rank's elements."""
        return self.own.numel()

    def of_all(self, func, args, kwargs):
        """A number of this rank's elements; of others see Gradient's."""
        packet = func.overloadpacket
        if packet in _NORMS and _is_whole_norm(args):
            return torch.linalg.vector_norm(self.own, *args[1:2])
        if (meaning(func).reduction in _JOINS or packet in _SPREADS) and _is_of_all(args, kwargs):
            return packet(self.own, **{name: value for name, value in kwargs.items() if name != "keepdim"})
        return super().of_all(func, args, kwargs)


def _with_wholes(func, args, kwargs):
    """Values that are read, as wholes; what is written stays. Collective where there are some."""
    if not any(isinstance(one, Value) for one in _pytree.tree_leaves((args, kwargs))):
        return args, kwargs
    read = lambda given: _pytree.tree_map_only(Value, lambda one: one.read().as_subclass(Whole), given)
    if func._schema.is_mutable:  # pylint: disable=protected-access
        return (args[0], *read(tuple(args[1:]))), read(kwargs)
    return read(args), read(kwargs)


def _one_by_one(func, args, kwargs):
    """An operator on lists, of each of its tensors alone. Collective where that is."""
    name = func.overloadpacket.__name__.removeprefix(_FOREACH)
    count = next(len(arg) for arg in args if isinstance(arg, (list, tuple)))
    if name == "norm":
        return [torch.linalg.vector_norm(one, *args[1:2]) for one in args[0]]
    operator = getattr(_aten, _ONE_OF.get(name, name))
    results = []
    for index in range(count):
        one = [arg[index] if isinstance(arg, (list, tuple)) else arg for arg in args]
        more = dict(kwargs)
        if name.startswith("addc") and len(one) > 3:
            more["value"] = one.pop()
        results.append(operator(*one, **more))
    return None if func._schema.is_mutable else results  # pylint: disable=protected-access


def _unscale(gradients, is_infinite, inverse_scale):
    """A scaler's: multiplies gradients by a number; `is_infinite` becomes 1 on every rank where one has an element that
    is not finite. Collective."""
    own = [one.own if isinstance(one, Gradient) else one for one in gradients]
    if own := [one for one in own if one.numel()]:
        torch._amp_foreach_non_finite_check_and_unscale_(own, is_infinite, inverse_scale)  # pylint: disable=protected-access
    for one in gradients:
        if isinstance(one, Gradient):
            one.was_written()
    ranks.world().all_reduce(is_infinite, "max")


def scale(gradients, factor):
    """Multiplies all of `gradients` by a number, in place."""
    if parts := [gradient.own for gradient in gradients if gradient.own.numel()]:
        torch._foreach_mul_(parts, factor)  # pylint: disable=protected-access
    for gradient in gradients:
        gradient.was_written()


def _is_of_all(args, kwargs):
    return (len(args) == 1 or args[1] is None or args[1] == []) and not any(args[2:]) and not kwargs.get("keepdim")


def _is_whole_norm(args):
    return len(args) < 3 or args[2] in (None, []) or not args[2]
