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


def keeping(arguments):
    """While it lasts, tensors that a node saves go to the host, where some of its `arguments` are elsewhere."""
    if not state.cfg.offload_activations or _here.depth or not any(isinstance(one, torch.Tensor) and _is_elsewhere(one) for one in arguments):
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_to_host, _back)


def _is_elsewhere(tensor):
    return tensor.device.type != "cpu"


def _to_host(tensor):
    """A copy, so that writes into the tensor do not change it."""
    return (tensor.to("cpu", copy=True), tensor.device) if _is_elsewhere(tensor) else (tensor.clone(), None)


def _back(packed):
    tensor, device = packed
    return tensor if device is None else tensor.to(device, copy=True)
