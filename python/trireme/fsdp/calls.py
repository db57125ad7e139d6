"""Calls: forwards and other methods of wrapped modules, with casts of what they get and give."""
import contextlib
import copy
import dataclasses

import torch
from torch.utils import _pytree


def cast(values, dtype):
    """`values` with floating tensors in `dtype`, in containers and dataclasses; None: as they are."""
    if dtype is None:
        return values

    def of_one(value):
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, set):
            return {of_one(one) for one in value}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _dataclass(value)
        return value

    def _dataclass(value):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(made, field.name, _pytree.tree_map(of_one, getattr(value, field.name)))
        return made

    return _pytree.tree_map(of_one, values)


def _autocast_around(device):
    """The program's autocast, to be entered again."""
    return torch.autocast(device, dtype=torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device),
                          cache_enabled=torch.is_autocast_cache_enabled())


class Calls:
    """Modules of a sharded tree compute with casts, under the program's autocast, and find in parameters what they
    compute with."""

    def __init__(self, tree, values):
        self._tree, self._values = tree, values
        self._is_inside = False  # of the root's forward
        self._autocast = contextlib.nullcontext()  # of the program, around that

    def forward(self, module, forward, args, kwargs):
        """forward(*args, **kwargs) of `module`, the root's under the engine's own forward."""
        if self._is_inside or module is not self._tree.module:
            with self._values.computing():
                return self._run(module, forward, args, kwargs)
        device = next(self._tree.module.parameters()).device.type
        with self._values.computing():
            self._is_inside, self._autocast = True, _autocast_around(device)
            try:
                with torch.autocast(device, enabled=False):  # the engine's own forward has that of its configuration
                    return self._tree.engine(*args, **kwargs)
            finally:
                self._is_inside, self._autocast = False, contextlib.nullcontext()

    def method(self, module, method, args, kwargs):
        """method(*args, **kwargs) of `module`, as forward() does it of a forward."""
        with self._values.computing(), contextlib.nullcontext() if self._is_inside else self._tree.engine.core.forward_scope():
            return self._run(module, method, args, kwargs)

    def _run(self, module, function, args, kwargs):
        """`function` of a module, with casts."""
        policy, is_root = self._tree.dtypes.policy, module is self._tree.module
        of_root = self._tree.choice.casts_root_inputs if is_root else None
        casts = policy.cast_forward_inputs if of_root is None else of_root
        args, kwargs = cast((args, kwargs), policy.param_dtype if casts else None)
        with self._autocast if is_root else contextlib.nullcontext():
            return cast(function(*args, **kwargs), policy.output_dtype)
