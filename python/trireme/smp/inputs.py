"""The arguments of a step function over the ranks of a pipeline: all compute on those of its first rank.

They are compared by structure and content; what differs comes from the first rank. So it alone needs a loader: others
may give empty tensors.
"""
import ast
import collections.abc
import dataclasses
import io
import json

import torch
from torch.utils.data import DataLoader

from .._native import core
from ..device import local_device
from ..errors import StateError, UnsupportedError
from . import messages, ranks
from .config import state
from .containers import rebuilt

_ABSENT = object()
_BUILTIN = {"list": list, "tuple": tuple, "dict": dict, "set": set, "frozenset": frozenset}
_UNORDERED = ("set", "frozenset")


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
        if isinstance(value, (DataLoader, collections.abc.Iterator)) and not isinstance(value, io.IOBase):
            raise UnsupportedError(f"smp.step: an argument is a {_kind(value)}, of which each micro-batch would take the next items; give the batch that it gives")
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
    of_ranks = [json.loads(text) for text in state.world.gather(json.dumps(told), "smp.step")]
    if failure is not None:
        raise failure
    for rank, one in enumerate(of_ranks):
        if "failure" in one:
            raise StateError(f"{call}: rank {rank} failed: {one['failure']}")
        for what, value in of_ranks[0]["agenda"].items():
            if one["agenda"][what] != value:
                raise StateError(f"{call}: {what} is {value!r} on rank 0 and {one['agenda'][what]!r} on rank {rank}; every rank runs the same program")
    texts = [one["text"] for one in of_ranks]
    _check_shared(call, texts)
    for first, *others in state.topology.groups_along("pipe"):
        for stage, rank in enumerate(others, 1):
            if texts[rank] != texts[first]:
                _refuse_unlike(call, json.loads(texts[first]), json.loads(texts[rank]), "the arguments", stage)
    first, *others = ranks.get_pp_group()
    if all(texts[rank] == texts[first] for rank in others):
        return args, kwargs
    return _from_first(json.loads(texts[first]), (args, kwargs), described)


def _check_shared(call, texts):
    """Raises StateError, on every rank: ranks that share layers have other arguments, by their descriptions, and should
    have the same."""
    if not state.cfg.prescaled_batch:
        return  # samples.py looks
    for first, *others in state.topology.groups_along("tensor"):
        for rank in others:
            if texts[rank] != texts[first]:
                raise StateError(f"{call}: the arguments are others on rank {rank} than on rank {first}, and these share layers; with `prescaled_batch` = true each rank "
                                 "gets the samples of smp.rdp_rank() out of smp.rdp_size(); give those, or leave `prescaled_batch` out")


def _refuse_unlike(call, written, other, path, stage):
    """Raises StateError: the first rank has an object, or a container of a class, that a stage has no equal of. By
    descriptions, so that every rank finds it."""
    def refuse(what, fix):
        raise StateError(f"{call}: {path} {what} on the first rank of the pipeline, and {_told_of(other)} on stage {stage}; {fix}")

    if "object" in written:
        if other is None or other.get("object") != written["object"]:
            refuse(f"is a {written['object']}", "objects but for tensors, numbers, texts and containers of these are each rank's own: give every rank one of that class")
    elif "kind" in written:
        is_alike = other is not None and other.get("kind") == written["kind"]
        if not is_alike and written["kind"] not in _BUILTIN:
            refuse(f"is a {written['kind']}", "give every rank one of that class")
        places = written.get("keys", range(len(written["items"])))
        known = dict(zip(other.get("keys", range(len(other["items"]))), other["items"])) if is_alike and written["kind"] not in _UNORDERED else {}
        for place, inner in zip(places, written["items"]):
            if "keys" in written and place not in known and not _is_text(place):
                refuse(f"has the key {place}", "use texts as keys, or give every rank that one")
            _refuse_unlike(call, inner, known.get(place), f"{path}[{place}]", stage)


def _told_of(written):
    if written is None:
        return "there is nothing"
    if "value" in written:
        return f"it is {written['value']!r:.40}"
    return f"it is a {written.get('object') or written.get('kind') or 'tensor'}"


def _is_text(key):
    """Whether repr(key) is of a str."""
    return key[0] in "'\""


def _from_first(written, own, described):
    """The arguments of the pipeline's first rank. Collective over the pipeline."""
    sizes = [_Size.of(one["tensor"]) for one in _tensors_of(written)]
    is_first = ranks.pp_rank() == 0
    payload = _packed(described.tensors) if is_first else torch.empty(sum(size.bytes for size in sizes), dtype=torch.uint8)
    messages.broadcast_bytes(payload, ranks.get_pp_group())
    if is_first:
        return own
    tensors = (size.tensor(part) for size, part in zip(sizes, payload.split([size.bytes for size in sizes])))
    return _made(written, own, tensors)


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
        """The size of its elements."""
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


def _made(written, own, tensors):
    """The first rank's value, of its description, the next of its `tensors`, and this rank's objects."""
    if "tensor" in written:
        return next(tensors)
    if "value" in written:
        return written["value"]
    if "object" in written:
        return own
    kind, is_alike = written["kind"], own is not _ABSENT and _kind(own) == written["kind"]
    if "keys" in written:
        return _made_dict(written, own if is_alike else {}, tensors)
    mine = list(own) if is_alike and kind not in _UNORDERED else []
    items = [_made(inner, mine[index] if index < len(mine) else _ABSENT, tensors) for index, inner in enumerate(written["items"])]
    return rebuilt(own, items) if is_alike else _BUILTIN[kind](items)


def _made_dict(written, own, tensors):
    mine, items = {repr(key): key for key in own}, {}
    for text, inner in zip(written["keys"], written["items"]):
        key = mine[text] if text in mine else ast.literal_eval(text)
        items[key] = _made(inner, own.get(key, _ABSENT), tensors)
    kept = rebuilt(own, {})
    for key in [key for key in own if key not in items]:
        del kept[key]
    return rebuilt(kept, items)


def _is_dense(value):
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested and not value.is_quantized and not value.is_meta


def _kind(value):
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"

