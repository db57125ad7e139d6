"""Values: tensors that a program reads and writes in the place of memory that this rank does not have as such: the fp32
value of a parameter whose modules compute with rounded weights, and states of optimizers."""
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree

from .. import ranks
from ..errors import ShapeError, UnsupportedError
from ..operators import fills_at_random, gives_views, meaning

_written = {}  # by Source: the whole that an operator has written; given to the Source after the program's call


def is_in_backward():
    """Whether this thread runs a backward pass: modules that are recomputed there read what they read in forward."""
    return torch._C._current_graph_task_id() != -1  # pylint: disable=protected-access


def plain(value):
    """A tensor whole and plain where it is a Value, a DTensor or a ShardedTensor; else `value`. Collective then."""
    if isinstance(value, (Value, DTensor)):
        return value.full_tensor()
    if isinstance(value, ShardedTensor):
        whole = torch.empty(value.size(), dtype=value.dtype, device=value._get_preferred_device())  # pylint: disable=protected-access
        value.gather(0, out=whole if torch.distributed.get_rank() == 0 else None)
        torch.distributed.broadcast(whole, 0)
        return whole
    return value


def drawn(fill, like):
    """fill(tensor), of random numbers, of the shape and dtype of `like`, whole, as rank 0 draws them. Collective."""
    made = fill(torch.empty(like.shape, dtype=like.dtype, device=like.device))
    ranks.world().broadcast(made)
    return made


class Source:
    """Where Values come from: a tensor of `shape` and `dtype`, which all ranks read, and write, together."""

    def __init__(self, shape, dtype, device, keeps=False):
        """`keeps`: what was read is kept while version() is the same, and for backward passes."""
        self.shape, self.dtype, self.device = shape, dtype, device
        self._keeps, self._kept, self._version = keeps, None, None

    def version(self):
        """Changes with the values."""
        raise NotImplementedError

    def gather(self):
        """The whole, plain, not to be written. Collective."""
        raise NotImplementedError

    def scatter(self, whole):
        """`whole` is the value from here on. Collective."""
        raise NotImplementedError

    def read(self):
        """The whole, plain, not to be written. Collective, unless it is kept."""
        if self in _written:
            return _written[self]
        if self._kept is not None and (is_in_backward() or self._version == self.version()):
            return self._kept
        whole = self.gather()
        if self._keeps:
            self._kept, self._version = whole, self.version()
        return whole

    def key(self):
        """The same of Sources of the same values."""
        return id(self)

    def __eq__(self, other):
        return isinstance(other, Source) and self.key() == other.key()

    def __hash__(self):
        return hash(self.key())


class ReadWhole:
    """Conversions of a tensor that has full_tensor()."""

    __slots__ = ()

    def numpy(self, **options):
        """The array of a copy. Collective."""
        return self.full_tensor().numpy(**options)

    def tolist(self):
        """See torch's. Collective."""
        return self.full_tensor().tolist()

    def __array__(self, *args, **kwargs):
        return self.full_tensor().__array__(*args, **kwargs)


class Value(ReadWhole, torch.Tensor):
    """The tensor of a Source, or a view of it. Operators read and write it whole. Collective where they do."""

    @staticmethod
    def __new__(cls, source, path=(), form=None):
        """`path`: the operators that make the view of the whole; `form`: the view on the device "meta"."""
        if form is None:
            form = torch.empty(source.shape, dtype=source.dtype, device="meta")
        made = torch.Tensor._make_wrapper_subclass(cls, form.shape, strides=form.stride(), storage_offset=form.storage_offset(),  # pylint: disable=protected-access
                                                   dtype=form.dtype, device=source.device)
        made.source, made.path, made.form = source, path, form
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return called(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, torch.Tensor) and hasattr(kind, "takes_values") for kind in types):
            return NotImplemented
        if func._schema.is_mutable:  # pylint: disable=protected-access
            return _write(func, args, kwargs)
        if meaning(func).is_alias:
            return Value(args[0].source, args[0].path, args[0].form)
        if gives_views(func):
            return args[0]._view(func, args[1:], kwargs)
        if not meaning(func).reads_first and isinstance(args[0], Value):
            args = (torch.empty((), dtype=args[0].dtype, device=args[0].device).expand(args[0].shape), *args[1:])
        return func(*_swapped(args, Value.read), **_swapped(kwargs, Value.read))

    def _view(self, func, args, kwargs):
        made = func(self.form, *args, **kwargs)
        if isinstance(made, torch.Tensor):
            return Value(self.source, (*self.path, (func, args, kwargs, None)), made)
        return [Value(self.source, (*self.path, (func, args, kwargs, index)), one) for index, one in enumerate(made)]

    def of(self, whole):
        """The view that this one is, of a plain whole."""
        for func, args, kwargs, index in self.path:
            whole = func(whole, *args, **kwargs)
            whole = whole if index is None else whole[index]
        return whole

    def read(self):
        """Plain, not to be written. Collective."""
        return self.of(self.source.read())

    def full_tensor(self):
        """A copy, plain. Collective."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # pylint: disable=protected-access
            return self.read().clone()

    def __repr__(self, **_):
        return f"Value(shape={list(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo):
        memo[id(self)] = self.full_tensor()
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return self.full_tensor().__reduce_ex__(protocol)  # files are read without this package


def called(func, args, kwargs):
    """func(*args, **kwargs) of a program; what it has written goes to its Sources and DTensors. Beside a DTensor
    results are DTensors, as in PyTorch. Collective where there is some."""
    wholes = {}  # by the id of a DTensor: (it, its whole, the version of that)
    given = args, kwargs
    args, kwargs = _pytree.tree_map_only(DTensor, lambda one: _whole_of(one, wholes), given)
    _written.clear()
    try:
        with torch._C.DisableTorchFunctionSubclass():  # pylint: disable=protected-access
            result = func(*args, **kwargs)
            for source, whole in list(_written.items()):
                source.scatter(whole)
            return _distributed(func, result, given, list(wholes.values())) if wholes else result
    finally:
        _written.clear()


def _whole_of(distributed, wholes):
    if id(distributed) not in wholes:
        whole = distributed.full_tensor()
        wholes[id(distributed)] = distributed, whole, whole._version  # pylint: disable=protected-access
    return wholes[id(distributed)][1]


def _distributed(func, result, given, wholes):
    """`func`'s result as DTensors, but for what it was `given`; DTensors take what it has written into their
    `wholes`. Collective."""
    name = getattr(func, "__name__", "")
    # these do not count versions above the dispatcher
    writes_lists = name.startswith("_foreach_") and name.endswith("_")
    for distributed, whole, version in wholes:
        if writes_lists or whole._version != version:  # pylint: disable=protected-access
            if whole.requires_grad:
                raise UnsupportedError("a write with a graph into a DTensor, beside a parameter: write under torch.no_grad(), or take an operator that gives a new tensor")
            with torch.no_grad():
                distributed.copy_(_replicated(whole, distributed.device_mesh))
    owners = {id(one): one for one in _pytree.tree_leaves(given)} | {id(whole): distributed for distributed, whole, _ in wholes}
    mesh = wholes[0][0].device_mesh
    return _pytree.tree_map_only(torch.Tensor, lambda one: owners.get(id(one)) if id(one) in owners else _replicated(one, mesh) if type(one) is torch.Tensor else one, result)


def _replicated(whole, mesh):
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _swapped(values, change):
    return _pytree.tree_map_only(Value, change, values)


def _write(func, args, kwargs):
    """An operator that writes Values: it writes wholes, which become theirs."""
    names = [argument.name for argument in func._schema.arguments if argument.alias_info is not None and argument.alias_info.is_write]  # pylint: disable=protected-access
    given = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs  # pylint: disable=protected-access
    targets = [one for name in names for one in _pytree.tree_leaves(given.get(name)) if isinstance(one, Value)]
    overwrites = targets and not meaning(func).reads_first and not targets[0].path and not any(isinstance(one, Value) for one in args[1:])
    wholes = {one.source: torch.empty(one.source.shape, dtype=one.source.dtype, device=one.source.device) if overwrites else one.source.read().clone() for one in targets}
    swap = lambda one: one.of(wholes[one.source]) if one.source in wholes else one.read()
    if targets and fills_at_random(func):  # of rank 0's numbers
        swap(args[0]).copy_(drawn(lambda tensor: func(tensor, *args[1:], **kwargs), args[0]))
    else:
        func(*_swapped(args, swap), **_swapped(kwargs, swap))
    for source, whole in wholes.items():
        if whole.shape != source.shape:
            raise ShapeError(f"{func}: a tensor of shape {tuple(source.shape)} cannot become one of shape {tuple(whole.shape)}")
        _written[source] = whole
    results = [given.get(names[0]) for _ in func._schema.returns]  # pylint: disable=protected-access
    if len(results) > 1:
        raise UnsupportedError(f"{func} into a parameter's value: take a copy by full_tensor(), and copy_() what it becomes")
    return results[0] if results else None
