"""DistributedModule: the base of modules whose layers ranks along the axis "tensor" share."""
import torch

from ...errors import ConfigError, ShapeError, UnsupportedError


class DistributedModule(torch.nn.Module):
    """A module that can stand for another one where ranks share layers. On one rank it is a plain module."""


def refuse(module, **options):
    """Raises UnsupportedError: an option, {name: (value, default)}, that is not there yet for `module`."""
    for name, (value, default) in options.items():
        if value != default:
            raise UnsupportedError(f"smp.nn.{type(module).__name__}({name}={value!r}) is not there yet; leave it out")


def check_probability(module, **probabilities):
    """Raises ConfigError: one is not from 0 to 1."""
    for name, value in probabilities.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"smp.nn.{type(module).__name__}({name}={value!r}): expected a number from 0 to 1")


def taken_apart(module, inputs, names):
    """The items of a tuple of arguments. Raises ShapeError: another form."""
    if not isinstance(inputs, (tuple, list)) or len(inputs) != len(names):
        found = f"{len(inputs)} items" if isinstance(inputs, (tuple, list)) else type(inputs).__name__
        raise ShapeError(f"smp.nn.{type(module).__name__}: expected one tuple ({', '.join(names)}), got {found}")
    return tuple(inputs)
