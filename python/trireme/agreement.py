"""Whether all ranks were given the same configuration, before anything is exchanged that depends on it."""
import hashlib

import torch

from .errors import ConfigError


def _flat(section, path=""):
    if not isinstance(section, dict):
        return {path: section}
    return {key: value for name, inner in section.items() for key, value in _flat(inner, f"{path}.{name}" if path else name).items()}


def _digest(value):
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def check(world, resolved):
    """Collective. Raises ConfigError on every rank, with the keys whose values differ."""
    if world.size == 1:
        return
    options = dict(sorted(_flat(resolved).items()))
    digests = torch.tensor([_digest(list(options)), *(_digest(value) for value in options.values())], dtype=torch.int64)
    names = digests[:1].clone(), digests[:1].clone()
    world.all_reduce(names[0], "min")
    world.all_reduce(names[1], "max")
    if not torch.equal(*names):
        raise ConfigError("initialize: the ranks' configurations have different options, such as another optimizer; give every rank the same")
    least, most = digests.clone(), digests.clone()
    world.all_reduce(least, "min")
    world.all_reduce(most, "max")
    different = [key for key, one, other in zip(options, least[1:], most[1:]) if one != other]
    if different:
        here = ", ".join(f"`{key}` (here {options[key]!r})" for key in different[:5])
        raise ConfigError(f"initialize: the ranks' configurations differ in {here}; give every rank the same")
