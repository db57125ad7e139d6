"""The device that this rank trains on."""
import torch

from ._native import core
from .errors import ConfigError


def local_device():
    """The device that this rank trains on: TRIREME_DEVICE ("auto", "cpu", "cuda", "cuda:N"), which is "auto" where it
    is not set.

    Raises  ConfigError: there is no such device.
    """
    try:
        return torch.device(core.choose_device(core.environment("TRIREME_DEVICE") or "auto", int(core.environment("LOCAL_RANK") or 0)))
    except ConfigError as error:
        raise ConfigError(f"TRIREME_DEVICE: {error}") from None
