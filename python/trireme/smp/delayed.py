"""Modules whose tensors take memory when these get their stages: smp.delay_param_initialization() and model_creation().

Inside, large tensors are made without memory, and a tape notes the operators on them. What draws random numbers is run
once on memory that is let go at once, so that generators go on as without. When the model gets its stages, each rank
runs the part of the tape that its own tensors need, with the generators' states of then: the same bits as without.
"""
import contextlib
import hashlib
import json
import typing

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils import _pytree as pytree

from .._native import core
from ..device import local_device
from ..errors import ConfigError, StateError
from . import messages, ranks
from .config import state
from .nn.registry import tensor_parallelism as _tensor_parallelism

#: Tensors of fewer elements are made at once: programs read small ones.
SMALLEST = 1024
_aten = torch.ops.aten
_FACTORIES = frozenset({_aten.empty.memory_format, _aten.empty_strided.default, _aten.zeros.default, _aten.ones.default, _aten.full.default, _aten.rand.default,
                        _aten.randn.default, _aten.eye.default, _aten.eye.m})
#: The error of who reads one.
WITHOUT_NUMBERS = ("smp: this tensor was made inside of delay_param_initialization() or model_creation(), and has no numbers before the model's tensors get their stages, in the first "
                   "call of a @smp.step function, nor afterwards where it is in no module of it; use it afterwards, or make it outside")


class _Ref(typing.NamedTuple):
    """A tensor in delayed memory."""

    key: int
    size: tuple
    stride: tuple
    offset: int
    dtype: torch.dtype

    def in_storage(self, storage):
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, self.offset, self.size, self.stride)


class _Entry:
    """An operator on delayed memory."""

    def __init__(self, function, args, kwargs, results, states):
        self.function, self.args, self.kwargs, self.results = function, args, kwargs, results
        self.states = states  # of the generator that it draws from; None: it draws from none
        self.reads = {one.key for one in pytree.tree_leaves((args, kwargs), is_leaf=_is_ref) if _is_ref(one)}
        self.writes = {one.key for one in results} | (self.reads if function._schema.is_mutable else set())  # pylint: disable=protected-access


def _is_ref(value):
    return isinstance(value, _Ref)


def _bytes_of(tensor):
    return (1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))) * tensor.element_size() if tensor.numel() else 0


def without_memory(like, device):
    """A tensor of the geometry of `like` that cannot be read."""
    # pylint: disable=protected-access
    storage = torch._C._construct_storage_from_data_pointer(0, device, _bytes_of(like))
    tensor = torch.empty(0, dtype=like.dtype, device=device).set_(storage, 0, like.shape, like.stride())
    torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, WITHOUT_NUMBERS)
    return tensor


class _Tape:
    """Delayed memory, by the address of its storage, and the operators on it."""

    def __init__(self):
        self.storages = {}  # {key: the storage without memory, which keeps its address}
        self.entries = []
        self._scratch = torch.UntypedStorage(0)

    def ref(self, tensor):
        """The _Ref of a tensor in delayed memory; None: it is in other memory."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
            return None
        key = tensor.untyped_storage()._cdata  # pylint: disable=protected-access
        return _Ref(key, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype) if key in self.storages else None

    def made(self, like):
        """A tensor of the geometry of `like` in new delayed memory."""
        tensor = without_memory(like, torch.device("cpu"))
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage  # pylint: disable=protected-access
        return tensor

    def scratch(self, like):
        """A tensor of the geometry of `like` in memory that is the same every time: what is let go between small
        objects leaves holes, which nothing larger fills."""
        sizes = _bytes_of(like)
        if self._scratch.nbytes() < sizes:
            self._scratch = torch.UntypedStorage(0)  # before the new one is there
            self._scratch = torch.UntypedStorage(sizes)
        return torch.empty(0, dtype=like.dtype).set_(self._scratch, 0, like.shape, like.stride())

    def drop_scratch(self):
        """Lets go of scratch()'s memory."""
        self._scratch = torch.UntypedStorage(0)

    def evaluated(self, keys):
        """{key: a storage with the numbers} of these."""
        needed, part = set(keys), []
        for entry in reversed(self.entries):
            if entry.writes & needed:
                needed |= entry.reads | entry.writes
                part.append(entry)
        part.reverse()
        last = {key: index for index, entry in enumerate(part) for key in entry.reads | entry.writes}
        real = {}
        with torch.no_grad():
            for index, entry in enumerate(part):
                self._run(entry, real)
                for key in entry.reads | entry.writes:
                    if last[key] == index and key not in keys:
                        real.pop(key, None)
        return {key: self._storage(key, real) for key in keys}

    def forget(self, keys):
        """Drops what is noted of these, and of all that was computed from them, which keeps no numbers then."""
        while keys:
            for key in keys:
                self.storages.pop(key, None)
            dropped = [entry for entry in self.entries if not entry.reads | entry.writes <= self.storages.keys()]
            self.entries = [entry for entry in self.entries if entry not in dropped]
            keys = {key for entry in dropped for key in entry.writes if key in self.storages}

    def _storage(self, key, real):
        if key not in real:
            real[key] = torch.UntypedStorage(self.storages[key].nbytes())
        return real[key]

    def _run(self, entry, real):
        there = lambda value: value.in_storage(self._storage(value.key, real)) if _is_ref(value) else value
        args, kwargs = pytree.tree_map(there, (entry.args, entry.kwargs), is_leaf=_is_ref)
        if entry.states is None:
            found = entry.function(*args, **kwargs)
        elif kwargs.get("generator") is None:
            before = torch.get_rng_state()
            torch.set_rng_state(entry.states)
            found = entry.function(*args, **kwargs)
            torch.set_rng_state(before)
        else:
            found = entry.function(*args, **{**kwargs, "generator": torch.Generator().set_state(entry.states)})
        for one, result in zip(found if isinstance(found, (tuple, list)) else (found,), entry.results):
            if (one.untyped_storage().nbytes(), result.offset, result.stride) == (result_bytes(self, result), one.storage_offset(), one.stride()):
                real[result.key] = one.untyped_storage()
            else:
                result.in_storage(self._storage(result.key, real)).copy_(one)


def result_bytes(tape, ref):
    """The size of the memory of a _Ref."""
    return tape.storages[ref.key].nbytes()


_tape = _Tape()
_around = []  # of the contexts around what is made now: whether they delay


class _Delaying(TorchDispatchMode):
    """While it lasts, large tensors are made without memory, and operators on them are noted."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        delayed = any(_tape.ref(one) is not None for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor))
        if not delayed and not (_around[-1] and func in _FACTORIES and _is_large(func, args, kwargs)) or func.is_view:
            return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default or not all("Tensor" in str(result.type) for result in func._schema.returns):  # pylint: disable=protected-access
            return func(*_with_numbers(args), **_with_numbers(kwargs))
        mutable = func._schema.is_mutable  # pylint: disable=protected-access
        if mutable and not _writes_delayed(func, args, kwargs):
            return func(*_with_numbers(args), **_with_numbers(kwargs))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        states = None
        if draws:
            generator = kwargs.get("generator")
            states = torch.get_rng_state() if generator is None else generator.get_state()
        if mutable:
            if draws:
                func(*_scratch(args), **_scratch(kwargs))
            _tape.entries.append(_Entry(func, _noted(args), _noted(kwargs), (), states))
            return kwargs["out"] if "out" in kwargs else args[0]
        try:
            like = func(*_scratch(args), **_scratch(kwargs)) if draws else func(*_on_meta(args), **{**_on_meta(kwargs), **_device(kwargs)})
        except (NotImplementedError, RuntimeError):  # what it gives depends on numbers
            return func(*_with_numbers(args), **_with_numbers(kwargs))
        several = isinstance(like, (tuple, list))
        results = [_tape.made(one) for one in (like if several else (like,))]
        if func not in (_aten.empty.memory_format, _aten.empty_strided.default):
            _tape.entries.append(_Entry(func, _noted(args), _noted(kwargs), tuple(_tape.ref(one) for one in results), states))
        return type(like)(results) if several else results[0]


def _is_large(func, args, kwargs):
    if torch.device(kwargs.get("device") or "cpu").type != "cpu":
        return False
    return func(*args, **{**kwargs, "device": "meta", "pin_memory": False}).numel() >= SMALLEST


def _device(kwargs):
    return {"device": "meta", "pin_memory": False} if "device" in kwargs else {}


def _mapped(function, value):
    return pytree.tree_map(lambda one: function(one) if isinstance(one, torch.Tensor) else one, value)


def _noted(value):
    return _mapped(lambda one: _tape.ref(one) or one.detach().clone(), value)


def _scratch(value):
    return _mapped(lambda one: _tape.scratch(one) if _tape.ref(one) else one.detach(), value)


def _on_meta(value):
    return _mapped(lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta"), value)


def _with_numbers(value):
    def numbers(tensor):
        ref = _tape.ref(tensor)
        return tensor if ref is None else ref.in_storage(_tape.evaluated([ref.key])[ref.key])

    return _mapped(numbers, value)


def _writes_delayed(func, args, kwargs):
    given = [*args, *kwargs.values()]
    names = [argument.name for argument in func._schema.arguments]  # pylint: disable=protected-access
    values = {**dict(zip(names, args)), **kwargs}
    written = [values[argument.name] for argument in func._schema.arguments  # pylint: disable=protected-access
               if argument.alias_info is not None and argument.alias_info.is_write and argument.name in values]
    return bool(given) and all(_tape.ref(one) is not None for one in pytree.tree_leaves(written))


# --- smp's names -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def delay_param_initialization(enabled=True):
    """Large tensors that are made inside take memory when the model that has them gets its stages, each on its stage
    alone, with the bits of initial values that they have without. Of nested contexts the innermost holds."""
    if not isinstance(enabled, bool):
        raise ConfigError(f"smp.delay_param_initialization(enabled={enabled!r}): expected True or False")
    _around.append(enabled)
    try:
        with _Delaying() if enabled and not any(_around[:-1]) else contextlib.nullcontext():
            yield
    finally:
        _around.pop()
        _tape.drop_scratch()


@contextlib.contextmanager
def model_creation(tensor_parallelism=False, dtype=None, **tp_kwargs):
    """tensor_parallelism() and, where the key `delayed_parameter_initialization` is true, delay_param_initialization().

    dtype       of floating-point tensors that are made inside without one; None: torch's default
    tp_kwargs   options of tensor_parallelism()

    Raises  ConfigError: another dtype, or an option that there is not.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"smp.model_creation(dtype={dtype!r}): expected a floating-point one, or None")
    before = torch.get_default_dtype()
    with _tensor_parallelism(enabled=bool(tensor_parallelism), **tp_kwargs), delay_param_initialization(state.cfg.delayed_parameter_initialization):
        torch.set_default_dtype(dtype or before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


# --- when tensors get their stages -----------------------------------------------------------------------------------


def names_of(module):
    """Names of the parameters and buffers of `module` that have no memory yet."""
    return {name for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)) for name, tensor in named
            if _tape.ref(tensor) is not None}


def give(module, homed, homes, stage):
    """Gives the delayed tensors of `module` memory and numbers, but those of other stages. Collective over all ranks.

    homed   {name: tensor} of what has a home
    homes   {name: stage} of these

    Raises  StateError: ranks have made other tensors.
    """
    stages = {}
    for name, tensor in homed.items():
        if (ref := _tape.ref(tensor)) is not None:
            stages.setdefault(ref.key, homes[name])
    tensors = [(tensor, ref) for tensor in _tensors_of(module) if (ref := _tape.ref(tensor)) is not None]
    _agree(bool(tensors))
    if not tensors:
        return
    keys = {ref.key for _, ref in tensors if stages.get(ref.key, stage) == stage}
    device = local_device()
    real = _tape.evaluated(keys)
    with torch.no_grad():
        for tensor, ref in tensors:
            if ref.key in keys:
                tensor.data = ref.in_storage(real[ref.key])
        if device.type != "cpu":
            _move(tensors, keys, module, device)
    _tape.forget({ref.key for _, ref in tensors})


def _move(tensors, keys, module, device):
    """To the device, each tensor by itself; those of other stages without memory."""
    remote = {id(tensor) for tensor, ref in tensors if ref.key not in keys}
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in remote:
            tensor.data = tensor.data.to(device)
            continue
        tensor.data = without_memory(tensor, device)


def _tensors_of(module):
    """The tensors of all modules: parameters, buffers and attributes, with those in lists, tuples and dicts."""
    found = {}

    def see(value):
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
        elif isinstance(value, (list, tuple)):
            for one in value:
                see(one)
        elif isinstance(value, dict):
            for one in value.values():
                see(one)

    for inner in module.modules():
        see({name: value for name, value in vars(inner).items() if name != "_modules"})
    return list(found.values())


def _agree(has_some):
    """Lets every rank draw rank 0's numbers. Collective over all ranks."""
    call = "smp.delay_param_initialization"
    operators, drawn = hashlib.sha256(), hashlib.sha256()
    for entry in _tape.entries:
        there = lambda value: core.digest(value) if isinstance(value, torch.Tensor) else (value[1:] if _is_ref(value) else str(value))
        told = pytree.tree_map(there, (entry.args, entry.kwargs), is_leaf=_is_ref)
        operators.update(repr((str(entry.function), told, [one[1:] for one in entry.results])).encode())
        if entry.states is not None:
            drawn.update(bytes(entry.states.tolist()))
    of_ranks = [json.loads(text) for text in state.world.gather(json.dumps([has_some, operators.hexdigest(), drawn.hexdigest()]))]
    if any(one[:2] != of_ranks[0][:2] for one in of_ranks):
        raise StateError(f"{call}: ranks have made other tensors, or by other operators; make the same model on every rank")
    if len({one[2] for one in of_ranks}) > 1:
        drawing = [entry for entry in _tape.entries if entry.states is not None]
        for entry, states in zip(drawing, messages.value_of(call, torch.stack([entry.states for entry in drawing]), list(range(ranks.size())), 0)):
            entry.states = states.clone()
