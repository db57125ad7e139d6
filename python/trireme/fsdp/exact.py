"""The values of a tree's parameters: ExactValues in the dtype in which they are updated, ProgramValues as a program has
them outside of modules."""
import contextlib

import torch

from .. import agreement, ranks
from .._native import core
from ..errors import UnsupportedError
from .tensors import ShardedParameter, ValuedParameter, lent
from .values import is_in_backward


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


class ExactValues:
    """Where modules compute with rounded weights, fp32 values of those that are trained are the optimizer's, and of a
    frozen one each rank has a part here."""

    def __init__(self, tree, window):
        self._tree, self._window = tree, window
        self._frozen = {}  # this rank's part of the fp32 value of frozen parameters that modules compute with in bf16
        self._writes = 0  # of values by the program

    def copies(self):
        """{parameter: a copy}, before the tree is sharded, of those that modules will round."""
        rounded = self._tree.named_managed().values() if self._tree.dtypes.rounds else ()
        return {parameter: parameter.detach().clone(memory_format=torch.contiguous_format) for parameter in rounded}

    def keep_all(self, copies):
        """Rank 0's of what copies() gave are the values. Collective."""
        for parameter, value in copies.items():  # masters were made of rounded weights
            ranks.world().broadcast(value)
            self._keep(parameter, value)

    def _keep(self, parameter, value):
        if not self._tree.was_frozen(parameter):
            core.safe_set_full_fp32_param(parameter, value)
        else:
            self._frozen[parameter] = _part_by_rank(value.detach().float()).clone()

    def read(self, parameter):
        """A parameter, whole; its fp32 value where modules compute in another dtype. Collective."""
        if parameter in self._frozen:
            return _joined_by_rank(self._frozen[parameter], parameter)
        has_master = self._tree.living_engine().optimizer is not None and not self._tree.was_frozen(parameter) and not self._tree.dtypes.is_low
        master = core.safe_get_full_fp32_param(parameter) if has_master else None
        return core.whole_tensor(parameter) if master is None else master.to(torch.float32)

    def write(self, parameter, value):
        """`value`, whole, becomes the parameter's. Collective. Raises StateError: it has other values on another
        rank."""
        # values that differ may round alike
        agreement.check_tensor(ranks.world(), f"a write to '{self._tree.name(parameter)}'", value)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # pylint: disable=protected-access
            parameter.copy_(value)
            if self._tree.dtypes.rounds:
                self._keep(parameter, value)
        self._writes += 1

    def own_elements(self, parameter):
        """A copy of the elements of a parameter that are this rank's. Collective."""
        if self._tree.was_frozen(parameter):
            return _part_by_rank(self.read(parameter)).clone()
        return core.own_weight(parameter)

    def write_elements(self, parameter, part):
        """Elements of each rank, as own_elements() gives them, become the parameter's. Collective."""
        is_frozen = self._tree.was_frozen(parameter)
        self.write(parameter, _joined_by_rank(part, parameter) if is_frozen else core.whole_of_parts(parameter, part))

    def version(self):
        """Changes with the values of parameters."""
        return self._window.number, self._writes

    def shown_dtype(self, tensor):
        """The dtype that a program finds a parameter or buffer in."""
        if self._tree.dtypes.rounds and core.is_managed(tensor):
            return torch.float32
        with torch._C.DisableTorchFunctionSubclass():  # pylint: disable=protected-access
            return tensor.dtype

    def require_in_parameters(self, call, fix):
        """Raises UnsupportedError: modules compute with rounded weights, so that parameters are not their fp32
        values."""
        if self._tree.dtypes.rounds:
            raise UnsupportedError(f"{call} where modules compute in bf16: parameters are rounded; {fix}")

    def require_all_saved(self, call):
        """Raises UnsupportedError: a checkpoint of the engine's would lack values."""
        if self._tree.ignored():
            raise UnsupportedError(f"{call}: parameters that the program keeps (ignored_params, ignored_modules) would not be in it; save model.state_dict() and "
                                   "optimizer.state_dict() instead, of each rank where theirs differ")
        if self._frozen:
            raise UnsupportedError(f"{call}: frozen fp32 parameters beside modules in bf16 would be written rounded; save model.state_dict() and optimizer.state_dict() by "
                                   "torch.distributed.checkpoint")


class ProgramValues:
    """Exact values, with what the program has written into elements that to_local() gave away."""

    def __init__(self, tree, exact):
        self._tree, self._exact = tree, exact
        # by parameter: (this rank's elements; their digest when they were the parameter's)
        self._lent = {}

    def read(self, parameter):
        """A parameter, whole; its fp32 value where modules compute in another dtype. Collective."""
        self.publish()
        return self._exact.read(parameter)

    def write(self, parameter, value):
        """`value`, whole, becomes the parameter's. Collective. Raises StateError: it has other values on another
        rank."""
        self._exact.write(parameter, value)
        if parameter in self._lent:
            self._refresh(parameter)

    def lend(self, parameter):
        """This rank's elements of a parameter, the same tensor each time: what is written into it becomes the
        parameter's when the model is used next. Collective at first."""
        if parameter not in self._lent:
            part = lent(self._exact.own_elements(parameter), parameter)
            self._lent[parameter] = part, core.digest(part)
            if not self._is_shown():
                self.show()
        return self._lent[parameter][0]

    def publish(self):
        """Elements lent that the program has written become the parameters'. Collective where there are some."""
        if not self._lent:
            return
        is_written = torch.tensor([int(core.digest(part) != digest) for part, digest in self._lent.values()])
        ranks.world().all_reduce(is_written, "max")
        try:
            for (parameter, (part, _)), written in zip(self._lent.items(), is_written.tolist()):
                if written:
                    self._exact.write_elements(parameter, part)
        finally:
            self._lent = {parameter: (part, core.digest(part)) for parameter, (part, _) in self._lent.items()}

    def refresh(self):
        """The elements lent are those of today. Collective where there are some."""
        for parameter in self._lent:
            self._refresh(parameter)

    def _refresh(self, parameter):
        part, _ = self._lent[parameter]
        with torch.no_grad():
            part.copy_(self._exact.own_elements(parameter))
        self._lent[parameter] = part, core.digest(part)

    @contextlib.contextmanager
    def computing(self):
        """While it lasts, modules compute, and find in parameters what they compute with."""
        if not self._is_shown():
            yield
            return
        if not is_in_backward():
            self.publish()
        self._set_kind(ShardedParameter)
        try:
            yield
        finally:
            self.show()

    def _is_shown(self):
        """Whether what a program reads now is not what modules compute with."""
        return any(type(parameter) is ValuedParameter for parameter in self._tree.managed[:1])

    def show(self):
        """Makes parameters show a program their values."""
        self._set_kind(ValuedParameter if self._tree.dtypes.rounds or self._lent else ShardedParameter)

    def _set_kind(self, kind):
        for parameter in self._tree.managed:
            parameter.__class__ = kind
