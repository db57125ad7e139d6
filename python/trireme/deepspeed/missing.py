"""DeepSpeed's public names. Those that this package lacks can be imported; where they are used, a NotImplementedError
names them. A program often imports more than it uses, and asks isinstance() about the rest.

deepspeed_names.json has every public module of DeepSpeed and its names. tools/deepspeed_names makes it, and compares it
with this package.
"""
import ast
import functools
import importlib
import importlib.abc
import importlib.machinery
import json
import pathlib
import sys
import types

from ..errors import UnsupportedError
from . import aliases

# Modules of earlier versions of DeepSpeed, which programs still import: every name in them is refused.
_EARLIER = frozenset("""
    compression.compress elasticity nebula ops.sparse_attention runtime.eigenvalue runtime.fp16.onebit runtime.fp16.onebit.adam
    runtime.fp16.onebit.lamb runtime.fp16.onebit.zoadam runtime.progressive_layer_drop
""".split())
_TABLE = pathlib.Path(__file__).with_name("deepspeed_names.json")


class Names:
    """DeepSpeed's public modules, by their names without "deepspeed.", and what is in them.

    For each module `table` has the names that it makes ("own"), its constants as Python writes them ("values"), and the
    names that it takes from other modules ("from"; "*" stands for all names of a module).
    """

    def __init__(self, table):
        self._table = table
        self.modules = dict.fromkeys(table)  # in order
        self._packages = {name.rpartition(".")[0] for name in table}
        self._homes = {}

    def is_package(self, module):
        """Whether there are modules in it."""
        return module in self._packages

    def homes(self, module):
        """{name: the module that makes it} of one module."""
        if module not in self._homes:
            found = self._homes[module] = dict.fromkeys(self._made_in(module), module)
            for home, names in self._table.get(module, {}).get("from", {}).items():
                found.update(dict.fromkeys(self._made_in(home) if names == "*" else names.split(), home))
        return self._homes[module]

    def literal(self, module, name):
        """How a constant is written; None: the name is no plain constant."""
        home = self.homes(module).get(name)
        return self._table[home].get("values", {}).get(name) if home in self._table else None

    def _made_in(self, module):
        one = self._table.get(module, {})
        return [*one.get("own", "").split(), *one.get("values", {})]


@functools.cache
def _names():
    return Names(json.loads(_TABLE.read_text(encoding="utf-8")))


@functools.cache
def _originals(module):
    """The modules of DeepSpeed, without "deepspeed.", that a module of this package stands for."""
    here = aliases.deepspeeds_name(module)
    return [here, *(name for name in _names().modules if aliases.real_name(name) == here)]


def _refuse(name):
    raise UnsupportedError(f"{name} is not there yet in Trireme; `trireme docs python` lists what is")


class _Stub(type):
    """A class that may be named, asked about and inherited from; anything else raises."""

    def __call__(cls, *args, **kwargs):
        _refuse(cls.dotted_name)

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"{cls.dotted_name}.{name}")


def is_stub(value):
    """Whether `value` stands for a name that is not there yet."""
    return isinstance(value, _Stub)


def _stub(module, name):
    dotted = ".".join(filter(None, ("deepspeed", aliases.deepspeeds_name(module), name)))
    return _Stub(name, (), {"__qualname__": dotted, "__module__": module, "__doc__": f"{dotted}: not there yet.", "dotted_name": dotted})


def _value(module, home, name):
    """The value of a name, which DeepSpeed makes in `home`, in this package's `module`: a stub where it is not there
    yet."""
    if home not in _originals(module):
        value = getattr(importlib.import_module(f"trireme.{home}".rstrip(".")), name)
        return _stub(module, name) if is_stub(value) else value  # named as the program has written it
    literal = _names().literal(home, name)
    return _stub(module, name) if literal is None else ast.literal_eval(literal)


def _find(module, name):
    """A name that DeepSpeed's module has, a module in it included. Raises AttributeError: it has no such name."""
    if not name.startswith("_"):
        if aliases.deepspeeds_name(module) in _EARLIER:
            return _stub(module, name)
        for original in _originals(module):
            home = _names().homes(original).get(name)
            if home is not None:
                return _value(module, home, name)
            inner = f"{original}.{name}".lstrip(".")
            if inner in _names().modules or inner in _EARLIER:
                return importlib.import_module(f"trireme.{inner}")
    raise AttributeError(f"module '{module}' has no attribute '{name}'")


def names_of(module, others=""):
    """A module's `__getattr__` for the names that DeepSpeed's module has and this one lacks.

    `others` are refused, too: names that are not public, or that earlier versions had.
    """
    made = {name: _stub(module, name) for name in others.split()}

    def find(name):
        if name not in made:
            made[name] = _find(module, name)
        return made[name]

    return find


class _StubModule(types.ModuleType):
    """A module of DeepSpeed that has no counterpart here."""

    def __getattr__(self, name):
        if name == "__all__":
            return sorted(_names().homes(self.__name__.partition(".")[2]))
        value = _find(self.__name__, name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that are not there, after those that are."""

    def find_spec(self, fullname, path=None, target=None):
        package, _, name = fullname.partition(".")
        if package != "trireme" or not (name in _EARLIER or name in _names().modules):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=name in _EARLIER or _names().is_package(name))

    def create_module(self, spec):
        return _StubModule(spec.name, f"{spec.name}: not there yet.")

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
