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
from .gradients import Gradient, PartGradient
from .tensors import ParameterValue, ShardedParameter, ValuedParameter, Whole, lent, refuse_hook, show
from .tree import Tree, managed_parameters
from .values import is_in_backward


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
        self._attached, self._optimizer = None, None  # the last one that the program has made; the one that steps
        self._wants_sync, self._wants_all_reduce = True, True
        self._defers, self._is_inside = False, False
        self._autocast = contextlib.nullcontext()  # of the program, around the forward
        self._windows = 0
        # gradients of backward passes that are reduced; Gradient by parameter
        self._reduced, self._gradients = None, {}
        self._standing = set()  # parameters whose gradient of the last step the program has not dropped
        self._dropped = set()  # and those of this window that it has
        # _groups: ids of the parameters in the optimizer's groups at the first step
        self._copies, self._groups = None, None
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
        self._follow_sync()
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

    def set_sync(self, is_on):
        """Whether backward passes reduce gradients."""
        self._set(is_on, self._wants_all_reduce)

    def set_all_reduce(self, is_on):
        """Whether they do it over replicas. Here they reduce over all ranks or over none, which gives the same sum in
        the end."""
        self._set(self._wants_sync, is_on)

    def _set(self, wants_sync, wants_all_reduce):
        self._wants_sync, self._wants_all_reduce = wants_sync, wants_all_reduce
        if self.tree.engine is not None:
            self._follow_sync()

    def _follow_sync(self):
        defers = not (self._wants_sync and self._wants_all_reduce)
        if self._defers == defers:
            return
        self._defers = defers
        # Autograd adds up in the dtype of the weights; gradients that are reduced at once are added up in fp32
        if not self.tree.dtypes.rounds:
            self.tree.engine.core.defer_reductions(self._defers)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def gradient_of(self, parameter):
        """parameter.grad. Collective where this rank's backward passes gave none."""
        if self.tree.engine is None or not parameter.requires_grad or (self._dropped and parameter in self._dropped):
            return None
        if self._standing and parameter in self._standing:
            raise StateError(f"parameter.grad of '{self.tree.name(parameter)}': optimizer.step() has taken this gradient; read it before the step, or call "
                             "optimizer.zero_grad() after it")
        count = self.tree.engine.core.gradient_count
        if self._defers:
            if self._reduced not in (None, count):
                raise StateError(f"parameter.grad of '{self.tree.name(parameter)}': set_requires_gradient_sync(False) is on and later backward passes have "
                                 "added to it; read it after a backward pass with True")
            return self._gradients.get(parameter) if self._reduced else None
        if count == 0:
            return None
        if count != self._reduced and not core.has_gradient(parameter):
            self._reduce()  # another rank may have one
        if not core.has_gradient(parameter):
            return None
        if parameter not in self._gradients or self._gradients[parameter].is_past:
            kind = PartGradient if self.tree.module.fsdp_has_parts else Gradient
            self._gradients[parameter] = kind(parameter, None, self.pass_number(), self.tree.dtypes.gradient)
        return self._gradients[parameter]

    def _reduce(self):
        count = self.tree.engine.core.gradient_count
        if count != self._reduced:
            self.tree.engine.core.reduce_gradients()
            self._reduced = count

    def reduced_part(self, parameter):
        """This rank's elements of a gradient, the memory that the step reads. Collective when first called after a
        backward pass."""
        self._reduce()
        # one dtype on all ranks, also on those that have no elements of it
        own = core.gradient_part(parameter)
        return own if own.numel() else own.to(self.tree.dtypes.gradient)

    def pass_number(self):
        """Changes with every step, zero_grad() and gradient of a backward pass."""
        return self._windows, self.tree.engine.core.gradient_count

    def set_gradient(self, parameter, value):
        """parameter.grad = value."""
        if value is None:
            self._drop(parameter)
            return
        now = self.gradient_of(parameter)
        if now is None:
            raise UnsupportedError(f"parameter.grad = …: '{self.tree.name(parameter)}' has no gradient before a backward pass; to have an optimizer's states without a "
                                   "step, leave this out: optimizer.load_state_dict() takes them as they are")
        if not isinstance(value, Gradient) or value.parameter is not parameter:
            raise UnsupportedError(f"parameter.grad = …: '{self.tree.name(parameter)}' takes a gradient that was computed of its own parameter.grad, or None; "
                                   "write into parameter.grad in place")
        if value is not now:
            now.copy_(value)

    def _drop(self, parameter):
        self._standing.discard(parameter)
        if self.tree.engine is None or self.tree.engine.core.gradient_count == 0:
            return
        self._dropped.add(parameter)
        if all(p in self._dropped for p in self.tree.trained() if self.gradient_of(p) is not None):
            self.zero_grad()

    def zero_grad(self):
        """Drops all gradients. Collective where there are some."""
        if self.tree.engine is not None and self.tree.engine.core.gradient_count:
            self.tree.engine.zero_grad()
        self._forget()

    def _forget(self):
        self._reduced, self._gradients, self._windows = None, {}, self._windows + 1
        self._standing.clear()
        self._dropped.clear()

    def written(self, parameter):
        """The program has written the gradient of `parameter` in place."""
        core.gradient_written(parameter)

    def full(self, gradient):
        """A Gradient, whole. Collective."""
        return core.whole_of_parts(gradient.parameter, gradient.own).to(gradient.dtype)

    def part_of(self, call, parameter, whole):
        """This rank's elements, a copy, of a tensor of the shape of `parameter`, the same on every rank. Collective
        where no parameter has it.

        Raises  StateError: it differs by rank.
        """
        if not isinstance(whole, Whole) and not core.is_managed(whole):
            agreement.check_tensor(ranks.world(), f"{call} beside the gradient of '{self.tree.name(parameter)}'", whole)
        return core.own_part(parameter, whole)

    def drawn(self, fill, like):
        """fill(tensor), of random numbers, of the shape and dtype of `like`, whole, as rank 0 draws them.
        Collective."""
        drawn = fill(torch.empty(like.shape, dtype=like.dtype, device=like.device))
        ranks.world().broadcast(drawn)
        return drawn

    def reduce(self, own, join):
        """The sum, max or min of a number of every rank, where each element of a gradient counts once. Collective."""
        return self._total(own, join).to(own.dtype)

    def _total(self, own, join):
        total = own.detach().reshape(1).to(torch.float64, copy=True)
        ranks.world().all_reduce(total, join)
        return total[0] / self._copies_of_elements() if join == "sum" else total[0]

    def norm(self, gradients, norm_type):
        """The norm over all elements of `gradients`. Collective."""
        parts = [gradient.own for gradient in gradients if gradient.own.numel()]
        if norm_type == float("inf"):
            return self._total(torch.stack([part.abs().max() for part in parts]).max() if parts else torch.zeros(()), "max").float()
        if norm_type <= 0:
            raise UnsupportedError(f"the norm of order {norm_type} of sharded gradients is not there; take one above 0 or \"inf\"")
        norms = torch.stack(torch._foreach_norm(parts, norm_type, dtype=torch.float32)) if parts else torch.zeros(1)  # pylint: disable=protected-access
        return self._total(norms.double().pow(norm_type).sum(), "sum").pow(1 / norm_type).float()

    def variance(self, gradient, correction):
        """The variance of all elements. Collective."""
        own, numel = gradient.own.double(), gradient.numel()
        mean = self._total(own.sum(), "sum") / numel
        return self._total((own - mean).square().sum(), "sum") / max(numel - correction, 0)

    def scale(self, gradients, factor):
        """Multiplies all of `gradients` by a number, in place."""
        if parts := [gradient.own for gradient in gradients if gradient.own.numel()]:
            torch._foreach_mul_(parts, factor)  # pylint: disable=protected-access
        for gradient in gradients:
            if gradient.is_live:
                self.written(gradient.parameter)

    def _copies_of_elements(self):
        """How many ranks hold each element of the gradients: more than one where shards have replicas."""
        if self._copies is None:
            trained = self.tree.trained()
            held = torch.tensor([float(sum(core.owned_numel(p) for p in trained))], dtype=torch.float64)
            ranks.world().all_reduce(held, "sum")
            self._copies = round(held.item() / sum(p.numel() for p in trained))
        return self._copies

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
        return self._windows, self._writes

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
        self._forget()
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
        if self._defers:
            raise StateError("optimizer.step(): set_requires_gradient_sync(False) is on, so that gradients are not reduced; set it to True before the last backward pass")
        if self._standing:
            raise StateError("optimizer.step(): gradients of the step before were not dropped; call optimizer.zero_grad() after each step: those "
                             "gradients have gone, so they cannot be added to")
        if self._dropped:
            raise UnsupportedError("optimizer.step(): parameter.grad = None was set for some parameters but not for all; drop all of them by zero_grad(), "
                                   "or keep those out of training by requires_grad_(False)")
        self.tree.require_same_parameters()
        self._reduce()  # also where another rank alone has read a gradient, which waits for this
        self.use(optimizer)
        self._publish_lent()
        self._require_same_groups(optimizer)
        engine.step()
        self._forget()
        self._standing.update(self.tree.trained())
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
