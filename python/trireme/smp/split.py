"""How the arguments of a step function are cut over its micro-batches."""
import collections.abc
import dataclasses
import inspect

import torch

from ..errors import ConfigError, ShapeError, UnsupportedError
from .containers import rebuilt


@dataclasses.dataclass(frozen=True)
class Parts:
    """The arguments of each micro-batch, (args, kwargs), and how many of a batch's samples each has; None: as many."""

    batches: list
    samples: list | None

    @property
    def shares(self):
        """The share of the samples that each micro-batch has; None: all have as many."""
        return self.samples and [count / sum(self.samples) for count in self.samples]


class Splitter:
    """Cuts the arguments of one function.

    non_split_inputs    names of arguments that every micro-batch gets as they are
    input_split_axes    {name of an argument: dim along which its tensors are cut}; 0 for all others

    Raises  ConfigError: a name that is none of the function's arguments, or an axis that is no whole number.
    """

    def __init__(self, function, non_split_inputs=(), input_split_axes=None):
        if isinstance(non_split_inputs, str) or not isinstance(non_split_inputs, collections.abc.Iterable):
            raise ConfigError(f"smp.step(non_split_inputs={non_split_inputs!r}): expected a list of names of arguments")
        if not isinstance(input_split_axes, (collections.abc.Mapping, type(None))):
            raise ConfigError(f"smp.step(input_split_axes={input_split_axes!r}): expected a dict, of names of arguments to dims")
        self._signature = inspect.signature(function)
        self._whole, self._axes = tuple(non_split_inputs), dict(input_split_axes or {})
        parameters = self._signature.parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            self._check_names("non_split_inputs", self._whole)
            self._check_names("input_split_axes", self._axes)
        for name, axis in self._axes.items():
            if not isinstance(axis, int) or isinstance(axis, bool):
                raise ConfigError(f"smp.step(input_split_axes={{{name!r}: {axis!r}}}): expected the number of a dim")
            if name in self._whole:
                raise ConfigError(f"smp.step: '{name}' is in non_split_inputs and in input_split_axes; name it in one of them")

    def split(self, args, kwargs, micro_batches):
        """The Parts. Tensors are views, in lists, tuples, sets and dicts, too; an object with a method
        smp_slice(micro_batches, micro_batch, axis) gives its own parts; anything else is the same object in all. Where
        the number of micro-batches does not divide the samples, the first ones have one more.

        Raises  ShapeError: a tensor with no dim of samples, with fewer than micro-batches, or with other samples than
                the rest where not all micro-batches have as many; names the argument.
                UnsupportedError: a tensor that has no slices, or an object that cuts itself beside parts that differ.
        """
        bound = self._signature.bind(*args, **kwargs)
        batches = []
        cut = _Cut(micro_batches)
        for cut.micro_batch in range(micro_batches):
            part = self._signature.bind(*args, **kwargs)  # a copy
            for name, value in bound.arguments.items():
                part.arguments[name] = self._part_of_argument(name, value, cut)
            batches.append((part.args, part.kwargs))
        return Parts(batches, cut.samples())

    def mapped(self, args, kwargs, function):
        """(args, kwargs) with function(name, axis, value) in the place of each argument that split() cuts along
        `axis`."""
        bound = self._signature.bind(*args, **kwargs)
        of = lambda name, value: value if name in self._whole else function(name, self._axes.get(name, 0), value)
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = {key: of(key, one) for key, one in value.items()}
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                bound.arguments[name] = tuple(of(name, one) for one in value)
            else:
                bound.arguments[name] = of(name, value)
        return bound.args, bound.kwargs

    def _part_of_argument(self, name, value, cut):
        kind = self._signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            return {key: self._part(key, key, one, cut) for key, one in value.items()}
        if kind is inspect.Parameter.VAR_POSITIONAL:
            return tuple(self._part(name, f"{name}[{index}]", one, cut) for index, one in enumerate(value))
        return self._part(name, name, value, cut)

    def _part(self, name, path, value, cut):
        if name in self._whole:
            return value
        return _part(value, path, self._axes.get(name, 0), cut)

    def _check_names(self, option, names):
        for name in names:
            if name not in self._signature.parameters:
                raise ConfigError(f"smp.step({option}=…): there is no argument {name!r}; the function has {', '.join(self._signature.parameters) or 'none'}")


class _Cut:
    """Cuts tensors for `micro_batch`, and sees how many samples each has."""

    def __init__(self, micro_batches):
        self.micro_batches, self.micro_batch = micro_batches, 0
        self._seen = {}  # {path: (number of samples, dim)}
        self._object = None  # the path of one that cuts itself

    def of_object(self, value, path, axis):
        self._object = path
        return value.smp_slice(self.micro_batches, self.micro_batch, axis)

    def of_tensor(self, tensor, path, axis):
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise UnsupportedError(f"smp.step: `{path}` is a sparse or nested tensor, which is not cut; name the argument in non_split_inputs, or give a dense tensor")
        if not -tensor.dim() <= axis < tensor.dim():
            raise ShapeError(f"smp.step: `{path}` has the shape {list(tensor.shape)}, and no dim {axis} to cut over {self.micro_batches} micro-batches; name the argument in "
                             "non_split_inputs, or its dim in input_split_axes")
        samples = tensor.size(axis)
        self._seen[path] = samples, axis
        if 0 < samples < self.micro_batches:
            raise ShapeError(f"smp.step: `{path}` has {samples} in dim {axis}, fewer than `microbatches` = {self.micro_batches}; give each micro-batch one or more, or name "
                             "the argument in non_split_inputs")
        if self.micro_batches == 1:
            return tensor
        length, longer = divmod(samples, self.micro_batches)
        return tensor.narrow(axis, self.micro_batch * length + min(self.micro_batch, longer), length + (self.micro_batch < longer))

    def samples(self):
        """Parts.samples. Raises ShapeError, UnsupportedError: arguments whose parts might not belong together."""
        uneven = next((path for path, (count, _) in self._seen.items() if count % self.micro_batches), None)
        if uneven is None:
            return None
        count, axis = self._seen[uneven]
        why = f"smp.step: `{uneven}` has {count} in dim {axis}, which `microbatches` = {self.micro_batches} does not divide"
        for path, (other, dim) in self._seen.items():
            if other != count:
                raise ShapeError(f"{why}, and `{path}` has {other} in dim {dim}; micro-batches of different sizes need as many samples in every tensor that is cut: name "
                                 "those that have none in non_split_inputs, or give a multiple")
        if self._object is not None:
            raise UnsupportedError(f"{why}, and `{self._object}` cuts itself by smp_slice(), which may make parts of other sizes; give a multiple")
        length, longer = divmod(count, self.micro_batches)
        return [length + (index < longer) for index in range(self.micro_batches)]


def _part(value, path, axis, cut):
    """The part of `value`; the same object where nothing in it is cut."""
    def part(inner, of):
        return _part(inner, f"{path}{of}", axis, cut)

    if isinstance(value, torch.Tensor):
        return cut.of_tensor(value, path, axis)
    if hasattr(value, "smp_slice") and not isinstance(value, type):
        return cut.of_object(value, path, axis)
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        raise UnsupportedError(f"smp.step: `{path}` is a PackedSequence, whose samples are not in one dim; give padded tensors and lengths, and pack in the function")
    if isinstance(value, collections.abc.MutableMapping):
        parts = {key: part(inner, f"[{key!r}]") for key, inner in value.items()}
        if all(parts[key] is inner for key, inner in value.items()):
            return value
        return rebuilt(value, parts)
    if isinstance(value, (list, tuple)):
        parts = [part(inner, f"[{index}]") for index, inner in enumerate(value)]
        if all(one is inner for one, inner in zip(parts, value)):
            return value
        return rebuilt(value, parts)
    if isinstance(value, (set, frozenset)):
        parts = [part(inner, "{…}") for inner in value]
        return value if all(one in value for one in parts) else rebuilt(value, parts)
    return value
