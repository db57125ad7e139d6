"""The arguments of a step function over the ranks of a pipeline: all compute on those of its first rank.

They are compared by structure and content; what differs comes from the first rank. So it alone needs a loader: others
may give empty tensors.
"""
import ast
import collections.abc
import copy
import dataclasses
import json

import torch

from .._native import core
from ..device import local_device
from ..errors import StateError
from . import messages, ranks
from .config import state
from .containers import rebuilt

_ABSENT = object()
_BUILTIN = {"list": list, "tuple": tuple, "dict": dict, "set": set, "frozenset": frozenset}


class Description:
    """A structure of arguments as JSON, `text`: its containers, plain values and digests of tensors. Objects of other
    classes stand by their class: each rank has its own."""

    def __init__(self, value):
        self.tensors = []  # in the order of the text
        self._written = self._of(value)
        self.text = json.dumps(self._written)

    def _of(self, value):
        if _is_dense(value):
            self.tensors.append(value)
            return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type, value.requires_grad,
                               core.digest(value.detach().contiguous())]}
        if value is None or type(value) in (bool, int, float, str):
            return {"value": value}
        if isinstance(value, collections.abc.MutableMapping):
            return {"kind": _kind(value), "keys": [repr(key) for key in value], "items": [self._of(inner) for inner in value.values()]}
        if isinstance(value, (list, tuple)):
            return {"kind": _kind(value), "items": [self._of(inner) for inner in value]}
        if isinstance(value, (set, frozenset)):
            return {"kind": _kind(value), "items": self._in_order(value)}
        return {"object": _kind(value)}

    def _in_order(self, members):
        """Descriptions of a set's members, in an order that is the same on every rank."""
        described = sorted((Description(member) for member in members), key=lambda one: one.text)
        for one in described:
            self.tensors += one.tensors
        return [json.loads(one.text) for one in described]


def agreed(call, args, kwargs, agenda):
    """(args, kwargs) that are alike on the ranks of this pipeline: this rank's own where they are. Collective over the
    world.

    agenda      what else must be alike on all ranks, {what: JSON's value}

    Raises  StateError, on every rank: another agenda on some rank, arguments that cannot be described, or objects that
            only the first rank has.
    """
    failure = described = None
    try:
        described = Description((args, kwargs))
        told = {"agenda": agenda, "text": described.text}
    except Exception as error:  # pylint: disable=broad-exception-caught
        failure, told = error, {"failure": f"{type(error).__name__}: {error}"}
    of_ranks = [json.loads(text) for text in state.world.gather(json.dumps(told))]
    if failure is not None:
        raise failure
    for rank, one in enumerate(of_ranks):
        if "failure" in one:
            raise StateError(f"{call}: rank {rank} failed: {one['failure']}")
        for what, value in of_ranks[0]["agenda"].items():
            if one["agenda"][what] != value:
                raise StateError(f"{call}: {what} is {value!r} on rank 0 and {one['agenda'][what]!r} on rank {rank}; every rank runs the same program")
    stages = ranks.get_pp_group()
    text = of_ranks[stages[0]]["text"]
    if all(of_ranks[rank]["text"] == text for rank in stages):
        return args, kwargs
    return _from_first(call, json.loads(text), (args, kwargs), described)


def _from_first(call, written, own, described):
    """The arguments of the pipeline's first rank. Collective over the pipeline."""
    sizes = [_Size.of(one["tensor"]) for one in _tensors_of(written)]
    is_first = ranks.pp_rank() == 0
    payload = _packed(described.tensors) if is_first else torch.empty(sum(size.bytes for size in sizes), dtype=torch.uint8)
    messages.broadcast_bytes(payload, ranks.get_pp_group())
    if is_first:
        return own
    tensors = (size.tensor(part) for size, part in zip(sizes, payload.split([size.bytes for size in sizes])))
    return _made(call, written, own, "the arguments", tensors)


def _tensors_of(written):
    if "tensor" in written:
        yield written
    for inner in written.get("items", ()):
        yield from _tensors_of(inner)


@dataclasses.dataclass(frozen=True)
class _Size:
    dtype: torch.dtype
    shape: list
    device: str
    requires_grad: bool

    @staticmethod
    def of(written):
        return _Size(getattr(torch, written[0]), *written[1:4])

    @property
    def bytes(self):
        """Of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def tensor(self, part):
        """The tensor that has these bytes, where this rank computes if it was on a device."""
        if self.dtype.is_complex:
            made = torch.view_as_complex(part.clone().view(self.dtype.to_real()).reshape(*self.shape, 2))
        else:
            made = part.clone().view(self.dtype).reshape(self.shape)
        return made.to("cpu" if self.device == "cpu" else local_device()).requires_grad_(self.requires_grad)


def _packed(tensors):
    """The bytes of all of them, on the host."""
    parts = [torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach() for tensor in tensors]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *(part.cpu().contiguous().reshape(-1).view(torch.uint8) for part in parts)])


def _made(call, written, own, path, tensors):
    """The first rank's value, of its description, the next of its `tensors`, and this rank's objects."""
    if "tensor" in written:
        return next(tensors)
    if "value" in written:
        return written["value"]
    if "object" in written:
        if own is _ABSENT or _kind(own) != written["object"]:
            raise StateError(f"{call}: {path} is a {written['object']} on the first rank of the pipeline and {_named(own)} on stage {ranks.pp_rank()}; objects but "
                             "for tensors, numbers, texts and containers of these are each rank's own: give every rank one of that class")
        return own
    kind = written["kind"]
    is_alike = own is not _ABSENT and _kind(own) == kind
    if not is_alike and kind not in _BUILTIN:
        raise StateError(f"{call}: {path} is a {kind} on the first rank of the pipeline and {_named(own)} on stage {ranks.pp_rank()}; give every rank one of that class")
    if "keys" in written:
        items = _made_items(call, written, own if is_alike else {}, path, tensors)
        if not is_alike:
            return items
        kept = copy.copy(own)
        for key in [key for key in own if key not in items]:
            del kept[key]
        return rebuilt(kept, items)
    mine = list(own) if is_alike and kind not in ("set", "frozenset") else []
    items = [_made(call, inner, mine[index] if index < len(mine) else _ABSENT, f"{path}[{index}]", tensors) for index, inner in enumerate(written["items"])]
    return rebuilt(own, items) if is_alike else _BUILTIN[kind](items)


def _made_items(call, written, own, path, tensors):
    """{key: value} of a dict."""
    mine, items = {repr(key): key for key in own}, {}
    for text, inner in zip(written["keys"], written["items"]):
        if text in mine:
            key = mine[text]
        elif text[0] in "'\"":
            key = ast.literal_eval(text)
        else:
            raise StateError(f"{call}: {path} has the key {text} on the first rank of the pipeline alone; use texts as keys, or give every rank that one")
        items[key] = _made(call, inner, own.get(key, _ABSENT), f"{path}[{text}]", tensors)
    return items


def _is_dense(value):
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested and not value.is_quantized and not value.is_meta


def _kind(value):
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _named(value):
    return "nothing" if value is _ABSENT else f"a {_kind(value)}"
