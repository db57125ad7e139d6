"""Root: an outermost wrapped module with what trains it, made when it is first needed; optimizer.step() ends its
windows."""
import contextlib
import weakref

import torch

from .. import agreement, ranks
from .._native import core
from ..engine import Engine
from ..errors import StateError, UnsupportedError
from . import inputs, optimizers, policies
from .tensors import ParameterValue, ShardedParameter, ValuedParameter, Whole, lent, refuse_hook, show
from .totals import Totals
from .tree import Tree, managed_parameters
from .values import is_in_backward
from .window import Window


class _ProgramEngine(Engine):
    """The engine of a program that says nothing about its batches."""

    _knows_micro_batch = False
    layout_call, remake = "the first step", "make the model and its optimizer anew"


def _autocast_around(device):
    """The program's autocast, to be entered again."""
    return torch.autocast(device, dtype=torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device),
                          cache_enabled=torch.is_autocast_cache_enabled())


def _part_by_rank(whole):
    """This rank's elements of the value of a frozen parameter, flat."""
    world = ranks.world()
    return whole.flatten().tensor_split(world.size)[world.rank]


def _joined_by_rank(part, parameter):
    """The whole of which each rank has its _part_by_rank(). Collective."""
    whole = torch.zeros(parameter.numel(), dtype=part.dtype)
    _part_by_rank(whole).copy_(part)
    ranks.world().all_reduce(whole, "sum")
    return whole.view(parameter.shape)


class Root:
    """The root of one tree of wrapped modules. Until engine() nothing is sharded."""

    def __init__(self, module):
        self.tree = Tree(module)
        self.window, self.totals = Window(self.tree), Totals(self.tree)
        self._attached, self._optimizer = None, None  # the last one that the program has made; the one that steps
        self._is_inside = False
        self._autocast = contextlib.nullcontext()  # of the program, around the forward
        self._groups = None  # ids of the parameters in the optimizer's groups at the first step
        self._writes = 0  # of values by the program
        # by parameter: (this rank's elements, which to_local() has given away; their digest when they were the
        # parameter's)
        self._lent = {}
        self._frozen = {}  # this rank's part of the fp32 value of frozen parameters that modules compute with in bf16
        self.has_begun = False  # whether states of parameters that no step has changed are shown

    def engine(self):
        """The engine; the first call shards. Collective then."""
        if not self.tree.is_sharded:
            self._shard()
        return self.tree.living_engine()

    def _shard(self):
        tree, world = self.tree, ranks.world()
        choices = {name: module.fsdp_wrap.choice for name, module in tree.module.named_modules() if hasattr(module, "fsdp_wrap")}
        self._show_parameters()
        tree.dtypes = policies.Dtypes(tree.choice.precision, policies.updates_in_bf16(tree.named_managed(), tree.choice.precision))
        self._check_precision()
        self._refuse_written_rows()
        if tree.dtypes.rounds:
            self._optimizer = self._attached()
            optimizers.require_steppable(self._optimizer)
        values = {p: p.detach().clone(memory_format=torch.contiguous_format) for p in tree.named_managed().values()} if tree.dtypes.rounds else {}
        tree.set_engine(_ProgramEngine(tree.module, policies.configuration(choices, world.size, tree.dtypes.is_low), origin="fully_shard",
                                       optimizer=self._optimizer, unmanaged=tree.ignored()))
        for parameter, value in values.items():  # masters were made of rounded weights
            world.broadcast(value)
            self._keep_value(parameter, value)
        self.window.follow_sync()
        self._show_values(True)

    def _show_parameters(self):
        """Makes parameters ShardedParameters of this Root. Raises StateError, UnsupportedError: one cannot be sharded;
        names it."""
        managed = set(managed_parameters(self.tree.module))
        for name, parameter in self.tree.module.named_parameters():
            if parameter.is_meta:
                raise StateError(f"fully_shard: parameter '{name}' is on the device \"meta\"; call model.to_empty(device=…) and fill it before the first forward")
            if type(parameter) is torch.Tensor:
                raise StateError(f"fully_shard: '{name}' is a plain tensor of shape {tuple(parameter.shape)} where a parameter was, as inside of torch.func.functional_call(), "
                                 "and this first use of the model would shard it; call model.state_dict() once before that")
            if parameter not in managed:
                continue
            show(parameter, lambda: self)
            if parameter._backward_hooks and ranks.world().size > 1:  # pylint: disable=protected-access
                refuse_hook(f"'{name}'")

    def attach(self, optimizer):
        """The program has made an optimizer of this model's parameters."""
        self._attached = weakref.ref(optimizer)

    def _refuse_written_rows(self):
        for name, module in self.tree.module.named_modules():
            if ranks.world().size > 1 and getattr(module, "max_norm", None) is not None and isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
                raise UnsupportedError(f"fully_shard: '{name}' has max_norm={module.max_norm}: each rank would renormalise the rows that it looks up alone; leave "
                                       "max_norm out, and renormalise after optimizer.step()")

    def _check_precision(self):
        if not self.tree.dtypes.rounds:
            return
        optimizer = self._attached and self._attached()
        if optimizer is None:
            raise StateError(f"fully_shard(mp_policy={self.tree.dtypes.policy}): fp32 weights are kept by the optimizer; make it before the first forward, or leave "
                             "param_dtype out")
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        left_out = set(managed_parameters(self.tree.module)) - stepped
        if others := [name for name, parameter in self.tree.module.named_parameters() if parameter.requires_grad and parameter in left_out]:
            raise UnsupportedError(f"fully_shard(mp_policy={self.tree.dtypes.policy}): '{others[0]}' is not the optimizer's, and would lose its fp32 value; give it to the "
                                   "optimizer, or freeze it by requires_grad_(False)")

    def _keep_value(self, parameter, value):
        """The fp32 value of a parameter that is rounded for modules: a trained one's is the optimizer's; of a frozen
        one this rank keeps a part."""
        if not self.tree.was_frozen(parameter):
            core.safe_set_full_fp32_param(parameter, value)
        else:
            self._frozen[parameter] = _part_by_rank(value.detach().float()).clone()

    def _require_all_saved(self, call):
        if self.tree.ignored():
            raise UnsupportedError(f"{call}: parameters that the program keeps (ignored_params, ignored_modules) would not be in it; save model.state_dict() and "
                                   "optimizer.state_dict() instead, of each rank where theirs differ")
        if self._frozen:
            raise UnsupportedError(f"{call}: frozen fp32 parameters beside modules in bf16 would be written rounded; save model.state_dict() and optimizer.state_dict() by "
                                   "torch.distributed.checkpoint")

    # --- forward -----------------------------------------------------------------------------------------------------

    def call(self, module, forward, args, kwargs):
        """forward(*args, **kwargs) of `module`, the root's under the engine's own forward."""
        engine = self.engine()
        if self._is_inside or module is not self.tree.module:
            with self._computing():
                return self._run(module, forward, args, kwargs)
        device = next(self.tree.module.parameters()).device.type
        with self._computing():
            self._is_inside, self._autocast = True, _autocast_around(device)
            try:
                with torch.autocast(device, enabled=False):  # the engine's own forward has that of its configuration
                    return engine(*args, **kwargs)
            finally:
                self._is_inside, self._autocast = False, contextlib.nullcontext()

    def call_method(self, module, method, args, kwargs):
        """method(*args, **kwargs) of `module`, as call() does it of a forward."""
        engine = self.engine()
        with self._computing(), contextlib.nullcontext() if self._is_inside else engine.core.forward_scope():
            return self._run(module, method, args, kwargs)

    def _run(self, module, function, args, kwargs):
        """`function` of a module, with casts."""
        args, kwargs = inputs.cast((args, kwargs), self.tree.dtypes.policy.param_dtype if self._casts_inputs(module) else None)
        with self._autocast if module is self.tree.module else contextlib.nullcontext():
            return inputs.cast(function(*args, **kwargs), self.tree.dtypes.policy.output_dtype)

    @contextlib.contextmanager
    def _computing(self):
        """While it lasts, modules compute, and find in parameters what they compute with."""
        if not self._shows_values():
            yield
            return
        if not is_in_backward():
            self._publish_lent()
        self._show_values(False)
        try:
            yield
        finally:
            self._show_values(True)

    def _shows_values(self):
        """Whether what a program reads now is not what modules compute with."""
        return any(type(parameter) is ValuedParameter for parameter in self.tree.managed[:1])

    def _show_values(self, is_outside):
        """Makes parameters show a program, or modules, their values."""
        kind = ValuedParameter if is_outside and (self.tree.dtypes.rounds or self._lent) else ShardedParameter
        for parameter in self.tree.managed:
            parameter.__class__ = kind

    def _casts_inputs(self, module):
        of_root = self.tree.choice.casts_root_inputs if module is self.tree.module else None
        return self.tree.dtypes.policy.cast_forward_inputs if of_root is None else of_root

    # --- elements of a rank ------------------------------------------------------------------------------------------

    def lend(self, parameter):
        """This rank's elements of a parameter, the same tensor each time: what is written into it becomes the
        parameter's when the model is used next. Collective at first."""
        if parameter not in self._lent:
            part = lent(self._own_elements(parameter), parameter)
            self._lent[parameter] = part, core.digest(part)
            if not self._shows_values():
                self._show_values(True)
        return self._lent[parameter][0]

    def _own_elements(self, parameter):
        if self.tree.was_frozen(parameter):
            return _part_by_rank(self.full_parameter(parameter)).clone()
        return core.own_weight(parameter)

    def _refresh_lent(self, parameter):
        """The elements lent are those of today. Collective."""
        part, _ = self._lent[parameter]
        with torch.no_grad():
            part.copy_(self._own_elements(parameter))
        self._lent[parameter] = part, core.digest(part)

    def _refresh_all_lent(self):
        for parameter in self._lent:
            self._refresh_lent(parameter)

    def _publish_lent(self):
        """Elements lent that the program has written become the parameters'. Collective where there are some."""
        if not self._lent:
            return
        is_written = torch.tensor([int(core.digest(part) != digest) for part, digest in self._lent.values()])
        ranks.world().all_reduce(is_written, "max")
        kept, self._lent = self._lent, {}  # what follows is no program's
        try:
            for (parameter, (part, _)), written in zip(kept.items(), is_written.tolist()):
                if written:
                    self.write_value(parameter, self._of_parts(parameter, part))
        finally:
            self._lent = {parameter: (part, core.digest(part)) for parameter, (part, _) in kept.items()}

    def _of_parts(self, parameter, part):
        """The whole of what each rank has of a parameter. Collective."""
        if self.tree.was_frozen(parameter):
            return _joined_by_rank(part, parameter)
        return core.whole_of_parts(parameter, part)

    def values(self, state):
        """`state`, a module's state_dict(), as it is to be shown: fp32 values where modules compute in another dtype.
        Collective then."""
        for name, value in state.items():
            if isinstance(value, ParameterValue):
                state[name] = value.source.parameter.fsdp_kept()
            elif type(value) is torch.Tensor and core.is_managed(value):
                state[name] = value.as_subclass(Whole)
        return state

    def shown_dtype(self, tensor):
        """The dtype that a program finds a parameter or buffer in."""
        if self.tree.dtypes.rounds and core.is_managed(tensor):
            return torch.float32
        with torch._C.DisableTorchFunctionSubclass():  # pylint: disable=protected-access
            return tensor.dtype

    def version(self):
        """Changes with the values of parameters."""
        return self.window.number, self._writes

    def require_same(self, call, tensors):
        """Raises StateError: ranks have other ones, {name: tensor}. Before the first use rank 0's become everybody's.
        Collective after it."""
        if self.tree.is_sharded:
            agreement.check_tensors(ranks.world(), call, tensors)

    def write_value(self, parameter, value):
        """`value`, whole, becomes the parameter's. Collective. Raises StateError: it has other values on another
        rank."""
        # values that differ may round alike
        agreement.check_tensor(ranks.world(), f"a write to '{self.tree.name(parameter)}'", value)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # pylint: disable=protected-access
            parameter.copy_(value)
            if self.tree.dtypes.rounds:
                self._keep_value(parameter, value)
        self._writes += 1
        if parameter in self._lent:
            self._refresh_lent(parameter)

    def require_exact(self, call, fix):
        """Raises UnsupportedError: modules compute with rounded weights, so that parameters are not their fp32
        values."""
        if self.tree.dtypes.rounds:
            raise UnsupportedError(f"{call} where modules compute in bf16: parameters are rounded; {fix}")

    def full_parameter(self, parameter):
        """A parameter, whole; its fp32 value where modules compute in another dtype. Collective."""
        self._publish_lent()
        if parameter in self._frozen:
            return _joined_by_rank(self._frozen[parameter], parameter)
        has_master = self.engine().optimizer is not None and not self.tree.was_frozen(parameter) and not self.tree.dtypes.is_low
        master = core.safe_get_full_fp32_param(parameter) if has_master else None
        return core.whole_tensor(parameter) if master is None else master.to(torch.float32)

    # --- the step ----------------------------------------------------------------------------------------------------

    def save(self, optimizer, folder, tag):
        """Weights, optimizer states, counters and generators. Collective."""
        self.use(optimizer)
        self._publish_lent()
        self._require_all_saved("save_checkpoint()")
        self.tree.engine.save_checkpoint(folder, tag)

    def load(self, optimizer, folder, tag):
        """The state that save() has written, at any number of ranks; False: there is none. Collective."""
        self.use(optimizer)
        self._require_all_saved("load_checkpoint()")
        self.window.forget()
        is_there = self.tree.engine.load_checkpoint(folder, tag)[0] is not None
        self._refresh_all_lent()
        return is_there

    def has_states(self, optimizer):
        """Whether `optimizer` has stepped here, so that its states are the library's."""
        return self._optimizer is optimizer

    def step(self, optimizer):
        """optimizer.step(): the end of the window. Collective."""
        if self.tree.module.fsdp_wrap.outer is not None:
            raise StateError(f"{type(optimizer).__name__}.step(): the optimizer was made before fully_shard() of the whole model; make it after that")
        engine = self.engine()
        self.window.require_complete()
        self.tree.require_same_parameters()
        self.window.reduce()  # also where another rank alone has read a gradient, which waits for this
        self.use(optimizer)
        self._publish_lent()
        self._require_same_groups(optimizer)
        engine.step()
        self.window.end()
        self._refresh_all_lent()

    def _require_same_groups(self, optimizer):
        groups = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        if self._groups is None:
            self._groups = groups
        for number, group in enumerate(groups):
            if number >= len(self._groups) or group != self._groups[number]:
                raise UnsupportedError(f"optimizer.step(): param_groups[{number}]['params'] are others than at the first step; set the group's lr to 0 or freeze "
                                       "parameters by requires_grad_(False), or form the groups before the first step")
        if len(groups) < len(self._groups):
            raise UnsupportedError(f"optimizer.step(): {len(self._groups)} param_groups at the first step are {len(groups)} now; keep them, and set the lr of those "
                                   "that are not to be stepped to 0")

    def begin(self, optimizer):
        """States of `optimizer` are there from here on, zeros before the first step. Collective."""
        self.use(optimizer)
        self.has_begun = True

    def use(self, optimizer):
        """`optimizer` is the one that steps. Collective at first."""
        self.engine()
        if self._optimizer is None:
            optimizers.require_steppable(optimizer)
            self.tree.engine.set_optimizer(optimizer)
            self._optimizer = optimizer
        if self._optimizer is not optimizer:
            raise UnsupportedError("optimizer.step(): this model is stepped by another optimizer already; put all parameters into the groups of one")
