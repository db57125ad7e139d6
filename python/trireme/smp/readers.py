"""Calls that read a tensor by no operator, inside of a step function: those of other stages have no numbers here, so
the stage that has them tells all."""
import torch

from .. import ranks as world_ranks
from ..patches import Patches, Wrapped
from . import program, ranks, static_calls


def _numbers(tensor):
    """A copy of a tensor of some stage, on the host, with its numbers on every stage; None: there is no step function,
    or every stage has it. Every stage comes here in the same place of the program."""
    if program.running() is None or (model := program.partitioned_or_none()) is None:
        return None
    core = model.engine("").core
    if core.home_of(tensor) is not None:
        return core.numbers_of(tensor)
    static_calls.must_run()
    return None


def _read(original):
    def read(self, *args, **kwargs):
        numbers = _numbers(self)
        return original(self if numbers is None else numbers.requires_grad_(self.requires_grad and numbers.is_floating_point()), *args, **kwargs)

    return read


def _shown(original):
    def text(self, *args, **kwargs):
        numbers = _numbers(self)
        return original(self if numbers is None else numbers, *args, **kwargs)

    return text


def _copied(original):
    """A copy of a leaf, which no stage has alone."""
    def copied(self, memo):
        if not self.is_leaf or (numbers := _numbers(self)) is None:
            return original(self, memo)
        if id(self) not in memo:
            copy = numbers.to(self.device)
            memo[id(self)] = type(self)(copy, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copy.requires_grad_(self.requires_grad)
        return memo[id(self)]

    return copied


def _by_operator(original):
    """torch asks the strides before it calls the operator, and other stages have those of a whole."""
    def contiguous(self, *args, **kwargs):
        shares_layers = program.running() is not None and ranks.tp_size() > 1
        return torch.ops.aten.contiguous.default(self, *args, **kwargs) if shares_layers else original(self, *args, **kwargs)

    return contiguous


_NUMBERS = "inside of a step function numbers of a tensor of another stage come from there"

PATCHES = Patches(__name__, "the tensors of an `smp.DistributedModel` get more than one stage", [
    *[Wrapped("torch", f"Tensor.{name}", _NUMBERS, _read) for name in ("tolist", "numpy", "__array__", "__reduce_ex__", "__dlpack__")],
    Wrapped("torch", "Tensor.contiguous", "every stage runs the operator, whatever strides it sees of a tensor of which ranks have parts", _by_operator),
    Wrapped("torch", "Tensor.__repr__", _NUMBERS, _shown),
    Wrapped("torch", "Tensor.__deepcopy__", _NUMBERS, _copied),
    Wrapped("torch.nn", "Parameter.__deepcopy__", _NUMBERS, _copied),
], world_ranks.living)
