"""Attributes of other packages: those of their modules and classes, and what lists, sets and dicts hold that stand
there, so that a test can say what a program has changed."""
import collections
import sys
import types

_HOLDERS = (dict, collections.OrderedDict, collections.defaultdict, list, set)
_OF_PYTHON = ("__builtins__", "__warningregistry__", "__annotations__", "__dict__")
_VALUES = (bool, int, float, str, bytes, type(None))


class Attributes:
    """The attributes of `packages` as they are now."""

    def __init__(self, *packages):
        self._packages = packages
        self._found = {}  # (id of an owner, name): (value, what it holds)
        self._owners = {}  # by id: (owner, its dotted name)
        for name, module in list(sys.modules.items()):
            if self._is_of_packages(name) and isinstance(module, types.ModuleType):
                self._look_into(name, module)
        self._names = collections.defaultdict(list)
        for number, name in self._found:
            self._names[number].append(name)

    def _is_of_packages(self, name):
        return name.partition(".")[0] in self._packages

    def _look_into(self, path, owner):
        self._owners[id(owner)] = owner, path
        for name, value in list(vars(owner).items()):
            if name in _OF_PYTHON:
                continue
            self._found[id(owner), name] = value, _held(value)
            if issubclass(type(value), type):
                if self._is_of_packages(str(value.__module__)) and id(value) not in self._owners:
                    self._look_into(f"{value.__module__}.{value.__qualname__}", value)
            elif not isinstance(value, types.ModuleType) and self._is_of_packages(str(type(value).__module__)) and type(getattr(value, "__dict__", None)) is dict and id(value) not in self._owners:
                self._owners[id(value)] = value, f"{path}.{name}"
                self._found.update({(id(value), inner): (held, _held(held)) for inner, held in vars(value).items()
                                    if type(held) in _HOLDERS and inner not in _OF_PYTHON})

    def changed(self):
        """{dotted name: (id of its owner, name)} of what is otherwise now than it was, in the modules, classes and
        objects that were there."""
        found = {}
        for number, (owner, path) in self._owners.items():
            is_object = not isinstance(owner, (type, types.ModuleType))
            now = {name: value for name, value in vars(owner).items() if name not in _OF_PYTHON and not (is_object and type(value) not in _HOLDERS)}
            before = {name for name in self._names[number] if name not in now}
            found.update({f"{path}.{name}": (number, name) for name in before})
            found.update({f"{path}.{name}": (number, name) for name, value in now.items() if not _same(self._found.get((number, name)), value)})
        return found


def _held(value):
    if type(value) not in _HOLDERS or len(value) > 20000:
        return None
    return {key: id(one) for key, one in value.items()} if isinstance(value, dict) else [id(one) for one in value]


def _same(before, now):
    if before is None:
        return False
    if before[0] is now and before[1] == _held(now):
        return True
    return type(before[0]) is type(now) and (type(now) in _VALUES or type(now).__name__ == "Pattern") and before[0] == now
