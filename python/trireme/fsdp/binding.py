"""OptimizerBinding: which of a program's optimizers steps a tree."""
import weakref

from ..errors import StateError, UnsupportedError
from . import kept


class OptimizerBinding:
    """One optimizer steps a tree, by the groups of its first step."""

    def __init__(self, tree):
        self._tree = tree
        self._attached, self.optimizer = None, None  # the last one that the program has made; the one that steps
        self._groups = None  # ids of the parameters in the optimizer's groups at the first step
        self.has_begun = False  # whether states of parameters that no step has changed are shown

    def attach(self, optimizer):
        """The program has made an optimizer of this model's parameters."""
        self._attached = weakref.ref(optimizer)

    def choose(self):
        """Before the tree is sharded: where modules round, the program's optimizer keeps fp32 values, and steps.

        Raises  StateError: there is none. UnsupportedError: it lacks parameters, or cannot step.
        """
        if not self._tree.dtypes.rounds:
            return
        policy, optimizer = self._tree.dtypes.policy, self._attached and self._attached()
        if optimizer is None:
            raise StateError(f"fully_shard(mp_policy={policy}): fp32 weights are kept by the optimizer; make it before the first forward, or leave "
                             "param_dtype out")
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        if others := [name for name, parameter in self._tree.named_managed().items() if parameter.requires_grad and parameter not in stepped]:
            raise UnsupportedError(f"fully_shard(mp_policy={policy}): '{others[0]}' is not the optimizer's, and would lose its fp32 value; give it to the "
                                   "optimizer, or freeze it by requires_grad_(False)")
        kept.require_steppable(optimizer)
        self.optimizer = optimizer

    def use(self, optimizer):
        """`optimizer` is the one that steps. Collective at first."""
        if self.optimizer is None:
            kept.require_steppable(optimizer)
            self._tree.engine.set_optimizer(optimizer)
            self.optimizer = optimizer
        if self.optimizer is not optimizer:
            raise UnsupportedError("optimizer.step(): this model is stepped by another optimizer already; put all parameters into the groups of one")

    def require_same_groups(self):
        """Raises UnsupportedError: groups of the optimizer have other parameters than at the first step."""
        groups = [[id(parameter) for parameter in group["params"]] for group in self.optimizer.param_groups]
        if self._groups is None:
            self._groups = groups
        for number, group in enumerate(groups):
            if number >= len(self._groups) or group != self._groups[number]:
                raise UnsupportedError(f"optimizer.step(): param_groups[{number}]['params'] are others than at the first step; set the group's lr to 0 or freeze "
                                       "parameters by requires_grad_(False), or form the groups before the first step")
        if len(groups) < len(self._groups):
            raise UnsupportedError(f"optimizer.step(): {len(self._groups)} param_groups at the first step are {len(groups)} now; keep them, and set the lr of those "
                                   "that are not to be stepped to 0")
