"""`static_mode`: a call of a module of another stage does not run where an earlier one with arguments alike stands for
it."""
import contextlib

import torch
from torch.utils import _pytree

from . import entries, program

# Values by which calls are told apart. Of any other object nothing is known, so that calls with one always run.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout)
_HOLE = object()


class _Effects:
    """The effects so far of modules that run, by which no later call may leave them out."""

    count = 0


def must_run():
    """The modules that run have an effect that is none of an operator's."""
    _Effects.count += 1


class StaticCalls:
    """While it is entered, modules of the engine that lie wholly on another stage run only where they have to.

    Calls are alike that have arguments of the same structure, values, sizes, strides and dtypes, under the same modes
    of autograd and autocast, of a module whose parts are in the same modes. A call that sets an attribute of a module,
    changes an argument or reads numbers stands for no other.
    """

    def __init__(self, module, engine):
        self._core = engine.core
        self._calls, numbers = [], {}
        modules = dict(module.named_modules(remove_duplicate=False))
        seen = set()
        for name, stages in entries.stages_of_modules(engine.homes).items():
            one = modules.get(name)
            if len(stages) == 1 and engine.stage not in stages and one is not None and id(one) not in seen and not isinstance(one, torch.jit.ScriptModule):
                seen.add(id(one))
                self._calls.append(_OfModule(one, len(seen), min(stages), engine.core, numbers))
        self._entered = None

    def __enter__(self):
        set_attribute = torch.nn.Module.__setattr__

        def __setattr__(self, name, value):
            must_run()
            set_attribute(self, name, value)

        with contextlib.ExitStack() as restored:
            torch.nn.Module.__setattr__ = __setattr__
            restored.callback(setattr, torch.nn.Module, "__setattr__", set_attribute)
            for calls in self._calls:
                restored.callback(calls.install())
            self._entered = restored.pop_all()
        return self

    def __exit__(self, *_):
        self._entered.close()


class _OfModule:
    """The calls of one module, in place of its forward()."""

    def __init__(self, module, number, stage, core, numbers):
        self._number, self._stage, self._core, self._numbers = number, stage, core, numbers
        self._module, self._parts = module, tuple(module.modules())
        self._forward = None
        self._made = {}  # number of a call that stands: (structure of its results, values that are no tensors) or None

    def install(self):
        """Returns what takes it away again."""
        attributes = self._module.__dict__
        before = attributes.get("forward")
        self._forward = self.__wrapped__ = self._module.forward
        self.__self__ = self._module
        attributes["forward"] = self
        return lambda: attributes.pop("forward") if before is None else attributes.update(forward=before)

    def __call__(self, *args, **kwargs):
        tensors = []
        if program.running() is None or (key := _key((args, kwargs), tensors)) is None:
            return self._forward(*args, **kwargs)
        modes = tuple(part.training for part in self._parts)
        # Their hashes may be equal where keys are not.
        number = self._numbers.setdefault((self._number, modes, key), len(self._numbers))
        begun = self._core.begin_call(number, self._stage, tensors)
        if begun is None:
            return self._forward(*args, **kwargs)
        if begun is not True:
            return _filled(self._made[begun[0]], begun[1])
        effects = _Effects.count
        try:
            results = self._forward(*args, **kwargs)
        except BaseException:
            self._core.drop_call()
            raise
        after = []
        if _Effects.count != effects or _key((args, kwargs), after) != key or any(one is not other for one, other in zip(tensors, after)):
            self._core.drop_call()
        else:
            self._end(results)
        return results

    def _end(self, results):
        if isinstance(results, torch.Tensor):
            tensors, made = [results], None
        else:
            leaves, structure = _pytree.tree_flatten(results)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            made = structure, [_HOLE if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            if not all(leaf is _HOLE or isinstance(leaf, _PLAIN) for leaf in made[1]):
                self._core.drop_call()
                return
        number = self._core.end_call(tensors)
        if number >= 0:
            self._made[number] = made


def _filled(made, tensors):
    if made is None:
        return tensors[0]
    rest = iter(tensors)
    return _pytree.tree_unflatten([next(rest) if leaf is _HOLE else leaf for leaf in made[1]], made[0])


def _key(value, tensors):
    """The values that tell arguments apart beside their tensors, which are added to `tensors`; None: it is not
    known."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _HOLE
    kind = type(value)
    if kind in (tuple, list):
        parts = tuple(_key(one, tensors) for one in value)
        return None if None in parts else (kind, parts)
    if kind is dict:
        parts = tuple(_key(one, tensors) for one in value.values())
        return None if None in parts or not all(isinstance(name, str) for name in value) else (tuple(value), parts)
    if not isinstance(value, _PLAIN):
        return None
    return kind, repr(value) if isinstance(value, (float, complex)) else value  # 0.0 and -0.0 are equal
