"""Numbers that a program reads off a part of a sequence.

A part has this rank's tokens, so what a program reads as a number is of this rank. Such a number knows the whole sequence's: a
program's decisions and factors go by that, and its sizes and indices by this rank's.
"""
import functools
import math
import operator
import sys
import weakref

import torch

from .errors import StateError

_cores = weakref.WeakSet()


def watch(core):
    """Numbers of the parts of `core`, an engine whose samples are cut, are Lengths from now on."""
    if not _cores:
        _take_readers()
    _cores.add(core)


class Length(int):
    """A number of this rank's tokens, or one computed from such; `whole` is that of all tokens, None where it is unknown.

    An index or a size is this rank's. Comparisons, true division, powers, float(), str() and math's logarithms take the whole.
    """

    def __new__(cls, local, whole):
        made = super().__new__(cls, local)
        made.whole = whole
        return made

    def known(self, what):
        """The whole's number. Raises StateError, which names `what`: tokens that were selected on this rank have none."""
        if self.whole is None:
            raise StateError(f"{what}: {int(self)} is the number of tokens that were selected on this rank, and a number that a program computes "
                             "by is to be of all ranks; count by an operator (mask.sum()), which is of all tokens")
        return self.whole

    def __float__(self):
        return float(self.known("float()"))

    def __bool__(self):
        return bool(int(self) if self.whole is None else self.whole)

    def __repr__(self):
        return repr(int(self) if self.whole is None else self.whole)

    def __str__(self):
        return repr(self)

    def __format__(self, layout):
        return format(int(self) if self.whole is None else self.whole, layout)

    def __round__(self, digits=None):
        return _computed(round, self, digits)

    def __abs__(self):
        return _computed(abs, self)

    def __neg__(self):
        return _computed(operator.neg, self)

    def __pos__(self):
        return self

    def bit_length(self):
        """Bits of the whole's number."""
        return self.known("bit_length()").bit_length()

    def __reduce__(self):
        return int, (int(self),)

    __hash__ = int.__hash__


def _number(local, whole):
    """What a program gets: a plain number where it is the same of one rank and of all."""
    if local == whole:
        return local
    for core in list(_cores):
        core.note_number(local)
    return Length(local, whole)


def _whole(number):
    return number.whole if isinstance(number, Length) else number


def _computed(function, *numbers):
    """`function` of this rank's numbers, and of the whole's."""
    wholes = [_whole(number) for number in numbers]
    is_unknown = any(isinstance(number, Length) and number.whole is None for number in numbers)
    return _number(function(*(int(number) if isinstance(number, Length) else number for number in numbers)), None if is_unknown else function(*wholes))


def _arithmetic(function, is_reflected):
    def method(self, other):
        if isinstance(other, float):
            return function(other, float(self)) if is_reflected else function(float(self), other)
        if not isinstance(other, int):
            return NotImplemented
        return _computed(function, other, self) if is_reflected else _computed(function, self, other)
    return method


def _of_the_whole(function, name, is_reflected):
    def method(self, other, *more):
        if not isinstance(other, (int, float)):
            return NotImplemented
        pair = self.known(name), other.known(name) if isinstance(other, Length) else other
        return function(*(reversed(pair) if is_reflected else pair), *more)
    return method


def _comparison(function, name):
    def method(self, other):
        if not isinstance(other, (int, float)):
            return NotImplemented
        if isinstance(other, Length):
            if other.whole is None or self.whole is None:
                return function(int(self), int(other))
            return function(self.whole, other.whole)
        if self.whole is None and other == 0:  # whether there is any
            return function(int(self), 0)
        whole = self.known(name)
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):  # it checks the tensors that are there
            return function(int(self), other)
        if function(int(self), other) == function(whole, other):
            return function(whole, other)
        if other == int(self):
            raise StateError(f"{name}: a program compares a length, {int(self)} on this rank and {whole} in all, with {other}, which may be a number "
                             "of its own or a length that it has read elsewhere; read both from shapes of activations, or compare before cut()")
        return function(whole, other)
    return method


for _name in ("add", "sub", "mul", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor"):
    _function = getattr(operator, f"__{_name}__")
    setattr(Length, f"__{_name}__", _arithmetic(_function, False))
    setattr(Length, f"__r{_name}__", _arithmetic(_function, True))
for _name, _function in (("truediv", operator.truediv), ("pow", pow), ("divmod", divmod)):
    setattr(Length, f"__{_name}__", _of_the_whole(_function, _name, False))
    setattr(Length, f"__r{_name}__", _of_the_whole(_function, _name, True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Length, f"__{_name}__", _comparison(getattr(operator, _name), f"__{_name}__"))


# --- readers ---

def _sizes_of_whole(tensor):
    """The sizes of the tensor that `tensor` is a part of, None for what is not known; None where it is no part."""
    for core in list(_cores):
        if (sizes := core.whole_sizes(tensor)) is not None:
            return [None if size < 0 else size for size in sizes]
    return None


def _replace(owner, name, make):
    original = getattr(owner, name)
    if not hasattr(original, "trireme_original"):
        made = functools.wraps(original)(make(original))
        made.trireme_original = original
        if (builtin := torch.jit._builtins._find_builtin(original)) is not None:  # pylint: disable=protected-access
            torch.jit._builtins._register_builtin(made, builtin)  # TorchScript knows functions by identity
        setattr(owner, name, made)


def _take_readers():
    for name in ("tolist", "numpy", "__array__"):
        _replace(torch.Tensor, name, functools.partial(_refused, name))
    if not isinstance(torch.Tensor.__dict__.get("shape"), property):
        torch.Tensor.shape = property(_shape(torch._C.TensorBase.shape.__get__))  # pylint: disable=protected-access
    _replace(torch.Tensor, "size", _size)
    for name in ("numel", "nelement"):
        _replace(torch.Tensor, name, _numel)
    _replace(torch.Tensor, "__len__", _len)
    for name in ("__getitem__", "__setitem__"):
        _replace(torch.Tensor, name, _indexed)
    _replace(torch.Tensor, "narrow", _narrowed)
    for name in ("view", "reshape", "unflatten"):
        _replace(torch.Tensor, name, functools.partial(_viewed, name))
    _replace(torch, "reshape", functools.partial(_viewed, "reshape"))
    _replace(torch, "unflatten", functools.partial(_viewed, "unflatten"))
    _replace(torch, "numel", _numel)
    for name in ("log", "log2", "log10"):  # they read an int's digits, float() would not be asked
        _replace(math, name, _logarithm)
    for name in ("isqrt", "gcd"):
        _replace(math, name, lambda original: lambda *numbers: _computed(original, *numbers))
    if not hasattr(torch.autograd.Function.apply, "trireme_original"):
        torch.autograd.Function.apply = classmethod(_applied(torch.autograd.Function.apply.__func__))


def _refused(name, original):
    def read(self, *args, **kwargs):
        if _cores and _sizes_of_whole(self) is not None:
            raise StateError(f"{name}: {tuple(map(int, self.shape))} is this rank's part of a sequence, and numbers read from it are of these tokens "
                             "alone; read them from the whole batch, before cut(), or from a total such as sum()")
        return original(self, *args, **kwargs)
    return read


def _shape(original):
    def shape(self):
        sizes = original(self)
        if not _cores or (whole := _sizes_of_whole(self)) is None:
            return sizes
        return torch.Size(map(_number, sizes, whole))
    return shape


def _size(original):
    def size(self, dim=None):
        if not _cores:
            return original(self) if dim is None else original(self, dim)
        return self.shape if dim is None else self.shape[dim] if isinstance(dim, int) else original(self, dim)
    return size


def _numel(original):
    def numel(self):
        if not _cores or (whole := _sizes_of_whole(self)) is None:
            return original(self)
        return _number(original(self), None if None in whole else math.prod(whole))
    return numel


def _len(original):
    def length(self):
        local = int(original(self))
        if _cores and (whole := _sizes_of_whole(self)) is not None and whole[0] != local:
            if whole[0] is None:
                Length(local, None).known("len()")
            raise StateError(f"len(): {local} tokens of this rank, {whole[0]} in all; len() gives a plain number: read shape[0]")
        return local
    return length


def _indexed(original):
    def indexed(self, index, *value):
        if _cores and (whole := _sizes_of_whole(self)) is not None:
            _check_slices(self, index, whole)
        return original(self, index, *value)
    return indexed


def _narrowed(original):
    def narrow(self, dim, start, length):
        if _cores and isinstance(start, int) and (whole := _sizes_of_whole(self)) is not None:
            _check_slices(self, (slice(None),) * (dim % self.dim()) + (slice(start, start + length),), whole)
        return original(self, dim, start, length)
    return narrow


def _check_slices(tensor, index, whole):
    """A slice [:n] of a part that n does not shorten runs no operator; of all tokens it may."""
    parts = index if isinstance(index, tuple) else (index,)
    taken = [part.dim() if isinstance(part, torch.Tensor) and part.dtype == torch.bool else 1 for part in parts if part is not None and part is not Ellipsis]
    dim = 0
    for part in parts:
        if part is Ellipsis:
            dim += tensor.dim() - sum(taken)
        elif isinstance(part, slice):
            end, sizes = part.stop, tensor.shape
            if dim < len(whole) and not isinstance(sizes[dim], Length) and any(isinstance(place, Length) for place in (part.start, end)):
                raise StateError(f"a slice of dim {dim} of {tuple(map(int, sizes))}, which no tokens run along, by a length of this rank; take the number "
                                 "from the batch before cut()")
            if dim < len(whole) and isinstance(end, int) and not isinstance(end, Length) and isinstance(sizes[dim], Length):
                local = int(sizes[dim])
                if whole[dim] is None or local <= end < whole[dim]:
                    raise StateError(f"a slice [:{end}] of {local} tokens of this rank, of {whole[dim] or 'those selected'} in all, is another one of the "
                                     "whole sequence; slice the batch before cut(), or mask tokens by a comparison of position_ids")
            dim += 1
        elif isinstance(part, int) and not isinstance(part, (bool, Length)):
            local = int(tensor.shape[dim]) if dim < len(whole) else 0
            if dim < len(whole) and whole[dim] != local and local <= part < (whole[dim] or part + 1):
                raise StateError(f"token {part} is not among the {local} of this rank; take it by an index tensor that is computed from whole tensors")
            dim += 1
        elif part is not None:
            dim += part.dim() if isinstance(part, torch.Tensor) and part.dtype == torch.bool else 1


def _viewed(name, original):
    def view(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        if _cores and isinstance(self, torch.Tensor) and (whole := _sizes_of_whole(self)) is not None:
            _check_view(name, self, whole, args, kwargs, result)
        return result
    return view


def _check_view(name, tensor, whole, args, kwargs, result):
    """The sizes that a program gives are those of a view of the whole, where lengths among them are the whole's."""
    of_result = _sizes_of_whole(result)
    dim, sizes = 0, kwargs.get("sizes", kwargs.get("size", kwargs.get("shape", args)))
    if name == "unflatten":
        dim, sizes = kwargs.get("dim", args[0] if args else 0), kwargs.get("sizes", args[1] if len(args) > 1 else args[-1:])
        dim = dim + tensor.dim() if isinstance(dim, int) and dim < 0 else dim
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = sizes[0]
    if of_result is not None and None in of_result and None in whole and name != "unflatten":
        tokens = of_result.index(None)
        if tokens < len(sizes) and sizes[tokens] != -1 and not isinstance(sizes[tokens], Length):
            raise StateError(f"{name}: of {tuple(map(int, tensor.shape))}, the tokens that were selected on this rank, becomes {tuple(map(int, result.shape))}; "
                             "they are in an order of their own, and can be told from one another in one dim alone (-1)")
    if of_result is None or None in of_result or None in whole or not all(isinstance(size, int) for size in sizes) or not isinstance(dim, int):
        return
    asked = [_whole(size) for size in sizes]
    if None in asked:
        return
    numel = whole[dim] if name == "unflatten" else math.prod(whole)
    if -1 in asked:
        known = -math.prod(asked)
        asked[asked.index(-1)] = numel // known if known > 0 else 0
    if name == "unflatten":
        asked = whole[:dim] + asked + whole[dim + 1:]
    if asked != of_result:
        raise StateError(f"{name}: {tuple(map(int, tensor.shape))}, a part of {tuple(whole)}, becomes {tuple(map(int, result.shape))}, and the whole would "
                         f"become {tuple(asked)}, which is not the same view; take lengths from x.shape, and split tokens by -1 or not at all")


def _logarithm(original):
    def logarithm(number, *base):
        return original(number.known("math.log()") if isinstance(number, Length) else number, *base)
    return logarithm


def _applied(original):
    """A custom function whose result is of all tokens, of arguments that are parts, has a backward that knows of one rank."""
    @functools.wraps(original)
    def apply(cls, *args, **kwargs):
        results = original(cls, *args, **kwargs)
        if _cores and torch.is_grad_enabled() and cls.__module__.partition(".")[0] not in ("torch", "trireme"):
            parts = [tensor for tensor in args if isinstance(tensor, torch.Tensor) and _sizes_of_whole(tensor) is not None]
            for result in results if isinstance(results, (tuple, list)) else (results,):
                if parts and isinstance(result, torch.Tensor) and result.requires_grad and _sizes_of_whole(result) is None:
                    raise StateError(f"{cls.__qualname__}.apply: its argument {tuple(map(int, parts[0].shape))} is a part of a sequence and its result "
                                     f"{tuple(result.shape)} is not, so its backward() would give this rank's gradient alone; sum by torch's "
                                     "operators outside of the function")
        return results

    apply.trireme_original = original
    return apply
