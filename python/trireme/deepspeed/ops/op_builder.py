"""DeepSpeed's builders of compiled operators, for programs that ask is_compatible().

This package compiles nothing when it runs. A builder is compatible where an optimizer of trireme.ops does the
operator's work.
"""
import functools
import re
import sys

from ...errors import UnsupportedError
from ..missing import is_stub, names_of

__path__ = []  # every module in ops.op_builder is this one
builder = all_ops = sys.modules[__name__]
_find = names_of(__name__)

# The optimizer that does an operator's work here, by the operator's builder.
_HERE = {"CPUAdagradBuilder": "ops.adagrad.DeepSpeedCPUAdagrad", "CPUAdamBuilder": "ops.adam.DeepSpeedCPUAdam",
         "CPULionBuilder": "ops.lion.DeepSpeedCPULion", "FusedAdamBuilder": "ops.adam.FusedAdam", "FusedLambBuilder": "ops.lamb.FusedLamb",
         "FusedLionBuilder": "ops.lion.FusedLion"}


class OpBuilder:
    """One operator, by its `name`."""

    def __init__(self, name=None):
        words = type(self).__name__.removesuffix("Builder")
        self.name = name or re.sub("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", words).lower()

    def is_compatible(self, verbose=False):
        """Whether something here does the operator's work."""
        # pylint: disable=unused-argument
        return type(self).__name__ in _HERE

    def load(self, verbose=False):
        """Raises UnsupportedError: there is no compiled operator to give out; the text names what to use."""
        # pylint: disable=unused-argument
        kind = type(self).__name__
        fix = f"use deepspeed.{_HERE[kind]}" if kind in _HERE else "docs/python.md lists what is there"
        raise UnsupportedError(f"deepspeed.ops.op_builder.{kind}.load(): Trireme compiles no operators; {fix}")

    jit_load = load

    def builder(self):
        """As load(): nothing is compiled."""
        self.load()

    def absolute_name(self):
        """Where DeepSpeed has the operator."""
        return f"deepspeed.ops.{self.name}_op"


@functools.cache
def _made(name):
    return type(name, (OpBuilder,), {"__module__": __name__, "__doc__": f"{name}: see OpBuilder."})


def __getattr__(name):
    found = _find(name)
    return _made(name) if is_stub(found) and name.endswith("Builder") else found


#: Builders of what is here, by the operators' names.
ALL_OPS = {one.name: one for one in (_made(name)() for name in sorted(_HERE))}
