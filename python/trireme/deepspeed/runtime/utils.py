"""Helpers that programs import from DeepSpeed's runtime."""
import random
import resource
import sys

import torch

from ..missing import names_of
from ..utils.logging import logger

__getattr__ = names_of(__name__)

__all__ = ["call_to_str", "clip_grad_norm_", "empty_cache", "get_global_norm", "move_to_device", "noop_decorator", "see_memory_usage",
           "set_random_seed"]


def call_to_str(base, *args, **kwargs):
    """A call as Python writes it: "Linear(2, 3, bias=False)"."""
    words = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    return f"{base}({', '.join(words)})"


def move_to_device(item, device, criterion_func=None):
    """Tensors inside of lists, tuples and dicts moved to `device`; others as they are, and those that criterion_func
    refuses."""
    if criterion_func(item) if criterion_func is not None else hasattr(item, "to"):
        return item.to(device)
    if isinstance(item, (list, tuple)):
        moved = [move_to_device(value, device, criterion_func) for value in item]
        return type(item)(*moved) if hasattr(item, "_fields") else type(item)(moved)
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    return item


def clip_grad_norm_(parameters, max_norm, norm_type=2, mpu=None):
    """torch's, of gradients that stand in `.grad`; an engine clips its own by `gradient_clipping`. Returns the norm
    before."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def get_global_norm(norm_list):
    """The norm of parts that have these norms (L2)."""
    return sum(float(norm) ** 2 for norm in norm_list) ** 0.5


def see_memory_usage(message, force=False):
    """With `force` logs `message` and this process's memory: resident now and at most, in GiB."""
    if not force or (torch.distributed.is_initialized() and torch.distributed.get_rank() != 0):
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    logger.info("%s: %.2f GiB resident, %.2f GiB at most", message, now / 2**30, peak / 2**30)


def set_random_seed(seed):
    """Seeds the generators of Python, torch and, where the program uses it, NumPy."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)


def empty_cache():
    """Nothing: host memory has no cache of its own."""


def noop_decorator(function):
    """`function` itself."""
    return function
