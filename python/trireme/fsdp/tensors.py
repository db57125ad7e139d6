"""The tensors that an FSDP program sees: parameters, and what state_dict() gives. gradients.py has their gradients."""
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree

from .. import agreement, ranks
from .._native import core
from ..errors import StateError, UnsupportedError
from ..parameters import numbered
from ..patches import Patches, Wrapped
from . import values
from .values import ReadWhole, Source, Value

_RANDOM = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_")
_DATA = torch.Tensor.data
# Names of what tells nothing of values, and changes none
_AS_IT_IS = set("size dim numel nelement ndimension stride storage_offset is_contiguous is_floating_point is_complex is_signed get_device data_ptr untyped_storage storage "
                "_typed_storage requires_grad_ register_hook retain_grad backward is_shared share_memory_ __hash__ __len__ is_pinned is_inference is_set_to _is_view "
                "has_names __set__ __delete__ is_same_size".split())
_GETTERS_OF_VALUES = {"dtype", "itemsize", "nbytes", "T", "mT", "H", "mH", "real", "imag"}
_OPERATOR_WRITES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__", "__ifloordiv__", "__imod__", "__imatmul__", "__iand__", "__ior__",
                    "__ixor__", "__ilshift__", "__irshift__"}


class Placed:
    """Answers of DTensor, by rows as PyTorch's FSDP places them, of a tensor that belongs to a parameter."""

    __slots__ = ()

    def _fsdp_parameter(self):
        raise NotImplementedError

    def full_tensor(self):
        """A copy, whole and plain. Collective."""
        raise NotImplementedError

    @property
    def device_mesh(self):
        """The mesh that the program has given, or one of all ranks."""
        return self._fsdp_parameter().fsdp_root().tree.mesh()

    @property
    def placements(self):
        """Rows over the last dim of the mesh, replicas over the others: how a DTensor of it is made. What a rank has
        here are other elements."""
        return (*[Replicate()] * (self.device_mesh.ndim - 1), Shard(0) if self.dim() else Replicate())

    def redistribute(self, device_mesh=None, placements=None, **_):
        """A DTensor, with `placements`. Collective."""
        mesh = self.device_mesh if device_mesh is None else device_mesh
        whole = DTensor.from_local(self.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole.redistribute(mesh, self.placements if placements is None else placements)


def lent(part, parameter):
    """`part`, this rank's elements of a parameter or gradient, as it is given to a program."""
    part.fsdp_lent_of = parameter
    return part


class Whole(Placed, torch.Tensor):
    """A tensor of which every rank has all, or gets all by any operator; with DTensor's methods."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pylint: disable=protected-access

    def _fsdp_parameter(self):
        parameter = numbered(self) if core.is_managed(self) else None
        if not isinstance(parameter, ShardedParameter):
            raise NoPlaceError("this tensor is no parameter's; it is whole on every rank: full_tensor() is a copy")
        return parameter

    def full_tensor(self):
        """A copy, whole and plain. Of a parameter collective."""
        parameter = numbered(self) if core.is_managed(self) else None
        return core.whole_tensor(self) if parameter is None else parameter.fsdp_root().values.read(parameter)

    def to_local(self):
        """The elements of a parameter that this rank updates; else the tensor itself. Of a parameter collective."""
        return self._fsdp_parameter().to_local() if core.is_managed(self) else self.as_subclass(torch.Tensor)

    def __deepcopy__(self, memo):
        """A copy, whole and plain. Of a parameter collective."""
        memo[id(self)] = self.full_tensor()
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # files are read without this package


class Form(Placed, torch.Tensor):
    """A parameter on the device "meta", in state_dict(): shape, dtype, and where a DTensor of it goes."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pylint: disable=protected-access

    def _fsdp_parameter(self):
        return self.fsdp_form_of

    def full_tensor(self):
        """Raises StateError: there are no values."""
        raise StateError("full_tensor() of a tensor on the device \"meta\": load a state dict with assign=True, or call model.to_empty(device=…) and fill it")

    to_local = full_tensor


def form_of(parameter):
    """`parameter`, on the device "meta", as a Form."""
    with torch._C.DisableTorchFunctionSubclass():  # pylint: disable=protected-access
        made = parameter.detach().as_subclass(Form)
    made.fsdp_form_of = parameter
    return made


class NoPlaceError(UnsupportedError, AttributeError):
    """An answer of DTensor that a tensor has not."""


class _OfParameter(Source):
    """A parameter's value: in fp32 where modules compute with rounded weights."""

    def __init__(self, parameter, keeps=False):
        root = parameter.fsdp_root()
        super().__init__(parameter.shape, root.exact.shown_dtype(parameter), parameter.device, keeps)
        self.parameter, self._root = parameter, root

    def version(self):
        return self._root.exact.version()

    def gather(self):
        return self._root.values.read(self.parameter)

    def scatter(self, whole):
        self._root.values.write(self.parameter, whole)

    def key(self):
        return id(self.parameter)


class ParameterValue(Placed, Value):
    """A parameter's value itself, such as p.data and what state_dict() gives."""

    def __new__(cls, parameter, keeps=False):
        """`keeps`: what was read is kept until the values change."""
        return super().__new__(cls, _OfParameter(parameter, keeps))

    def _fsdp_parameter(self):
        return self.source.parameter

    full_tensor = Value.full_tensor

    def to_local(self):
        """The elements that this rank updates. Collective."""
        return self._fsdp_parameter().to_local()


class _Read(torch.autograd.Function):
    """A parameter's value with its graph: make() gives it."""

    @staticmethod
    def forward(ctx, parameter, make):  # pylint: disable=unused-argument
        return make()

    @staticmethod
    def backward(ctx, gradient):  # pylint: disable=unused-argument
        return gradient, None

    @staticmethod
    def jvp(ctx, tangent, _):  # pylint: disable=unused-argument
        return tangent


class ShardedParameter(Placed, torch.nn.Parameter):
    """A parameter of a wrapped module. Any operator finds it whole; `grad` is this rank's part of the reduced
    gradient."""

    fsdp_root = None  # a function that gives the Root

    @property
    def grad(self):
        """A Gradient; None: no rank's backward passes gave one. Collective when first read after a backward pass."""
        return self.fsdp_root().window.gradient_of(self)

    @grad.setter
    def grad(self, value):
        self.fsdp_root().window.set_gradient(self, value)

    @grad.deleter
    def grad(self):
        self.fsdp_root().window.set_gradient(self, None)

    def _fsdp_parameter(self):
        return self

    def full_tensor(self):
        """A copy, whole and plain, with a graph where autograd is on. Collective."""
        program_values = self.fsdp_root().sharded().values
        if not (self.requires_grad and torch.is_grad_enabled()):
            return program_values.read(self)
        with torch._C.DisableTorchFunctionSubclass():  # pylint: disable=protected-access
            return _Read.apply(self, lambda: program_values.read(self))

    def to_local(self):
        """The elements that this rank updates, [n] of the flattened parameter: what the program writes into them is the
        parameter's when it is used next. Collective."""
        return self.fsdp_root().sharded().values.lend(self)

    _local_tensor = property(to_local)

    @property
    def data(self):
        """See torch's."""
        return _DATA.__get__(self)

    @data.setter
    def data(self, value):
        with torch._C.DisableTorchFunctionSubclass():  # pylint: disable=protected-access
            _DATA.__set__(self, value)

    def copy_(self, source, non_blocking=False):
        """As torch's, also of a DTensor. Collective then."""
        return super().copy_(values.plain(source), non_blocking)

    def __deepcopy__(self, memo):
        """A copy, whole and plain, a torch.nn.Parameter. Collective."""
        if id(self) not in memo:
            memo[id(self)] = self._fsdp_plain()
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return self._fsdp_plain().__reduce_ex__(protocol)  # files are read without this package

    def _fsdp_plain(self):
        with torch.no_grad():
            return torch.nn.Parameter(self.fsdp_root().sharded().values.read(self), self.requires_grad)

    def register_post_accumulate_grad_hook(self, hook):
        """Raises UnsupportedError."""
        raise UnsupportedError("register_post_accumulate_grad_hook: gradients are reduced after the backward pass; step by optimizer.step() after it")

    def register_hook(self, hook):
        """As torch's, on one rank. Raises UnsupportedError: on several."""
        if ranks.world().size > 1:
            refuse_hook(f"of shape {tuple(self.shape)}")
        return super().register_hook(hook)

    def fsdp_drawn(self, name, args, kwargs):
        """A method that fills it with random numbers. Once it is sharded they are rank 0's. Collective then."""
        fill = lambda tensor: getattr(torch.Tensor, name)(tensor, *args, **kwargs)
        if not self.fsdp_root().tree.is_sharded or ranks.world().size == 1 or (self.requires_grad and torch.is_grad_enabled()):
            return fill(self)
        return self.copy_(values.drawn(fill, self))


class ValuedParameter(ReadWhole, ShardedParameter):
    """A ShardedParameter while what a program reads and writes is not what modules compute with: outside of them where
    they round, and after to_local(). The same object; ProgramValues.computing() makes it a ShardedParameter and back.

    Every operator, whatever its name, gets a Value in its place.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _tells_no_values(func) or values.is_in_backward() or _writes_leaf(func, args):
            with torch._C.DisableTorchFunctionSubclass():  # pylint: disable=protected-access
                return func(*args, **kwargs)
        replaced = {}

        def value_of(parameter):
            if parameter not in replaced:
                replaced[parameter] = parameter.fsdp_value()
            return replaced[parameter]

        with torch._C.DisableTorchFunctionSubclass():  # pylint: disable=protected-access
            swapped = _pytree.tree_map_only(ValuedParameter, value_of, (args, kwargs))
        result = values.called(func, *swapped)
        # An operator that has nothing to do, or writes, gives what it was given
        return next((parameter for parameter, value in replaced.items() if value is result), result)

    def fsdp_value(self):
        """A Value, with a graph where autograd is on."""
        if self.requires_grad and torch.is_grad_enabled():
            return _Read.apply(self, lambda: ParameterValue(self, keeps=True))
        return ParameterValue(self)

    def fsdp_kept(self):
        """A Value that keeps what it has gathered now until values change. Collective."""
        made = ParameterValue(self, keeps=True)
        made.source.read()
        return made

    @property
    def data(self):
        """A Value; what is written into it is the parameter's."""
        if values.is_in_backward():
            return self._fsdp_as_modules_see(_DATA.__get__)
        return ParameterValue(self)

    @data.setter
    def data(self, value):
        if value is not self and not (isinstance(value, ParameterValue) and value.source.parameter is self):
            with torch.no_grad():
                self.copy_(value)

    def detach(self):
        """A Value; what is written into it is the parameter's."""
        return self._fsdp_as_modules_see(torch.Tensor.detach) if values.is_in_backward() else ParameterValue(self)

    def _fsdp_as_modules_see(self, function):
        with torch._C.DisableTorchFunctionSubclass():  # pylint: disable=protected-access
            return function(self)

    def __repr__(self, **_):
        return f"Parameter(shape={list(self.shape)}, dtype={self.dtype}, requires_grad={self.requires_grad})"


def _tells_no_values(func):
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _GETTERS_OF_VALUES
    return name in _AS_IT_IS


def _writes_leaf(func, args):
    """Whether torch refuses `func`, which would write a leaf of autograd in place."""
    name = getattr(func, "__name__", "")
    writes = name in _OPERATOR_WRITES or (name.endswith("_") and not name.endswith("__"))
    return writes and args and isinstance(args[0], ValuedParameter) and torch.is_grad_enabled() and args[0].requires_grad


def _drawn(name):
    def method(self, *args, **kwargs):
        return self.fsdp_drawn(name, args, kwargs)

    method.__name__, method.__doc__ = name, f"As torch's {name}(). Once the parameter is sharded the numbers are rank 0's. Collective then."
    return method


for _name in _RANDOM:
    setattr(ShardedParameter, _name, _drawn(_name))


def refuse_hook(which):
    """Raises UnsupportedError: hooks of a parameter run before ranks' gradients are averaged."""
    raise UnsupportedError(f"register_hook() of the parameter {which}: the hook would get this rank's own gradient, before the mean over ranks; change or read "
                           "parameter.grad after backward()")


def _writing(to_parameters):
    def vector_to_parameters(vec, parameters):
        parameters = list(parameters)
        if not any(isinstance(one, ShardedParameter) for one in parameters):
            return to_parameters(vec, parameters)
        with torch.no_grad():  # torch's puts views of the vector in the place of their data
            for parameter, value in zip(parameters, vec.split([one.numel() for one in parameters])):
                parameter.copy_(value.view(parameter.shape))
        return None

    return vector_to_parameters


def _refusing_grad(original):
    def grad(outputs, inputs, *args, **kwargs):
        inputs = inputs if isinstance(inputs, (torch.Tensor, torch.autograd.graph.GradientEdge)) else tuple(inputs)
        found = [one for one in (inputs if type(inputs) is tuple else [inputs]) if isinstance(one, ShardedParameter)]
        if found and ranks.world().size > 1:
            raise UnsupportedError(f"torch.autograd.grad() by a sharded parameter of shape {tuple(found[0].shape)}: it would be this rank's own gradient, not the mean "
                                   "over ranks; call loss.backward() and read parameter.grad")
        return original(outputs, inputs, *args, **kwargs)

    return grad


def _refusing_local(from_local):
    def from_local_rows(local_tensor, *args, **kwargs):
        if getattr(local_tensor, "fsdp_lent_of", None) is not None:
            raise UnsupportedError(f"DTensor.from_local() of to_local() of a parameter of shape {tuple(local_tensor.fsdp_lent_of.shape)}: this rank has elements of the flattened "
                                   "parameter, not rows; take redistribute(), which gives a DTensor")
        return from_local(local_tensor, *args, **kwargs)

    return from_local_rows


def _beside_parameters(_cls, func, _types, args=(), kwargs=None):
    """An operator that has a DTensor: beside parameters, their values and gradients, and what was computed of these, it
    is of wholes. Collective then."""
    kwargs, found = kwargs or {}, _pytree.tree_leaves((args, kwargs))
    if any(isinstance(one, (ValuedParameter, Value)) for one in found):
        return NotImplemented  # they do the same
    if not torch.compiler.is_compiling() and any(map(_is_of_parameter, found)):
        return values.called(func, args, kwargs)
    try:
        with torch._C.DisableTorchFunctionSubclass():  # pylint: disable=protected-access
            return func(*args, **kwargs)
    except RuntimeError as error:
        if torch.compiler.is_compiling() or "got mixed torch.Tensor and DTensor" not in str(error):
            raise
    others = {f"argument {index}": one for index, one in enumerate(found) if isinstance(one, torch.Tensor) and not isinstance(one, DTensor)}
    agreement.check_tensors(ranks.world(), f"{getattr(func, '__name__', func)}() with a DTensor", others)
    return values.called(func, args, kwargs)


def _is_of_parameter(one):
    """Whether PyTorch's FSDP would have a DTensor where `one` is."""
    if isinstance(one, Placed):
        return True
    return isinstance(one, torch.Tensor) and not isinstance(one, DTensor) and not one.is_meta and core.is_managed(one)


def as_shown(state):
    """`state`, a module's state_dict(), as it is to be shown: fp32 values where modules compute in another dtype.
    Collective then."""
    for name, value in state.items():
        if isinstance(value, ParameterValue):
            state[name] = value.source.parameter.fsdp_kept()
        elif type(value) is torch.Tensor and core.is_managed(value):
            state[name] = value.as_subclass(Whole)
    return state


def show(parameter, root):
    """Makes `parameter` a ShardedParameter, the same object. Raises UnsupportedError: it is a tensor of another
    class."""
    if type(parameter) not in (torch.nn.Parameter, ShardedParameter, ValuedParameter):
        raise UnsupportedError(f"fully_shard: a parameter of shape {tuple(parameter.shape)} is a {type(parameter).__name__}; only plain torch.nn.Parameter are "
                               "sharded: take those of subclasses, such as quantised or distributed ones, as buffers, or out of the module")
    if parameter._post_accumulate_grad_hooks:  # pylint: disable=protected-access
        raise UnsupportedError(f"fully_shard: a parameter of shape {tuple(parameter.shape)} has a hook of register_post_accumulate_grad_hook(); gradients are reduced "
                               "after the backward pass: step by optimizer.step() after it")
    if parameter.grad is not None and type(parameter) is torch.nn.Parameter:
        raise StateError(f"fully_shard: a parameter of shape {tuple(parameter.shape)} has a gradient already; set it to None first")
    if not isinstance(parameter, ShardedParameter):
        parameter.__class__ = ShardedParameter
    parameter.fsdp_root = root


PATCHES = Patches(__name__, "`fully_shard()` or `FullyShardedDataParallel()` is first called", [
    Wrapped("torch.nn.utils", "vector_to_parameters", "writes into sharded parameters; torch's would put views of the vector in the place of their data", _writing,
            also=("torch.nn.utils.convert_parameters.vector_to_parameters",)),
    Wrapped("torch.autograd", "grad", "refuses the gradient of one rank by a sharded parameter", _refusing_grad),
    Wrapped("torch.distributed.tensor", "DTensor.from_local", "refuses elements of a flattened parameter as rows", _refusing_local),
    Wrapped("torch.distributed.tensor", "DTensor.__torch_function__", "an operator of a DTensor and a sharded parameter is one of wholes",
            lambda _: classmethod(_beside_parameters)),
])  # optimizers.PATCHES, which is applied with these, knows who needs them
