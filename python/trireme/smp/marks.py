"""Marks on modules: of those that are made inside of a context, or of all in a module."""
import contextlib

import torch


class Marks:
    """One kind of marks. They stand in the module, under `attribute`, and go with copies of it."""

    def __init__(self, attribute):
        self._attribute, self._around = attribute, []  # the values of the contexts around what is made now

    @contextlib.contextmanager
    def inside(self, value):
        """Modules that are made inside get `value`; of nested contexts the innermost holds."""
        made = torch.nn.Module.__init__

        def init(module, *args, **kwargs):
            made(module, *args, **kwargs)
            vars(module)[self._attribute] = self._around[-1]

        self._around.append(value)
        if len(self._around) == 1:
            torch.nn.Module.__init__ = init
        try:
            yield
        finally:
            self._around.pop()
            if not self._around:
                torch.nn.Module.__init__ = made

    def put(self, module, value):
        """`module` and all modules in it get `value`."""
        for inner in module.modules():
            vars(inner)[self._attribute] = value

    def of(self, module, default=None):
        """The mark of a module itself."""
        return vars(module).get(self._attribute, default)
