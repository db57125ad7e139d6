"""The tensors that an FSDP program sees: parameters, their gradients, and what state_dict() gives."""
import functools

import torch
from torch.utils import _pytree

from .. import ranks
from .._native import core
from ..errors import StateError, UnsupportedError
from ..parameters import numbered

_aten = torch.ops.aten
# Elements of the result depend on the same elements of the arguments alone, so every rank computes its own.
_ELEMENTWISE = {getattr(_aten, name) for name in (
    "mul mul_ div div_ add add_ sub sub_ rsub neg neg_ abs abs_ pow pow_ sqrt sqrt_ rsqrt rsqrt_ square square_ reciprocal reciprocal_ exp exp_ log log_ tanh tanh_ "
    "sigmoid sigmoid_ sign sign_ sgn sgn_ round round_ floor ceil trunc where lerp lerp_ maximum minimum fmax fmin addcmul addcmul_ addcdiv addcdiv_ zero_ fill_ copy_ "
    "clone detach alias isnan isinf clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ nan_to_num nan_to_num_ masked_fill masked_fill_ eq ne lt le gt ge "
    "_to_copy zeros_like ones_like full_like logical_not logical_or logical_and logical_xor bitwise_not bitwise_or bitwise_and bitwise_xor").split()}
_ALIASES = {_aten.detach, _aten.alias}
# Whole reductions: (of this rank's elements, or of none; how ranks' results are joined).
_REDUCTIONS = {_aten.sum: (lambda own: own.sum(), "sum"), _aten.mean: (lambda own: own.sum(), "sum"),
               _aten.any: (lambda own: own.any(), "max"), _aten.all: (lambda own: own.all(), "min"),
               _aten.max: (lambda own: own.max() if own.numel() else own.new_full((), -torch.inf), "max"),
               _aten.min: (lambda own: own.min() if own.numel() else own.new_full((), torch.inf), "min"),
               _aten.count_nonzero: (lambda own: own.count_nonzero(), "sum")}
_REDUCTIONS |= {_aten.amax: _REDUCTIONS[_aten.max], _aten.amin: _REDUCTIONS[_aten.min]}
_SPREADS = {_aten.std: lambda variance: variance.sqrt(), _aten.var: lambda variance: variance}
# Random numbers of the whole, which rank 0 draws: functions of a tensor, and those that write one.
_DRAWS = {_aten.randn_like: torch.Tensor.normal_, _aten.rand_like: torch.Tensor.uniform_}
_RANDOM = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_")
# Methods that give a parameter its next value, in place.
_WRITES_EXACTLY = ("copy_ add_ sub_ mul_ div_ lerp_ addcmul_ addcdiv_ clamp_ clamp_min_ clamp_max_ pow_ sqrt_ abs_ neg_ sign_ tanh_ round_ nan_to_num_ masked_fill_ renorm_ "
               "__iadd__ __isub__ __imul__ __itruediv__ __ipow__").split()
_RANDOM_FUNCTIONS = ("rand", "bernoulli", "multinomial", "normal", "poisson", "dropout")
_NO_WRITES = ("requires_grad_", "detach_", "share_memory_", "rename_", "is_shared_", "retain_grad_")
_OPERATOR_WRITES = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__", "__ifloordiv__", "__imod__", "__imatmul__", "__iand__", "__ior__",
                    "__ixor__", "__ilshift__", "__irshift__")
_DATA = torch.Tensor.data
_FILLS = {getattr(_aten, name): name for name in _RANDOM}
_FOREACH = "_foreach_"
_ONE_OF = {"maximum_": "clamp_min_", "minimum_": "clamp_max_"}  # of what _foreach has in place and tensors have not
_NORMS = {_aten.linalg_vector_norm, _aten.norm}


class Whole(torch.Tensor):
    """A tensor of which every rank has all, or gets all by any operator; with DTensor's methods."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pylint: disable=protected-access

    def full_tensor(self):
        """A copy, whole and plain. Of a parameter collective."""
        parameter = numbered(self) if core.is_managed(self) else None
        return core.whole_tensor(self) if parameter is None else parameter.fsdp_root().full_parameter(parameter)

    def __deepcopy__(self, memo):
        """A copy, whole and plain. Of a parameter collective."""
        memo[id(self)] = self.full_tensor()
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # files are read without this package


def _writes(name):
    return name in _OPERATOR_WRITES or (name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES)


def _has_parameters(value):
    """Whether parameters that modules compute with in bf16, or their data, are in a list."""
    return isinstance(value, (list, tuple)) and any(
        isinstance(one, Rounded) or (isinstance(one, ShardedParameter) and one.fsdp_root().has_other_values()) for one in value)


def refuse_lists(name):
    """Raises UnsupportedError: an operator would write values that were rounded."""
    raise UnsupportedError(f"torch.{name} into parameters whose modules compute in bf16: it would write rounded values; call the method of each parameter, such as "
                           "p.mul_() under torch.no_grad()")


class Rounded(torch.Tensor):
    """Data of a parameter that modules compute with in bf16, or a view of them: outside of modules operators read and
    write its fp32 value. Collective where they read or write."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():  # pylint: disable=protected-access
            leaves = _pytree.tree_leaves((args, kwargs))
            if any(isinstance(one, Gradient) for one in leaves):
                return func(*args, **kwargs)
            root = numbered(next(one for one in leaves if isinstance(one, Rounded))).fsdp_root()
            if "out" in kwargs or (_writes(name) and not isinstance(args[0], Rounded) and _has_parameters(args[0])):
                refuse_lists(name)
            if _writes(name) and isinstance(args[0], Rounded):
                if name == "copy_" and args[1].dtype != torch.float32:  # what it gives was rounded before
                    return func(*args, **kwargs)
                rest, more = _pytree.tree_map(root.exact, (args[1:], kwargs))
                root.write(args[0], lambda value: func(value, *rest, **more))
                return args[0]
            if _writes(name) or name.endswith("_like") or name.startswith(_RANDOM_FUNCTIONS):  # what may run once
                exact, more = _pytree.tree_map(root.exact, (args, kwargs))
                return func(*exact, **more)
            result = func(*args, **kwargs)
            is_own = lambda one: isinstance(one, torch.Tensor) and core.is_managed(one)
            found = [one for one in _pytree.tree_leaves(result) if isinstance(one, torch.Tensor)]
            if not found or any(map(is_own, found)):
                return _pytree.tree_map(lambda one: one.as_subclass(Rounded) if is_own(one) else one, result)
            exact, more = _pytree.tree_map(root.exact, (args, kwargs))
            return func(*exact, **more)

    def __deepcopy__(self, memo):
        memo[id(self)] = self.clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return self.clone().__reduce_ex__(protocol)  # files are read without this package


class ShardedParameter(torch.nn.Parameter):
    """A parameter of a wrapped module. Any operator finds it whole; `grad` is this rank's part of the reduced
    gradient."""

    fsdp_root = None  # a function that gives the Root

    @property
    def grad(self):
        """A Gradient; None: no rank's backward passes gave one. Collective when first read after a backward pass."""
        return self.fsdp_root().gradient_of(self)

    @grad.setter
    def grad(self, value):
        self.fsdp_root().set_gradient(self, value)

    @grad.deleter
    def grad(self):
        self.fsdp_root().set_gradient(self, None)

    def full_tensor(self):
        """A copy, whole and plain. Collective."""
        return self.fsdp_root().full_parameter(self)

    @property
    def data(self):
        """As torch's; a Rounded where modules compute in bf16."""
        return self._exactly(_DATA.__get__(self))

    @data.setter
    def data(self, value):
        with torch._C.DisableTorchFunctionSubclass():  # pylint: disable=protected-access
            _DATA.__set__(self, value.as_subclass(torch.Tensor) if isinstance(value, Rounded) else value)

    def detach(self):
        """As torch's; a Rounded where modules compute in bf16."""
        return self._exactly(super().detach())

    def _exactly(self, alias):
        return alias.as_subclass(Rounded) if self.fsdp_root().has_other_values() else alias

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
        if not self.fsdp_root().is_sharded or ranks.world().size == 1 or (self.requires_grad and torch.is_grad_enabled()):
            return fill(self)
        return self.copy_(self.fsdp_root().drawn(fill, self))

    def to_local(self):
        """A copy of the elements that this rank updates, [n] of the flattened parameter. Collective."""
        root = self.fsdp_root()
        root.engine()
        return root.local_parameter(self)


def _drawn(name):
    def method(self, *args, **kwargs):
        return self.fsdp_drawn(name, args, kwargs)

    method.__name__, method.__doc__ = name, f"As torch's {name}(). Once the parameter is sharded the numbers are rank 0's. Collective then."
    return method


def _exact(name):
    original = getattr(torch.Tensor, name)

    def method(self, *args, **kwargs):
        root = self.fsdp_root()
        # what it gives was rounded before
        rounds = name == "copy_" and not (args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float32)
        if rounds or not root.writes_exactly(self):
            return original(self, *args, **kwargs)
        exact = [root.exact(arg) for arg in args], {key: root.exact(arg) for key, arg in kwargs.items()}
        root.write(self, lambda value: original(value, *exact[0], **exact[1]))
        return self

    method.__name__, method.__doc__ = name, f"As torch's {name}(). Where modules compute in bf16, of the fp32 values. Collective then."
    return method


for _name in _RANDOM:
    setattr(ShardedParameter, _name, _drawn(_name))
for _name in _WRITES_EXACTLY:
    setattr(ShardedParameter, _name, _exact(_name))


def refuse_hook(which):
    """Raises UnsupportedError: hooks of a parameter run before ranks' gradients are averaged."""
    raise UnsupportedError(f"register_hook() of the parameter {which}: the hook would get this rank's own gradient, before the mean over ranks; change or read "
                           "parameter.grad after backward()")


def watch():
    """From here on torch.autograd.grad() and vector_to_parameters() know sharded parameters. Called once."""
    convert, to_parameters = torch.nn.utils.convert_parameters, torch.nn.utils.vector_to_parameters

    @functools.wraps(to_parameters)
    def vector_to_parameters(vec, parameters):
        parameters = list(parameters)
        if not any(isinstance(one, ShardedParameter) for one in parameters):
            return to_parameters(vec, parameters)
        with torch.no_grad():  # torch's puts views of the vector in the place of their data
            for parameter, value in zip(parameters, vec.split([one.numel() for one in parameters])):
                _written(parameter, value.view_as(parameter))
        return None

    for name in filter(_writes, [name for name in dir(torch) if name.startswith(_FOREACH)]):
        setattr(torch, name, _on_lists(getattr(torch, name), name))
    torch.nn.utils.vector_to_parameters = convert.vector_to_parameters = vector_to_parameters
    original = torch.autograd.grad

    @functools.wraps(original)
    def grad(outputs, inputs, *args, **kwargs):
        inputs = inputs if isinstance(inputs, (torch.Tensor, torch.autograd.graph.GradientEdge)) else tuple(inputs)
        found = [one for one in (inputs if type(inputs) is tuple else [inputs]) if isinstance(one, ShardedParameter)]
        if found and ranks.world().size > 1:
            raise UnsupportedError(f"torch.autograd.grad() by a sharded parameter of shape {tuple(found[0].shape)}: it would be this rank's own gradient, not the mean "
                                   "over ranks; call loss.backward() and read parameter.grad")
        return original(outputs, inputs, *args, **kwargs)

    torch.autograd.grad = grad


def _on_lists(original, name):
    @functools.wraps(original)
    def write(tensors, *args, **kwargs):
        if _has_parameters(tensors):
            refuse_lists(name)
        return original(tensors, *args, **kwargs)

    return write


def _written(parameter, value):
    if isinstance(parameter, ShardedParameter) and parameter.fsdp_root().is_sharded:
        parameter.fsdp_root().write(parameter, lambda tensor: tensor.copy_(value))
    else:
        parameter.copy_(value)


def show(parameter, root):
    """Makes `parameter` a ShardedParameter, the same object. Raises UnsupportedError: it is a tensor of another
    class."""
    if type(parameter) not in (torch.nn.Parameter, ShardedParameter):
        raise UnsupportedError(f"fully_shard: a parameter of shape {tuple(parameter.shape)} is a {type(parameter).__name__}; only plain torch.nn.Parameter are "
                               "sharded: take those of subclasses, such as quantised or distributed ones, as buffers, or out of the module")
    if parameter._post_accumulate_grad_hooks:  # pylint: disable=protected-access
        raise UnsupportedError(f"fully_shard: a parameter of shape {tuple(parameter.shape)} has a hook of register_post_accumulate_grad_hook(); gradients are reduced "
                               "after the backward pass: step by optimizer.step() after it")
    if parameter.grad is not None and type(parameter) is torch.nn.Parameter:
        raise StateError(f"fully_shard: a parameter of shape {tuple(parameter.shape)} has a gradient already; set it to None first")
    parameter.__class__ = ShardedParameter
    parameter.fsdp_root = root


class Gradient(torch.Tensor):
    """This rank's elements of a parameter's reduced gradient, with the shape of the whole.

    Operators by element and whole reductions work; others are refused by name. Writes in place change what the
    optimizer sees.
    """

    @staticmethod
    def __new__(cls, parameter, own, pass_number=None):
        """`pass_number`: Root.pass_number() of the memory that the step reads; None: a value of the program's own."""
        made = torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=own.dtype, device=own.device)  # pylint: disable=protected-access
        made.parameter, made._own, made._pass_number = parameter, own, pass_number
        return made

    is_live = property(lambda self: self._pass_number is not None, doc="Whether the step reads this memory.")

    @property
    def own(self):
        """This rank's elements. Raises StateError: a later backward pass or step has changed them."""
        if self.is_live and self._pass_number != self.parameter.fsdp_root().pass_number():
            raise StateError("a gradient that was read before the last backward pass or step; read parameter.grad again, and clone() what is to stay")
        return self._own

    __torch_function__ = torch._C._disabled_torch_function_impl  # pylint: disable=protected-access

    def __repr__(self, **_):
        return f"Gradient(shape={list(self.shape)}, {self._own.numel()} elements here)"

    def to_local(self):
        """This rank's elements, [n] of the flattened gradient: the memory that the optimizer reads."""
        return self.own

    def full_tensor(self):
        """A copy, whole and plain. Collective."""
        return self.parameter.fsdp_root().full(self)

    def _refuse_reading(self, *_args, **_kwargs):
        raise UnsupportedError(f"numpy(), tolist() and the like of a gradient of shape {tuple(self.shape)}, of which this rank has {self._own.numel()} elements: take "
                               "gradient.full_tensor().numpy(), on every rank, or to_local()")

    numpy = tolist = __array__ = _refuse_reading

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        packet, kwargs = func.overloadpacket, kwargs or {}
        if func.name().startswith("aten::" + _FOREACH):
            return _one_by_one(func, args, kwargs)
        gradients = [arg for arg in args if isinstance(arg, Gradient)]
        first = gradients[0] if gradients else None
        if packet is _aten._amp_foreach_non_finite_check_and_unscale_:
            return _unscale(*args)
        if first is not None and packet in _ELEMENTWISE and "out" not in kwargs and all(one.parameter is first.parameter for one in gradients):
            if not func._schema.is_mutable or isinstance(args[0], Gradient):  # pylint: disable=protected-access
                if all(map(first.goes_with, args)):
                    return first.by_element(func, args, kwargs)
            elif isinstance(args[0], torch.Tensor):
                return first.into_whole(func, args, kwargs)
        found = first.of_all(packet, args, kwargs) if len(gradients) == 1 and first is args[0] else None
        if found is not None:
            return found
        shapes = [tuple(one.shape) for one in _pytree.tree_leaves((args, kwargs)) if isinstance(one, Gradient)]
        raise UnsupportedError(f"{func} of gradients of which this rank has parts, of shapes {shapes}: operators by element work, and "
                               "norms, sum(), mean(), std(), max(), min(), any() and all() of the whole, without a dim; take gradient.full_tensor() for others")

    def goes_with(self, arg):
        """Whether an operator by element may have `arg` beside this gradient: a number, or a tensor that has one for
        each element."""
        if isinstance(arg, Gradient) or not isinstance(arg, torch.Tensor) or arg.dim() == 0:
            return True
        return arg.dim() <= self.dim() and all(size in (1, own) for size, own in zip(reversed(arg.shape), reversed(self.shape)))

    def of_all(self, packet, args, kwargs):
        """A number of all elements, or random ones in their place; None: `packet` is no such operator. Collective."""
        root = self.parameter.fsdp_root()
        if packet in _NORMS and _is_whole_norm(args):
            return root.norm([self], 2.0 if len(args) < 2 else float(args[1])).as_subclass(Whole)
        is_of_all = (len(args) == 1 or args[1] is None or args[1] == []) and not any(args[2:]) and not kwargs.get("keepdim")
        if packet in _REDUCTIONS and is_of_all:
            compute, join = _REDUCTIONS[packet]
            total = root.reduce(compute(self.own), join)
            return (total / self.numel() if packet is _aten.mean else total).as_subclass(Whole)
        if packet in _SPREADS and is_of_all:
            correction = kwargs.get("correction")
            return _SPREADS[packet](root.variance(self, 1 if correction is None else correction)).to(self.dtype).as_subclass(Whole)
        if packet is _aten._local_scalar_dense and self.numel() == 1:  # pylint: disable=protected-access
            return self.full_tensor().item()
        if packet in _DRAWS and kwargs.get("dtype") in (None, self.dtype):
            return Gradient(self.parameter, core.own_part(self.parameter, root.drawn(_DRAWS[packet], self)))
        if packet in _FILLS:
            drawn = root.drawn(lambda tensor: getattr(tensor, _FILLS[packet])(*args[1:], **kwargs), self)
            self.own.copy_(core.own_part(self.parameter, drawn))
            return self.was_written()
        return None

    def was_written(self):
        """The program has written it. Returns it."""
        if self.is_live:
            self.parameter.fsdp_root().written(self.parameter)
        return self

    def by_element(self, func, args, kwargs):
        """func on this rank's elements."""
        own = [self._part_of(func, arg) for arg in args]
        result = func(*own, **{name: value for name, value in kwargs.items() if name != "memory_format"})
        if not func._schema.is_mutable:  # pylint: disable=protected-access
            return Gradient(self.parameter, result, self._pass_number if func.overloadpacket in _ALIASES else None)
        return args[0].was_written()

    def _part_of(self, func, arg):
        """An operator's argument, of this rank's elements alone."""
        if isinstance(arg, Gradient):
            return arg.own
        if not isinstance(arg, torch.Tensor) or arg.dim() == 0:
            return arg
        root = self.parameter.fsdp_root()
        return root.part_of(str(func), self.parameter, root.exact(arg).expand(self.shape))

    def into_whole(self, func, args, kwargs):
        """func writes a tensor that every rank has whole, such as the parameter itself, by whole gradients.
        Collective."""
        wholes = [arg.full_tensor() if isinstance(arg, Gradient) else arg for arg in args[1:]]
        self.parameter.fsdp_root().write(args[0], lambda tensor: func(tensor, *wholes, **kwargs))
        return args[0]


def _one_by_one(func, args, kwargs):
    """An operator on lists, of each of its tensors alone. Collective where that is."""
    name = func.overloadpacket.__name__.removeprefix(_FOREACH)
    count = next(len(arg) for arg in args if isinstance(arg, (list, tuple)))
    if name == "norm":
        return [torch.linalg.vector_norm(one, *args[1:2]) for one in args[0]]
    operator = getattr(_aten, _ONE_OF.get(name, name))
    results = []
    for index in range(count):
        one = [arg[index] if isinstance(arg, (list, tuple)) else arg for arg in args]
        more = dict(kwargs)
        if name.startswith("addc") and len(one) > 3:
            more["value"] = one.pop()
        results.append(operator(*one, **more))
    return None if func._schema.is_mutable else results  # pylint: disable=protected-access


def _unscale(gradients, is_infinite, inverse_scale):
    """A scaler's: multiplies gradients by a number; `is_infinite` becomes 1 on every rank where one has an element that
    is not finite. Collective."""
    own = [one.own if isinstance(one, Gradient) else one for one in gradients]
    if own := [one for one in own if one.numel()]:
        torch._amp_foreach_non_finite_check_and_unscale_(own, is_infinite, inverse_scale)  # pylint: disable=protected-access
    for one in gradients:
        if isinstance(one, Gradient) and one.is_live:
            one.parameter.fsdp_root().written(one.parameter)
    ranks.world().all_reduce(is_infinite, "max")


def _is_whole_norm(args):
    return len(args) < 3 or args[2] in (None, []) or not args[2]
