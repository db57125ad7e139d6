"""ProgramValues: the parameters of a tree as a program reads and writes them, outside of modules."""
import contextlib

import torch

from .. import ranks
from .._native import core
from .tensors import ShardedParameter, ValuedParameter, lent
from .values import is_in_backward


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
