"""`offload_activations`: what checkpointed functions are given waits on the host for the backward pass."""
import contextlib
import threading

import torch

from ..device import local_device
from ..errors import UnsupportedError
from . import ranks
from .config import state


class _Here(threading.local):
    depth = 0  # checkpointed functions that run, one inside of the other


_here = _Here()


@contextlib.contextmanager
def inside():
    """While it lasts, a checkpointed function runs: what those inside of it are given is computed again anyway."""
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1


def check():
    """Raises  UnsupportedError: ranks that have a model together have it on devices."""
    device = local_device()
    if state.cfg.offload_activations and ranks.mp_size() > 1 and device.type != "cpu":
        raise UnsupportedError(f"smp.DistributedModel: `offload_activations` = true on {device} with {ranks.mp_size()} ranks that have the model together is not there yet: a stage "
                               "does not move another one's activations; leave it out, or give 1 for `pipeline_parallel_degree` and `tensor_parallel_degree`")


def kept(arguments):
    """The arguments of a checkpointed function as they wait: tensors that are elsewhere on the host, as Waiting."""
    if not state.cfg.offload_activations or _here.depth:
        return arguments
    return tuple(Waiting(one) if isinstance(one, torch.Tensor) and _is_elsewhere(one) else one for one in arguments)


def brought_back(arguments):
    """The arguments that were kept()."""
    return tuple(one.brought_back() if isinstance(one, Waiting) else one for one in arguments)


class Waiting:
    """A copy, so that writes into the tensor do not change it."""

    def __init__(self, tensor):
        self._copy, self._device, self._requires_grad = tensor.detach().to("cpu", copy=True), tensor.device, tensor.requires_grad

    def brought_back(self):
        """The tensor where it was. Each call gives another one."""
        return self._copy.to(self._device, copy=True).requires_grad_(self._requires_grad)


def _is_elsewhere(tensor):
    return tensor.device.type != "cpu"
