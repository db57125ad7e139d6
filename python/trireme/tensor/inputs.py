"""Inputs of a forward() over ranks that share layers: they compute on one batch, which each of them must have got."""
import torch
from torch.utils import _pytree

from .._native import core
from ..errors import StateError


def _key(path):
    """How a program writes the place of an argument: "labels", "batch[0]"; of positional ones "args[0]"."""
    first, *others = path
    text = f"args[{first.idx}]" if isinstance(first, _pytree.SequenceKey) else str(first.key)
    return text + "".join(str(key) for key in others)


def _tensors(args, kwargs):
    """[(name, tensor)] of arguments, in the order of names: programs write keywords in any."""
    found, _ = _pytree.tree_flatten_with_path((args, kwargs))
    return sorted(((_key(path[1:]), leaf) for path, leaf in found if isinstance(leaf, torch.Tensor)), key=lambda pair: pair[0])


class SameInputs:
    """Looks whether the ranks that share layers call forward() with the same tensors: the first time, and whenever
    shapes are others."""

    def __init__(self, engine):
        self._engine = engine
        self._last = None

    def check(self, args, kwargs):
        """Collective over the tensor group when it compares.

        Raises  StateError (an AssertionError), on every rank, which names the argument, or that the call is inside of a
                transform.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:  # pylint: disable=protected-access
            raise StateError("forward() of an engine with tensor_parallel inside of torch.func's jvp(), grad() or vmap(), which hide what a rank has a part of: "
                             "take derivatives by engine.backward(), or transform the module before initialize()")
        leaves = _tensors(args, kwargs)
        layout = tuple((path, tuple(tensor.shape), str(tensor.dtype)) for path, tensor in leaves)
        if layout == self._last:
            return
        self._last = None
        if self._engine.check_same_inputs([core.digest(repr(layout))]) is not None:
            here = ", ".join(f"{path} {list(shape)}" for path, shape, _ in layout) or "no tensors"
            self._raise(f"its ranks call forward() with other tensors (here {here})")
        # Parts of what the engine has computed are no batch: ranks have other ones.
        numbers = [0 if self._engine.is_part(tensor) else core.digest(tensor) for _, tensor in leaves]
        different = self._engine.check_same_inputs(numbers) if leaves else None
        if different is not None:
            self._raise(f"{layout[different][0]} has other values on another rank")
        self._last = layout

    @staticmethod
    def _raise(problem):
        raise StateError(f"Data inconsistency within the TP group: {problem}. Please check the Dataloader implementation to ensure consistency: ranks of "
                         "engine.dp_world_size and trireme.utils.groups.get_data_parallel_rank() get batches of their own, those of one tensor group the same")
