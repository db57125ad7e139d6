"""Root: an outermost wrapped module with what trains it, made when it is first needed; optimizer.step() ends its
windows."""
import torch

from .. import ranks
from ..engine import Engine
from ..errors import StateError, UnsupportedError
from . import policies
from .binding import OptimizerBinding
from .calls import Calls
from .exact import ExactValues, ProgramValues
from .tensors import refuse_hook, show
from .totals import Totals
from .tree import Tree, managed_parameters
from .window import Window


class _ProgramEngine(Engine):
    """The engine of a program that says nothing about its batches."""

    _knows_micro_batch = False
    layout_call, remake = "the first step", "make the model and its optimizer anew"


class Root:
    """The parts that train one tree of wrapped modules; what concerns several of them in order: the first use, a step,
    a checkpoint. Until sharded() nothing is sharded."""

    def __init__(self, module):
        self.tree = Tree(module)
        self.window, self.totals = Window(self.tree), Totals(self.tree)
        self.exact = ExactValues(self.tree, self.window)
        self.values = ProgramValues(self.tree, self.exact)
        self.calls = Calls(self.tree, self.values)
        self.binding = OptimizerBinding(self.tree)

    def engine(self):
        """The engine; the first call shards. Collective then. Raises StateError: its ranks have gone."""
        if not self.tree.is_sharded:
            self._shard()
        return self.tree.living_engine()

    def sharded(self):
        """This Root, after engine()."""
        self.engine()
        return self

    def _shard(self):
        tree, world = self.tree, ranks.world()
        choices = {name: module.fsdp_wrap.choice for name, module in tree.module.named_modules() if hasattr(module, "fsdp_wrap")}
        self._show_parameters()
        tree.dtypes = policies.Dtypes(tree.choice.precision, policies.updates_in_bf16(tree.named_managed(), tree.choice.precision))
        self._refuse_written_rows()
        self.binding.choose()
        copies = self.exact.copies()
        tree.set_engine(_ProgramEngine(tree.module, policies.configuration(choices, world.size, tree.dtypes.is_low), origin="fully_shard",
                                       optimizer=self.binding.optimizer, unmanaged=tree.ignored()))
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

    def _refuse_written_rows(self):
        for name, module in self.tree.module.named_modules():
            if ranks.world().size > 1 and getattr(module, "max_norm", None) is not None and isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
                raise UnsupportedError(f"fully_shard: '{name}' has max_norm={module.max_norm}: each rank would renormalise the rows that it looks up alone; leave "
                                       "max_norm out, and renormalise after optimizer.step()")

    def use(self, optimizer):
        """`optimizer` is the one that steps. Collective at first."""
        self.sharded().binding.use(optimizer)

    def begin(self, optimizer):
        """States of `optimizer` are there from here on, zeros before the first step. Collective."""
        self.use(optimizer)
        self.binding.has_begun = True

    def step(self, optimizer):
        """optimizer.step(): the end of the window. Collective."""
        if self.tree.module.fsdp_wrap.outer is not None:
            raise StateError(f"{type(optimizer).__name__}.step(): the optimizer was made before fully_shard() of the whole model; make it after that")
        engine = self.engine()
        self.window.require_complete()
        self.tree.require_same_parameters()
        self.window.reduce()  # also where another rank alone has read a gradient, which waits for this
        self.binding.use(optimizer)
        self.values.publish()
        self.binding.require_same_groups()
        engine.step()
        self.window.end()
        self.values.refresh()

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
