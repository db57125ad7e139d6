"""The state that a program keeps in Python from one micro-batch to the next: attributes of modules, generators. Forward
passes that take turns would change it for each other."""
import collections
import contextlib
import copy
import random
import sys
import threading

import torch
from torch.nn.utils import _named_member_accessor, parametrize

CONTAINERS = (list, set, dict, collections.deque)
_OWN = frozenset(vars(torch.nn.Module()))  # parameters, hooks and the like
_PLAIN = (int, float, complex, str, bytes, type(None))


class _Here(threading.local):
    watch = None


_here = _Here()


def generator_state(value):
    """(state, function that puts a state back) of a generator of torch, Python or numpy; None: `value` is none."""
    if isinstance(value, torch.Generator):
        return value.get_state(), value.set_state
    if isinstance(value, random.Random):
        return value.getstate(), value.setstate
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.random.RandomState):
        return value.get_state(legacy=False), value.set_state
    if numpy and isinstance(value, numpy.random.Generator):
        return copy.deepcopy(value.bit_generator.state), lambda state: setattr(value.bit_generator, "state", state)
    return None


def is_container(value):
    """Whether _refill() can give it its items again."""
    return isinstance(value, CONTAINERS) and hasattr(value, "clear")


class Watch:
    """Calls `tell` with the name of what a forward pass has changed, once; `module` is the program's model."""

    def __init__(self, module, tell):
        self._tell = tell
        self._has_told = False
        self._names = {id(inner): name for name, inner in module.named_modules()}
        self._containers, self._generators = [], []
        for name, inner in module.named_modules():
            for key, value in vars(inner).items():
                if key in _OWN:
                    continue
                text = f"the attribute '{name + '.' if name else ''}{key}' of the model"
                if is_container(value):
                    self._containers.append((text, value, copy.copy(value)))
                elif state := generator_state(value):
                    self._generators.append((text, value, state[0]))
        numpy = sys.modules.get("numpy")
        self._python = random.getstate()
        self._numpy = numpy and numpy.random.get_state(legacy=False)

    @contextlib.contextmanager
    def forward(self):
        """While it lasts, this thread runs the forward pass of a micro-batch."""
        _here.watch = self
        if not parametrize._cache_enabled:
            parametrize._cache = _SeenCache()
        try:
            yield
        finally:
            _here.watch = None
        if not self._has_told and (what := self._changed()):
            self._told(what)

    def set(self, module, name, value):
        """The program sets an attribute of a module."""
        if self._has_told or id(module) not in self._names:
            return
        places = vars(module), *(vars(module).get(kind) or {} for kind in ("_parameters", "_buffers", "_modules"))
        before = next((place[name] for place in places if name in place), _here)
        if before is value or (isinstance(value, _PLAIN) and type(before) is type(value) and before == value):
            return
        of_module = self._names[id(module)]
        self._told(f"the attribute '{of_module + '.' if of_module else ''}{name}' of the model")

    def use_cache(self):
        """The program computes a parametrized tensor inside of torch.nn.utils.parametrize.cached()."""
        if not self._has_told:
            self._told("the cache of torch.nn.utils.parametrize")

    def _changed(self):
        for text, container, items in self._containers:
            if not _same_items(container, items):
                return text
        for text, generator, state in self._generators:
            if not _equal(generator_state(generator)[0], state):
                return text
        if random.getstate() != self._python:
            return "the generator of Python's `random`"
        if self._numpy and not _equal(sys.modules["numpy"].random.get_state(legacy=False), self._numpy):
            return "the generator of numpy.random"
        return None

    def _told(self, what):
        self._has_told = True
        self._tell(what)


class _SeenCache(dict):
    """The one cache of all threads that parametrize.cached() fills, and replaces at its end."""

    def get(self, key, default=None):
        if _here.watch is not None:
            _here.watch.use_cache()
        return super().get(key, default)


@contextlib.contextmanager
def seen():
    """While it lasts, a Watch sees attributes that forward passes set, and those that torch.func.functional_call()
    sets, and the cache of parametrized tensors."""
    set_attribute, swap_tensor, cache = torch.nn.Module.__setattr__, _named_member_accessor.swap_tensor, parametrize._cache

    def __setattr__(self, name, value):
        if _here.watch is not None:
            _here.watch.set(self, name, value)
        set_attribute(self, name, value)

    def swap(module, name, tensor, *args, **kwargs):
        if _here.watch is not None:
            _here.watch.set(module, name, tensor)
        return swap_tensor(module, name, tensor, *args, **kwargs)

    torch.nn.Module.__setattr__ = __setattr__
    _named_member_accessor.swap_tensor = swap
    try:
        yield
    finally:
        torch.nn.Module.__setattr__ = set_attribute
        _named_member_accessor.swap_tensor = swap_tensor
        if not parametrize._cache_enabled:
            parametrize._cache = cache


def _same_items(container, items):
    if len(container) != len(items):
        return False
    if isinstance(container, dict):
        return all(key in container and _same(container[key], value) for key, value in items.items())
    if isinstance(container, set):
        return container == items
    return all(_same(one, other) for one, other in zip(container, items))


def _same(one, other):
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)


def _equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if hasattr(one, "shape"):
        return bool((one == other).all())
    return one == other
