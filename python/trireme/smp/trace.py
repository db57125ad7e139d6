"""The atoms of a model, which a partition places on stages: what its forward uses and computes, in order.

An atom is a module with parameters or persistent buffers of its own; atoms stand in the order in which these are first
used. Own parameters that are used after those of other modules, as a parent's after its children, are another atom.
"""
import contextlib
import copy
import dataclasses
import random
import sys
import time

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..errors import UnsupportedError
from ..log import logger
from . import kept

_tracing = []
# FLOPs that a device computes while it moves a byte, about. One number for all: a measured one would give another
# partition in each run.
_FLOPS_PER_BYTE = 32
_COST = 10**9  # of the whole model: costs are whole numbers, so that equal ones are equal
# Bytes of a trained parameter with gradient and states of Adam, by the bytes of its element; of 16 bits also with a
# master and its gradient.
_STATE_BYTES = {2: 20, 4: 16, 8: 32}


def is_tracing():
    """Whether a model runs to be traced: its results are not used, and may have no values."""
    return bool(_tracing)


@dataclasses.dataclass
class Atom:
    """Tensors that stay together, and what is computed with them."""

    module: str  # its name; "": the root
    tensors: list = dataclasses.field(default_factory=list)  # names of parameters and persistent buffers
    state_bytes: int = 0  # of them, with gradients and optimizer states
    flops: int = 0
    seconds: float = 0.0  # of its operators, where these were measured
    moved_bytes: int = 0  # of operators without a count of FLOPs, mostly those by element
    output_bytes: int = 0  # of all results that are new, per micro-batch; measured: of those that a backward pass needs
    crossing_bytes: int = 0  # what later atoms need of this one and those before, or the other way round
    is_left_for_good: bool = True  # nothing is computed with it, or those before, after a later atom

    @property
    def name(self):
        """For people."""
        return self.module or "the root"

    @property
    def time(self):
        """In FLOPs."""
        return self.flops + self.moved_bytes * _FLOPS_PER_BYTE

    def bytes(self, open_micro_batches):
        """Bytes that it takes on its stage."""
        return self.state_bytes + self.output_bytes * open_micro_batches


@dataclasses.dataclass
class Trace:
    """The atoms of a model, in the order of the program."""

    atoms: list
    has_seconds: bool = False  # they were measured

    def costs(self, memory_weight, open_micro_batches):
        """Costs of the atoms: memory_weight · its share of the memory + (1 - memory_weight) · its share of the time, as
        whole numbers."""
        memory = [atom.bytes(open_micro_batches) for atom in self.atoms]
        times = [atom.seconds if self.has_seconds else atom.time for atom in self.atoms]
        of_memory, of_time = sum(memory) or 1, sum(times) or 1
        return [round(_COST * (memory_weight * own / of_memory + (1 - memory_weight) * time / of_time)) for own, time in zip(memory, times)]


def homed_tensors(module):
    """{name: tensor} of what has a home: parameters and persistent buffers, in the order of registration, each under
    its first name."""
    transient = {f"{name}.{buffer}" if name else buffer
                 for name, inner in module.named_modules(remove_duplicate=False) for buffer in inner._non_persistent_buffers_set}  # pylint: disable=protected-access
    tensors = dict(module.named_parameters())
    tensors.update((name, buffer) for name, buffer in module.named_buffers() if name not in transient)
    if lazy := next((name for name, tensor in tensors.items() if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)), None):
        raise UnsupportedError(f"smp: '{lazy}' gets its shape in the first forward, which is not there yet; call the model once before it is wrapped")
    order = {name: index for index, (name, _) in enumerate(module.named_modules())}
    return dict(sorted(tensors.items(), key=lambda item: order[item[0].rpartition(".")[0]]))


def by_registration(module):
    """The atoms in the order in which modules were registered, without a trace: memory is all that is known."""
    return _completed(homed_tensors(module), [])


def traced(module, args, kwargs, device=None, *, times=False, memory=False):
    """The Trace of module(*args, **kwargs). On the device "meta", which needs neither memory nor time; where values
    decide what is computed, with them, on `device` (None: where they are). With a graph where gradients are on, as a
    forward may hang hooks on it, but without the activations that it would keep.

    times   whether seconds of operators are measured, in a second run, as the first one makes and loads what is not
            there yet
    memory  whether results that autograd keeps are counted, rather than all

    Buffers, generators and attributes of modules are as before afterwards.

    Raises  what the module raises.
    """
    for _ in range(times + (times or memory) - 1):
        with _put_back(module):
            _run(module, args, kwargs, device)
    if times or memory:
        with _put_back(module):
            return _run(module, args, kwargs, device, times, memory)
    with _put_back(module):
        try:
            return _run(module, args, kwargs, "meta")
        except Exception as error:  # pylint: disable=broad-exception-caught
            # Also an error of the module's own: which the run with values raises, too.
            logger.debug("smp: the model cannot be traced without values (%s: %s), so it runs once with them", type(error).__name__, error)
    with _put_back(module):
        return _run(module, args, kwargs, device)


def _run(module, args, kwargs, device, times=False, memory=False):
    is_meta = device == "meta"
    # The order of named_parameters() is that of registration; tied ones come once.
    homed = homed_tensors(module)
    given = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def on_device(tensor):
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if is_meta:
            return torch.empty_like(tensor, device="meta")
        return tensor.detach().to(device or tensor.device)

    def of_call(argument):
        made = on_device(argument)
        return made.requires_grad_(argument.requires_grad) if isinstance(argument, torch.Tensor) else made

    def stand_in(tensor):
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(on_device(tensor), requires_grad=tensor.requires_grad)
        return on_device(tensor) if is_meta else on_device(tensor).clone()  # a forward may write it

    with torch.no_grad():
        tensors = {name: stand_in(tensor) for name, tensor in given.items()}
    args, kwargs = pytree.tree_map(of_call, (tuple(args), dict(kwargs)))
    recorder = _Recorder({name: tensors[name] for name in homed}, times)
    _tracing.append(module)
    try:
        with torch.device("meta") if is_meta else _keeping_nothing(recorder.keep if memory else None), _seen_by(recorder, module), _Attention(recorder), recorder:
            torch.func.functional_call(module, tensors, args, kwargs)
    finally:
        _tracing.pop()
    return dataclasses.replace(_completed(homed, recorder.finish(memory)), has_seconds=times)


def _keeping_nothing(see=None):
    """No backward pass follows, so that what autograd saves for one need not live. `see` is called with it."""
    return torch.autograd.graph.saved_tensors_hooks(see or (lambda tensor: None), lambda nothing: None)


@contextlib.contextmanager
def _seen_by(recorder, module):
    """Tells the recorder when the innermost modules that have tensors of their own begin and end."""
    first_names = {id(tensor): name for name, tensor in homed_tensors(module).items()}
    handles = []
    for inner in module.modules():
        own = [first_names[id(tensor)] for tensor in [*inner.parameters(recurse=False), *inner.buffers(recurse=False)] if id(tensor) in first_names]
        if own and not any(True for child in inner.children() for _ in child.parameters()):
            handles.append(inner.register_forward_pre_hook(lambda *_, own=own: recorder.enter(own)))
            handles.append(inner.register_forward_hook(lambda *_: recorder.leave()))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Value:
    """Memory that has a home."""

    def __init__(self, storage, atom, born):
        self.storage = StorageWeakRef(storage)  # while it is here no other one gets its address
        self.atom, self.born = atom, born
        self.first, self.last, self.crossing_bytes = atom, atom, 0
        self.is_kept = False  # a backward pass needs it


class _Attention(TorchFunctionMode):
    """Counts attention as one operator, which keeps no scores, as the kernels of devices do; on "meta" it is many."""

    def __init__(self, recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = (*args, *(kwargs[name] for name in ("query", "key", "value") if name in kwargs))[:3]
        with self._recorder.as_one(2 * query.numel() // query.size(-1) * key.size(-2) * (query.size(-1) + value.size(-1))) as count:
            return count(func(*args, **kwargs))


class _Recorder(TorchDispatchMode):
    """Sees the operators. Each counts for the atom of its first parameter; without one, for that of the innermost
    module that has tensors of its own, whose arguments are moved to its stage, and outside of these for that of the
    argument that was made last. What depends on no parameter is computed on every stage, and counts for none.
    """

    def __init__(self, tensors, times=False):
        super().__init__()
        self._times = times  # whether operators are measured
        self._kept = {}  # bytes of results that a backward pass needs, by atom
        self._names = {_key(tensor): name for name, tensor in tensors.items()}
        self._is_parameter = {name: isinstance(tensor, torch.nn.Parameter) for name, tensor in tensors.items()}
        self._atoms, self._atom_of, self._first_of = [], {}, {}  # by name of a tensor, of a module
        self._values, self._count = {}, 0
        self._furthest = 0  # the latest atom that an operator has counted for
        self._entered = []  # atoms of the modules that surround the operator
        self._is_counted = True  # False: within an operator that is counted as one

    def enter(self, own):
        """A module begins that has the tensors `own`, by their first names."""
        module = own[0].rpartition(".")[0]
        atom = next((self._atom_of[name] for name in own if name in self._atom_of), self._first_of.get(module))
        self._entered.append(self._begin(module) if atom is None else atom)

    def leave(self):
        """It ends."""
        self._entered.pop()

    @contextlib.contextmanager
    def as_one(self, flops):
        """Operators inside count for nothing, and the result that they have together, which the yielded function gets
        and returns, for all of them."""
        def count(result):
            if (value := self._values.get(_key(result))) is not None:
                self._atoms[value.atom].flops += flops
                self._atoms[value.atom].output_bytes += _bytes_of(result)
            return result

        self._is_counted = False
        try:
            yield count
        finally:
            self._is_counted = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result, seconds = _measured(func, args, kwargs) if self._times else (func(*args, **kwargs), 0.0)
        self._count += 1
        arguments = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _has_memory(leaf)]
        keys = [_key(argument) for argument in arguments]
        used = [self._names[key] for key in keys if key in self._names]
        for name in used:
            self._use(name)
        values = [self._values[key] for key in keys if key in self._values]
        if used:
            name = next((name for name in used if self._is_parameter[name]), used[0])
            atom = self._atom_of[name]
        elif values:
            atom = self._entered[-1] if self._entered else max(values, key=lambda value: value.born).atom
        else:
            return result
        self._atoms[atom].seconds += seconds
        self._reach(atom)
        for argument, key in zip(arguments, keys):
            if key in self._values:
                value = self._values[key]
                value.first, value.last = min(value.first, atom), max(value.last, atom)
                if value.atom != atom:
                    value.crossing_bytes = max(value.crossing_bytes, _bytes_of(argument))
        outputs = [leaf for leaf in pytree.tree_leaves(result) if _has_memory(leaf)]
        if self._is_counted:
            self._count_for(self._atoms[atom], func, args, kwargs, result, arguments, [output for output in outputs if _key(output) not in keys])
        for output in outputs:
            key = _key(output)
            if key not in self._names and key not in self._values:
                self._values[key] = _Value(output.untyped_storage(), atom, self._count)
        return result

    def _reach(self, atom):
        """An operator of `atom`. Where it comes after one of a later atom, a stage that ended in between would need
        that stage's forward pass."""
        for passed in self._atoms[atom:self._furthest]:
            passed.is_left_for_good = False
        self._furthest = max(self._furthest, atom)

    def keep(self, tensor):
        """A backward pass needs it: memory of the atom that made it, once."""
        value = self._values.get(_key(tensor)) if _has_memory(tensor) else None
        if value is not None and not value.is_kept:
            value.is_kept = True
            self._kept[value.atom] = self._kept.get(value.atom, 0) + tensor.untyped_storage().nbytes()

    def finish(self, by_kept=False):
        """The atoms, with what crosses behind each; `by_kept`: their results are those that a backward pass needs."""
        for index, atom in enumerate(self._atoms if by_kept else ()):
            atom.output_bytes = self._kept.get(index, 0)
        for value in self._values.values():
            for index in range(value.first, value.last):
                self._atoms[index].crossing_bytes += value.crossing_bytes
        self._values.clear()
        return self._atoms

    def _use(self, name):
        """The first use of a tensor makes an atom, or joins one."""
        if name in self._atom_of:
            return
        module = name.rpartition(".")[0]
        is_buffer_of_atom = module in self._first_of and not self._is_parameter[name]  # those are where their module is
        index = self._first_of[module] if is_buffer_of_atom else self._begin(module)
        self._atom_of[name] = index
        self._atoms[index].tensors.append(name)

    def _begin(self, module):
        """The last atom, where it is this module's; else a new one."""
        if not self._atoms or self._atoms[-1].module != module:
            self._atoms.append(Atom(module))
        index = len(self._atoms) - 1
        self._first_of.setdefault(module, index)
        return index

    @staticmethod
    def _count_for(atom, func, args, kwargs, result, arguments, made):
        atom.output_bytes += sum(map(_bytes_of, made))
        flops = flop_registry.get(func._overloadpacket)  # pylint: disable=protected-access
        if flops is not None:
            atom.flops += flops(*args, **kwargs, out_val=result)
        elif made or func._schema.is_mutable:  # pylint: disable=protected-access
            atom.moved_bytes += sum(map(_bytes_of, arguments)) + sum(map(_bytes_of, made))


def _completed(homed, atoms):
    """`atoms` with what no operator has used, which goes to its module's, or to what was registered before it."""
    index_of = {name: index for index, atom in enumerate(atoms) for name in atom.tensors}
    of_module = {}
    for index, atom in enumerate(atoms):
        of_module.setdefault(atom.module, index)
    before = 0
    for name, tensor in homed.items():
        module = name.rpartition(".")[0]
        index = index_of.get(name)
        if index is None:
            index = of_module.get(module, before if index_of else len(atoms))
            if index == len(atoms):
                atoms.append(Atom(module))
                of_module[module] = index
            atoms[index].tensors.append(name)
        atoms[index].state_bytes += tensor.numel() * (_STATE_BYTES.get(tensor.element_size(), 20) if tensor.requires_grad else tensor.element_size())
        before = index
    return Trace(atoms)


def _measured(func, args, kwargs):
    """(the result of an operator, seconds that it took)"""
    on_gpu = any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in pytree.tree_leaves((args, kwargs)))
    if on_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    result = func(*args, **kwargs)
    if on_gpu:
        torch.cuda.synchronize()
    return result, time.perf_counter() - begin


def _has_memory(value):
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested


def _key(tensor):
    return tensor.untyped_storage()._cdata  # pylint: disable=protected-access


def _bytes_of(tensor):
    return tensor.numel() * tensor.element_size()


@contextlib.contextmanager
def _put_back(module):
    """Puts back what a forward may change: generators, and attributes of modules, of which containers get their items
    and tensors their values back."""
    saved_of = []
    for inner in module.modules():
        attributes = dict(vars(inner))
        items = {name: copy.copy(value) for name, value in attributes.items() if kept.is_container(value)}
        values = {name: (value, value._version, value.detach().clone()) for name, value in attributes.items()  # pylint: disable=protected-access
                  if isinstance(value, torch.Tensor)}
        generators = [state for value in attributes.values() if (state := kept.generator_state(value))]
        saved_of.append((inner, attributes, items, values, generators))
    try:
        with generators_put_back(module):
            yield
    finally:
        for inner, attributes, items, values, generators in saved_of:
            vars(inner).clear()
            vars(inner).update(attributes)
            for generator, put_back in generators:
                put_back(generator)
            for name, saved in items.items():
                _refill(attributes[name], saved)
            for value, version, saved in values.values():
                if value._version != version:  # pylint: disable=protected-access
                    with torch.no_grad():
                        value.copy_(saved)


@contextlib.contextmanager
def generators_put_back(module):
    """Puts back the generators of torch, on the devices of `module`, of Python and of numpy."""
    devices = sorted({tensor.device.index for tensor in module.parameters() if tensor.device.type == "cuda"})
    numpy = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(of_python)
        if numpy:
            numpy.random.set_state(of_numpy)


def _refill(container, items):
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(items)
    else:
        container.extend(items)
