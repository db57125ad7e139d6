"""Root: an outermost wrapped module with what trains it, made when it is first needed; optimizer.step() ends its
windows."""
import contextlib
import weakref

import torch

from .. import ranks
from ..engine import Engine
from ..errors import StateError, UnsupportedError
from . import inputs, optimizers, policies
from .exact import ExactValues
from .program_values import ProgramValues
from .tensors import refuse_hook, show
from .totals import Totals
from .tree import Tree, managed_parameters
from .window import Window


class _ProgramEngine(Engine):
    """The engine of a program that says nothing about its batches."""

    _knows_micro_batch = False
    layout_call, remake = "the first step", "make the model and its optimizer anew"


def _autocast_around(device):
    """The program's autocast, to be entered again."""
    return torch.autocast(device, dtype=torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device),
                          cache_enabled=torch.is_autocast_cache_enabled())


class Root:
    """The root of one tree of wrapped modules. Until engine() nothing is sharded."""

    def __init__(self, module):
        self.tree = Tree(module)
        self.window, self.totals = Window(self.tree), Totals(self.tree)
        self.exact = ExactValues(self.tree, self.window)
        self.values = ProgramValues(self.tree, self.exact)
        self._attached, self._optimizer = None, None  # the last one that the program has made; the one that steps
        self._is_inside = False
        self._autocast = contextlib.nullcontext()  # of the program, around the forward
        self._groups = None  # ids of the parameters in the optimizer's groups at the first step
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
        copies = self.exact.copies()
        tree.set_engine(_ProgramEngine(tree.module, policies.configuration(choices, world.size, tree.dtypes.is_low), origin="fully_shard",
                                       optimizer=self._optimizer, unmanaged=tree.ignored()))
        self.exact.keep_all(copies)
        self.window.follow_sync()
        self.values.show()

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

    # --- forward -----------------------------------------------------------------------------------------------------

    def call(self, module, forward, args, kwargs):
        """forward(*args, **kwargs) of `module`, the root's under the engine's own forward."""
        engine = self.engine()
        if self._is_inside or module is not self.tree.module:
            with self.values.computing():
                return self._run(module, forward, args, kwargs)
        device = next(self.tree.module.parameters()).device.type
        with self.values.computing():
            self._is_inside, self._autocast = True, _autocast_around(device)
            try:
                with torch.autocast(device, enabled=False):  # the engine's own forward has that of its configuration
                    return engine(*args, **kwargs)
            finally:
                self._is_inside, self._autocast = False, contextlib.nullcontext()

    def call_method(self, module, method, args, kwargs):
        """method(*args, **kwargs) of `module`, as call() does it of a forward."""
        engine = self.engine()
        with self.values.computing(), contextlib.nullcontext() if self._is_inside else engine.core.forward_scope():
            return self._run(module, method, args, kwargs)

    def _run(self, module, function, args, kwargs):
        """`function` of a module, with casts."""
        args, kwargs = inputs.cast((args, kwargs), self.tree.dtypes.policy.param_dtype if self._casts_inputs(module) else None)
        with self._autocast if module is self.tree.module else contextlib.nullcontext():
            return inputs.cast(function(*args, **kwargs), self.tree.dtypes.policy.output_dtype)

    def _casts_inputs(self, module):
        of_root = self.tree.choice.casts_root_inputs if module is self.tree.module else None
        return self.tree.dtypes.policy.cast_forward_inputs if of_root is None else of_root

    # --- the step ----------------------------------------------------------------------------------------------------

    def save(self, optimizer, folder, tag):
        """Weights, optimizer states, counters and generators. Collective."""
        self.use(optimizer)
        self.values.publish()
        self.exact.require_all_saved("save_checkpoint()")
        self.tree.engine.save_checkpoint(folder, tag)

    def load(self, optimizer, folder, tag):
        """The state that save() has written, at any number of ranks; False: there is none. Collective."""
        self.use(optimizer)
        self.exact.require_all_saved("load_checkpoint()")
        self.window.forget()
        is_there = self.tree.engine.load_checkpoint(folder, tag)[0] is not None
        self.values.refresh()
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
        self.values.publish()
        self._require_same_groups(optimizer)
        engine.step()
        self.window.end()
        self.values.refresh()

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
