"""Whether all ranks were given the same configuration, before anything is exchanged that depends on it."""
import hashlib

import torch

from ._native import core
from .errors import ConfigError, StateError


def _flat(section, path=""):
    if not isinstance(section, dict):
        return {path: section}
    return {key: value for name, inner in section.items() for key, value in _flat(inner, f"{path}.{name}" if path else name).items()}


def _digest(value):
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def _agree(world, values):
    """Whether all ranks have the same integer, for each of `values` [n]."""
    most = torch.cat([values, -values])
    world.all_reduce(most, "max")
    return most[:len(values)] == -most[len(values):]


def check_tensors(world, call, tensors):
    """Collective. Raises StateError on every rank where {name: tensor} has other names or values on another; what an
    engine has is the same everywhere."""
    if world.size == 1:
        return
    tensors = {name: value for name, value in sorted(tensors.items()) if isinstance(value, torch.Tensor)}
    if not _agree(world, torch.tensor([_digest(list(tensors))], dtype=torch.int64)).all():
        raise StateError(f"{call}: ranks have tensors of other names (here {len(tensors)} tensors); give every rank the same")
    numbers = torch.tensor([0 if core.is_managed(value) else core.digest(value) for value in tensors.values()], dtype=torch.int64)
    different = [name for name, same in zip(tensors, _agree(world, numbers)) if not same]
    if different:
        raise StateError(f"{call}: '{different[0]}' has other values on another rank, of which each would keep its own part; give every rank the same")


def check_tensor(world, call, tensor):
    """Collective. Raises StateError on every rank where `tensor` has other values on another."""
    if world.size > 1 and not _agree(world, torch.tensor([core.digest(tensor)], dtype=torch.int64)).all():
        raise StateError(f"{call}: a tensor of shape {tuple(tensor.shape)} has other values on another rank, of which each would take its own part; give every "
                         "rank the same: seed generators alike, or broadcast() it first")


def check(world, resolved):
    """Collective. Raises ConfigError on every rank, with the keys whose values differ."""
    if world.size == 1:
        return
    options = dict(sorted(_flat(resolved).items()))
    digests = torch.tensor([_digest(list(options)), *(_digest(value) for value in options.values())], dtype=torch.int64)
    if not _agree(world, digests[:1]).all():
        kind = options.get("optimizer.type")
        raise ConfigError("initialize: the ranks' configurations have different options, such as another `optimizer.type` (here "
                          f"{kind!r}); give every rank the same")
    different = [key for key, same in zip(options, _agree(world, digests)[1:]) if not same]
    if different:
        here = ", ".join(f"`{key}` (here {options[key]!r})" for key in different[:5])
        raise ConfigError(f"initialize: the ranks' configurations differ in {here}; give every rank the same")
