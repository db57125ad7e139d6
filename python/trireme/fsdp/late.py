"""Changes to packages that a program may import later, made when it does."""
import importlib.abc
import importlib.machinery
import sys


class _Loader(importlib.abc.Loader):
    """Another loader, and `change(module)` after it."""

    def __init__(self, loader, change):
        self._loader, self._change = loader, change

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        self._change(module)

    def __getattr__(self, name):
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, once, as Python does."""

    def __init__(self, name, change):
        self._name, self._change = name, change

    def find_spec(self, fullname, path, target=None):
        """See MetaPathFinder."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader, self._change)
        return spec


def when_imported(name, change):
    """Calls change(module) once the module `name` is imported; now where it is already."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, change))
