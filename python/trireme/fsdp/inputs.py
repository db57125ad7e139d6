"""Casts of what modules get and give."""
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
