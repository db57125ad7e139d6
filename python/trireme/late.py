"""Changes to modules that a program may import later, made when it does."""
import importlib.abc
import importlib.machinery
import sys

_finders = {}  # by the name of the module that is waited for


class _Loader(importlib.abc.Loader):
    """Another loader, and the changes of `finder` after it."""

    def __init__(self, loader, finder):
        self._loader, self._finder = loader, finder

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        self._finder.change(module)

    def __getattr__(self, name):
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as Python does. It stays until the module runs: a program may ask whether there is such a
    module, and import it later."""

    def __init__(self, name):
        self._name, self.changes = name, []

    def find_spec(self, fullname, path, target=None):
        """See MetaPathFinder."""
        if fullname != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def change(self, module):
        """Makes all changes, and waits no more."""
        changes = list(self.changes)
        self.give_up(*changes)
        for change in changes:
            change(module)

    def give_up(self, *changes):
        """Leaves `changes` out."""
        self.changes = [one for one in self.changes if one not in changes]
        if not self.changes and _finders.get(self._name) is self:
            del _finders[self._name]
            sys.meta_path.remove(self)


def when_imported(name, change):
    """Calls change(module) once the module `name` is imported; now where it is already. Returns a function that gives
    up the wait."""
    if name in sys.modules:
        change(sys.modules[name])
        return lambda: None
    if name not in _finders:
        _finders[name] = _Finder(name)
        sys.meta_path.insert(0, _finders[name])
    finder = _finders[name]
    finder.changes.append(change)
    return lambda: finder.give_up(change)
