"""Modules under other names."""
import importlib
import importlib.abc
import importlib.machinery
import importlib.util


class AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules by `real_name(name)`, the name under which they really are, or None."""

    def __init__(self, real_name):
        self._real_name = real_name

    def find_spec(self, fullname, path=None, target=None):
        real = self._real_name(fullname)
        try:
            if real is None or importlib.util.find_spec(real) is None:
                return None
        except ModuleNotFoundError:  # a module below one that is no package
            return None
        return importlib.machinery.ModuleSpec(fullname, self, loader_state={"name": real})

    def create_module(self, spec):
        module = importlib.import_module(spec.loader_state["name"])
        spec.loader_state["spec"] = module.__spec__  # which the import machinery is about to replace
        return module

    def exec_module(self, module):
        module.__spec__ = module.__spec__.loader_state["spec"]
