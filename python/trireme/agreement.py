"""Whether all ranks were given the same configuration and tensors, before what depends on them is exchanged."""
import json

import torch

from ._native import core
from .errors import ConfigError, StateError


def _flat(section, path=""):
    if not isinstance(section, dict):
        return {path: section}
    return {key: value for name, inner in section.items() for key, value in _flat(inner, f"{path}.{name}" if path else name).items()}


def check_tensors(world, call, tensors):
    """Collective. Raises StateError on every rank where {name: tensor} has other names or values on another; what an
    engine has is the same everywhere."""
    if world.size == 1:
        return
    tensors = {name: value for name, value in sorted(tensors.items()) if isinstance(value, torch.Tensor)}
    if world.first_difference([core.digest(repr(list(tensors)))]) is not None:
        raise StateError(f"{call}: ranks have tensors of other names (here {len(tensors)} tensors); give every rank the same")
    different = world.first_difference([0 if core.is_managed(value) else core.digest(value) for value in tensors.values()])
    if different is not None:
        raise StateError(f"{call}: '{list(tensors)[different]}' has other values on another rank, of which each would keep its own part; give every rank the "
                         "same")


def check_tensor(world, call, tensor):
    """Collective. Raises StateError on every rank where `tensor` has other values on another."""
    if world.first_difference([core.digest(tensor)]) is not None:
        raise StateError(f"{call}: a tensor of shape {tuple(tensor.shape)} has other values on another rank, of which each would take its own part; give every "
                         "rank the same: seed generators alike, or broadcast() it first")


def check(world, resolved, call="initialize"):
    """Collective. Raises ConfigError on every rank, with the keys whose values differ."""
    if world.size == 1:
        return
    options = {key: repr(value) for key, value in sorted(_flat(resolved).items())}
    if world.first_difference([core.digest(repr(options))]) is None:
        return
    of_ranks = [json.loads(text) for text in world.gather(json.dumps(options))]
    if any(other.keys() != of_ranks[0].keys() for other in of_ranks):
        raise ConfigError(f"{call}: the ranks' configurations have different options, such as another `optimizer.type` (here "
                          f"{options.get('optimizer.type')}); give every rank the same")
    different = [key for key in options if any(other[key] != options[key] for other in of_ranks)]
    here = ", ".join(f"`{key}` (here {options[key]})" for key in different[:5])
    raise ConfigError(f"{call}: the ranks' configurations differ in {here}; give every rank the same")
