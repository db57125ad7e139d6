"""The samples of a step function where each rank has its own and ranks share layers (`prescaled_batch` = false): all of
these compute on the samples of all of them, and each gets its own rows of the results."""
import collections.abc
import dataclasses

import torch

from ..errors import StateError, UnsupportedError
from . import messages, ranks
from .config import state
from .containers import rebuilt
from .inputs import Description


@dataclasses.dataclass(frozen=True)
class _Samples:
    """A tensor that is cut over micro-batches along `axis`."""

    tensor: torch.Tensor
    axis: int

    @property
    def text(self):
        """A description, alike on ranks that share layers."""
        return f"{self.tensor.dtype} {list(self.tensor.shape)}, samples in dim {self.axis}"


@dataclasses.dataclass(frozen=True)
class Rows:
    """How results are cut over the ranks that share layers: `counts` of samples, those of all of these ranks."""

    counts: frozenset
    are_first: bool  # in dim 0 of all arguments

    def of_this_rank(self, call, tensor):
        """This rank's rows of a result; a number is of the samples of all these ranks. Raises UnsupportedError: the
        result is not one by samples."""
        if tensor.dim() == 0:
            return tensor
        if not self.are_first or tensor.size(0) not in self.counts:
            raise UnsupportedError(f"{call}: a result of the sizes {list(tensor.shape)} is not by samples in dim 0, of which there are {sorted(self.counts)} on the ranks "
                                   "that share layers together, so that this rank's part of it is unknown; return rows of samples or numbers, or give `prescaled_batch` "
                                   "= true")
        return tensor.chunk(ranks.tp_size())[ranks.tp_rank()]


def joined(call, splitter, batches):
    """(`batches`, (args, kwargs) of each micro-batch, with the samples of all ranks that share layers, the Rows of each
    one's results). Collective over the world.

    Raises  StateError, on every rank: these ranks have arguments of other sizes, or other values where nothing is by
            samples. UnsupportedError: samples that have no order, or get gradients.
    """
    places = [splitter.mapped(*batch, lambda name, axis, value: _marked(call, name, axis, value)) for batch in batches]
    found, ends = [], []
    templates = []
    for place in places:
        templates.append(_mapped(lambda one: found.append(one) or one.text, place))
        ends.append(len(found))
    _check_alike(call, Description(templates).text)
    of_ranks = messages.of_all(call, [one.tensor.detach().contiguous().cpu() for one in found], ranks.get_tp_group())
    whole = iter(torch.cat(parts, one.axis).to(one.tensor.device) for one, *parts in zip(found, *of_ranks))
    rows = [_rows(found[begin:end]) for begin, end in zip([0, *ends], ends)]
    return [_mapped(lambda one: next(whole), place) for place in places], rows


def _rows(found):
    """The Rows of a micro-batch with these _Samples."""
    return Rows(frozenset(one.tensor.size(one.axis) * ranks.tp_size() for one in found), all(one.axis == 0 for one in found))


def _marked(call, name, axis, value):
    """`value` with _Samples in the place of tensors."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            raise UnsupportedError(f"{call}: `{name}` requires a gradient, and samples of ranks that share layers are joined without one; detach it, or give "
                                   "`prescaled_batch` = true")
        return _Samples(value, axis % value.dim())
    if isinstance(value, (set, frozenset)) and any(isinstance(one, torch.Tensor) for one in value) or hasattr(value, "smp_slice") and not isinstance(value, type):
        raise UnsupportedError(f"{call}: `{name}` has a {type(value).__name__}, whose samples are not joined over ranks that share layers; give tensors, in lists, tuples "
                               "or dicts, or `prescaled_batch` = true")
    return _inner(lambda one: _marked(call, name, axis, one), value)


def _mapped(function, value):
    return function(value) if isinstance(value, _Samples) else _inner(lambda one: _mapped(function, one), value)


def _inner(function, value):
    if isinstance(value, collections.abc.MutableMapping):
        return rebuilt(value, {key: function(one) for key, one in value.items()})
    if isinstance(value, (list, tuple)):
        return rebuilt(value, [function(one) for one in value])
    return value


def _check_alike(call, text):
    texts = state.world.gather(text)
    for first, *others in state.topology.groups_along("tensor"):
        for rank in others:
            if texts[rank] != texts[first]:
                raise StateError(f"{call}: the arguments of ranks {first} and {rank}, which share layers, differ in more than the numbers of their samples: in sizes, or in "
                                 "what is not cut over micro-batches; give each of them as many samples of the same sizes, and the same other arguments")
