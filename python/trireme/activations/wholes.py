"""A program computes on whole tensors, wherever it looks.

A part has this rank's tokens of a sequence, or its heads or features of a layer, and tells the whole's sizes itself
(docs/sequence.md); what of it goes around libtorch's C++ interface is replaced here. A parameter of which this rank has
a slice is a plain tensor of the slice's sizes: Python reads the whole's off it, too.
"""
import functools
import math
import operator
import weakref

import torch
import torch.utils.checkpoint

from .. import ranks
from .._native import core as engines
from ..errors import StateError
from ..patches import Added, Entry, Patches, Wrapped
from . import streams

_cores, _of_slices = weakref.WeakSet(), weakref.WeakSet()  # all; those that cut layers
_ALL = slice(None)
_SIZE, _STORAGE = torch.Tensor.size, torch.Tensor.untyped_storage  # which tell of this rank's elements


def watch(core):
    """Programs read wholes off the parts of `core`, an engine that cuts samples or layers, from now on."""
    if not _cores:
        PATCHES.apply()
        streams.PATCHES.apply()
        _forget_sequences()  # kinds of tensors that were made since
    _cores.add(core)
    if core.has_slices:
        _of_slices.add(core)


def _forget_sequences(*_):
    """Setting `__getitem__` makes a sequence of a class, which no tensor is."""
    for kind in _and_below(torch.Tensor):
        engines.EngineBase.forget_sequence(kind)


def _and_below(kind):
    yield kind
    for one in type.__subclasses__(kind):
        yield from _and_below(one)


def sizes_of_whole(tensor):
    """The whole's sizes of a parameter of which this rank has a slice; None: it is none."""
    return next((sizes for core in list(_of_slices) if (sizes := core.whole_sizes(tensor)) is not None), None)


def storage_of(tensor):
    """Its storage, which of a part has this rank's elements; for this package alone."""
    return _STORAGE(tensor)


def is_part(value):
    """Whether this rank has some of its elements alone."""
    return isinstance(value, torch.Tensor) and any(core.is_part(value) and core.whole_of(value) is None for core in list(_cores))


def tells_wholes(value):
    """Whether it is a part that answers for the whole itself."""
    return isinstance(value, torch.Tensor) and bool(_cores) and engines.EngineBase.tells_wholes(value)


def _has_gradient_of_part(value):
    """Whether a node that torch's engine does not know stands in front of its gradient: a part's, or a parameter's of
    which this rank has a slice."""
    return tells_wholes(value) or isinstance(value, torch.Tensor) and any(core.is_slice(value) for core in list(_of_slices))


def _is_slice(value):
    """Whether it is a part that says its own sizes, so that they are looked up."""
    return isinstance(value, torch.Tensor) and sizes_of_whole(value) is not None


# --- sizes ---

def _shape(original):
    def shape(self):
        sizes = original(self)
        if not _of_slices or (whole := sizes_of_whole(self)) is None:
            return sizes
        return torch.Size(whole)
    return shape


def _size(original):
    def size(self, dim=None):
        if not _of_slices or (whole := sizes_of_whole(self)) is None:
            return original(self) if dim is None else original(self, dim)
        return torch.Size(whole) if dim is None else torch.Size(whole)[dim]
    return size


def _stride(original):
    def stride(self, dim=None):
        if not _of_slices or (whole := sizes_of_whole(self)) is None:
            return original(self) if dim is None else original(self, dim)
        strides = _strides_of_whole(original(self), _SIZE(self), whole)
        return strides if dim is None else strides[dim]
    return stride


def _strides_of_whole(strides, local, whole):
    result = list(strides)
    for step, size, of_all in zip(strides, local, whole):
        if size != of_all:
            result = [stride * of_all // size if other >= step * size else stride for stride, other in zip(result, strides)]
    return tuple(result)


def _numel(original):
    def numel(self):
        if not _of_slices or (whole := sizes_of_whole(self)) is None:
            return original(self)
        return math.prod(whole)
    return numel


def _is_leaf(original):
    """A leaf that is a part has a node in front of its gradient, which a function of the program's is to find."""
    def is_leaf(self):
        return original(self) or bool(_cores) and engines.EngineBase.is_leaf(self)
    return is_leaf


def _grad_fn(original):
    def grad_fn(self):
        return None if _cores and engines.EngineBase.is_leaf(self) else original(self)
    return grad_fn


def _broadcast(original):
    """libtorch computes the sizes of what it returns."""
    def broadcast(*tensors):
        given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
        if not _of_slices or not any(map(_is_slice, given)):
            return original(*tensors)
        sizes = torch.broadcast_shapes(*(tensor.shape for tensor in given))
        return [tensor.expand(sizes) for tensor in given]
    return broadcast


def _nbytes(original):
    def nbytes(self):
        if not _of_slices or sizes_of_whole(self) is None:
            return original(self)
        return self.numel() * self.element_size()
    return nbytes


def _len(original):
    def length(self):
        if not _of_slices or (whole := sizes_of_whole(self)) is None:
            return original(self)
        return whole[0]
    return length


def _repr(original):
    def text(self, *args, **kwargs):
        if not is_part(self):
            return original(self, *args, **kwargs)
        return f"tensor(a part of {tuple(self.shape)}, dtype={self.dtype})"
    return text


def _metadata(tensor):
    """The facts that torch.utils.checkpoint compares of a tensor, in the forward pass and in backward, where sizes are
    of parts."""
    return {"shape": _SIZE(tensor), "dtype": tensor.dtype, "device": tensor.device}


# --- numbers and copies ---

def _read_of_whole(name, original):
    def read(self, *args, **kwargs):
        if not is_part(self):
            return original(self, *args, **kwargs)
        raise StateError(f"{name}: {tuple(self.shape)} is a tensor of which this rank has a part; read numbers from a total, such as sum(), or of features "
                         "and heads from engine.gather(tensor)")
    return read


def _refused(name, reason, original):
    def refused(self, *args, **kwargs):
        if is_part(self):
            raise StateError(f"{name}: {tuple(self.shape)} is a tensor of which this rank has a part, and {reason}")
        return original(self, *args, **kwargs)
    return refused


def _scripted(original):
    """TorchScript reads sizes without Python."""
    def call(self, *args, **kwargs):
        if _of_slices and any(map(_is_slice, (*args, *kwargs.values()))):
            graph = str(getattr(self, "inlined_graph", None) or self.graph)
            if any(reader in graph for reader in ("aten::size(", "aten::numel(", "aten::len(", "aten::stride(", "aten::sym_size")):
                raise StateError(f"{getattr(self, 'name', 'a function')} of TorchScript reads sizes of a tensor of which this rank has a part, which are "
                                 "this rank's there; "
                                 "call the Python function that it was made of")
        return original(self, *args, **kwargs)
    return call


def _retained(original):
    def retain_grad(self):
        if tells_wholes(self):
            return original(self)
        return _refused("retain_grad", _OWN_ELEMENTS, original)(self)
    return retain_grad


def _hooked(original):
    """A backward hook of a module gets gradients of its inputs or outputs."""
    def hooked(self, args):
        if _cores and any(map(is_part, args if isinstance(args, tuple) else (args,))):
            raise StateError(f"register_full_backward_hook: {type(self.module).__name__} computes on a part of a tensor, whose gradient has this rank's "
                             "elements alone; hook a module around it, whose inputs and outputs are whole")
        return original(self, args)
    return hooked


_OWN_ELEMENTS = ("so is its gradient, which has this rank's elements alone and sizes of its own: "
                 "use trireme.utils.safe_get_full_grad() of parameters, torch.autograd.grad() of activations")


def _run_by_parts(original):
    """A pass that begins at parts, or gives gradients of them, goes through the engine that knows of parts."""
    def run(outputs, grad_outputs, keep_graph, create_graph, inputs, allow_unreachable=False, accumulate_grad=False):
        if not _cores or not (create_graph or any(map(tells_wholes, outputs)) or any(map(_has_gradient_of_part, inputs))):
            return original(outputs, grad_outputs, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad)
        return engines.EngineBase.run_backward(list(outputs), list(grad_outputs), keep_graph, create_graph, list(inputs), allow_unreachable, accumulate_grad)
    return run


def _recorded(original):
    """Hooks of several tensors ask which of their nodes a pass will run."""
    def node_of(t):
        return engines.EngineBase.recorded_node(t) if tells_wholes(t) else original(t)
    return node_of


class _Hook:
    """Takes away a hook of a part."""
    def __init__(self, part, place):
        self._part, self._place = part, place

    def remove(self):
        engines.EngineBase.remove_hook(self._part, self._place)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.remove()


def _register_hook(original):
    """A hook of a part gets parts, where torch's would get this rank's elements."""
    def register_hook(self, hook):
        if tells_wholes(self):
            return _Hook(self, engines.EngineBase.register_hook(self, hook))
        return _refused("register_hook", _OWN_ELEMENTS, original)(self, hook)
    return register_hook


def _differentiated(original):
    """Gradients of slices of a layer come whole."""
    def grad(outputs, inputs, *args, **kwargs):
        given = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        slices = {index: core for index, tensor in enumerate(given) for core in list(_of_slices) if core.is_slice(tensor)}
        found = original(outputs, inputs, *args, **kwargs)
        return tuple(slices[i].gather_like(one, given[i]) if i in slices and one is not None else one for i, one in enumerate(found)) if slices else found
    return grad


# --- indices ---

def _has_places_of_whole(value):
    """Whether an index is taken apart here: of a slice, and on every stage of what may be one on another stage, so that
    all run the same operators."""
    return _is_slice(value) or isinstance(value, torch.nn.Parameter) and any(getattr(core, "stages", 1) > 1 for core in list(_of_slices))


def _getitem(original):
    def getitem(self, index):
        if not _of_slices or not _has_places_of_whole(self):
            return original(self, index)
        view, indices = _taken(self, index)
        return torch.ops.aten.alias(view) if indices is None else original(view, tuple(_ALL if one is None else one for one in indices))
    return getitem


def _setitem(original):
    def setitem(self, index, value):
        if not _of_slices or not (_has_places_of_whole(self) or _has_places_of_whole(value)):
            return original(self, index, value)
        view, indices = _taken(self, index)
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(value, dtype=self.dtype, device=self.device)
        if indices is not None:
            torch.ops.aten.index_put_(view, indices, value.to(self.dtype))
        elif value.dim() == 0:
            view.copy_(value) if value.requires_grad else view.fill_(value)  # pylint: disable=expression-not-assigned
        else:
            while value.dim() > view.dim() and value.shape[0] == 1:
                value = value.squeeze(0)
            view.copy_(value)
        return None
    return setitem


def _taken(tensor, index):
    """`tensor` after the slices and numbers of `index`, one operator for each, and its tensors, None for dims without
    one.

    libtorch reads a part's sizes where it takes an index apart; here places are the whole's.
    """
    parts = [torch.as_tensor(part, device=tensor.device) if isinstance(part, (list, range)) or hasattr(part, "__array__") and not isinstance(part, torch.Tensor)
             and getattr(part, "ndim", 0) > 0 else part for part in (index if isinstance(index, tuple) else (index,))]
    named = sum(_dims(part) for part in parts)
    view, dim, indices = tensor, 0, []
    for part in parts:
        if part is None or isinstance(part, bool):
            view = view.unsqueeze(dim)
            indices.append(None if part is None else torch.tensor([part], device=tensor.device))
            dim += 1
        elif part is Ellipsis:
            skipped = tensor.dim() - named
            indices += [None] * skipped
            dim += skipped
        elif isinstance(part, slice):
            if part != _ALL:
                begin, end, step = (None if place is None else operator.index(place) for place in (part.start, part.stop, part.step))
                view = torch.ops.aten.slice(view, dim, begin, end, 1 if step is None else step)
            indices.append(None)
            dim += 1
        elif isinstance(part, torch.Tensor) and (part.dim() > 0 or part.dtype in (torch.bool, torch.uint8)):
            if part.dim() == 0:
                view, part = view.unsqueeze(dim), part.unsqueeze(0)
            indices.append(part)
            dim += part.dim() if part.dtype in (torch.bool, torch.uint8) else 1
        elif isinstance(part, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(part):  # pylint: disable=protected-access
            raise StateError(f"an index inside of torch.func's vmap() or grad() takes elements of {tuple(tensor.shape)}, a part; write the batch dim out")
        else:
            view = torch.select(view, dim, operator.index(part))
    while indices and indices[-1] is None:
        indices.pop()
    return view, indices or None


def _dims(part):
    """How many dims of a tensor an index takes."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.dim() if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) else 1


# --- where programs read ---

def _without_fast_path(_):
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(before)


def _no_sequences(_):
    _forget_sequences()
    return _forget_sequences  # also after the class has got its own methods again


def _rows(names, make, why, owner="torch"):
    return [Wrapped(owner, name, why, make) for name in names]


def _refusals(names, reason, why):
    return [Wrapped("torch", f"Tensor.{name}", why, functools.partial(_refused, name, reason)) for name in names]


_SIZES = "sizes of a part are the whole's"
_NUMBERS = "numbers of a part are the whole's where that is known, and refused elsewhere"
_LEAVES = "a leaf stays one where gradients of a program's functions pass a node to it"
_PLACES = "places of elements are the whole's"

PATCHES = Patches(__name__, "an engine is made that cuts samples or layers (sequence or tensor parallelism)", [
    *_rows(["Tensor.shape"], _shape, _SIZES),
    *_rows(["Tensor.nbytes"], _nbytes, _SIZES),
    *_rows(["Tensor.size"], _size, _SIZES),
    *_rows(["Tensor.stride"], _stride, _SIZES),
    *_rows(["Tensor.numel", "Tensor.nelement", "numel"], _numel, _SIZES),
    *_rows(["Tensor.__len__"], _len, _SIZES),
    *_rows(["Tensor.is_leaf"], _is_leaf, _LEAVES),
    *_rows(["Tensor.grad_fn"], _grad_fn, _LEAVES),
    *_rows(["Tensor.__repr__"], _repr, _SIZES),
    Wrapped("torch", "broadcast_tensors", _SIZES, _broadcast, also=("torch.functional.broadcast_tensors",)),
    *_rows(["Tensor.__getitem__"], _getitem, _PLACES),
    *_rows(["Tensor.__setitem__"], _setitem, _PLACES),
    Added("torch", "Tensor", "what has `__getitem__` in Python is a sequence to it, and a tensor stays none", _no_sequences),
    *[Wrapped("torch", f"Tensor.{name}", _NUMBERS, functools.partial(_read_of_whole, name)) for name in ("tolist", "numpy", "__array__")],
    *_refusals(("__deepcopy__", "__reduce_ex__", "__dlpack__"), "a copy of a part is not known as a part; use clone(), "
               "copy a batch before it is cut, and save a model by the engine", "refuses to copy a part"),
    *_refusals(("untyped_storage", "storage", "_typed_storage", "storage_offset"), "a storage has this rank's elements alone; read sizes from shape or nbytes",
               "refuses the storage of a part"),
    *_rows(["Tensor.register_hook"], _register_hook, "a hook of a part gets parts"),
    *_rows(["Tensor.retain_grad"], _retained, "refuses the gradient of a slice"),
    *_refusals(("register_post_accumulate_grad_hook",), _OWN_ELEMENTS, "refuses the gradient of a part"),
    *_rows(["_get_grad_fn_or_grad_acc"], _recorded, "a hook of several tensors waits for nodes that a pass runs", "torch.autograd.graph"),
    *_rows(["_engine_run_backward"], _run_by_parts, "a pass that begins at parts or gives gradients of them knows of parts", "torch.autograd"),
    *_rows(["BackwardHook.setup_input_hook", "BackwardHook.setup_output_hook"], _hooked, "refuses backward hooks of modules that compute on a part",
           "torch.utils.hooks"),
    *_rows(["ScriptFunction.__call__", "ScriptMethod.__call__"], _scripted, "refuses functions of TorchScript that read sizes of a part", "torch._C"),
    *_rows(["grad"], _differentiated, "gradients of slices come whole", "torch.autograd"),
    Entry("torch.utils.checkpoint", "_allowed_determinism_checks_to_fns", "default", "torch compares tensors that are computed again by the sizes of parts",
          lambda _: _metadata),
    Added("torch.backends.mha", "_is_fastpath_enabled", "a whole layer is not one operator, into which nothing can look", _without_fast_path),
], ranks.living)
