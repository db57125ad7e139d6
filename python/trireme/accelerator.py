"""The device that ranks compute on, behind the methods that programs ask."""
import contextlib
import os
import resource
import sys

import torch

from .missing import names_of

__path__ = []  # accelerator.real_accelerator is this module, too
real_accelerator = sys.modules[__name__]
__getattr__ = names_of("trireme.accelerator", "set_accelerator")


def _nothing(*_args, **_kwargs):
    """Nothing: the host has no such thing."""


class DeepSpeedAccelerator:
    """The host. `device_index` is accepted everywhere and means nothing; sizes are in bytes."""

    # pylint: disable=missing-function-docstring,too-many-public-methods

    _name = "cpu"
    BFloat16Tensor, ByteTensor, DoubleTensor = torch.BFloat16Tensor, torch.ByteTensor, torch.DoubleTensor
    FloatTensor, HalfTensor = torch.FloatTensor, torch.HalfTensor
    IntTensor, LongTensor = torch.IntTensor, torch.LongTensor
    Event = Stream = None
    current_stream = default_stream = create_graph = _nothing
    empty_cache = synchronize = set_device = range_push = range_pop = lazy_call = _nothing
    reset_peak_memory_stats = reset_max_memory_allocated = reset_max_memory_cached = _nothing

    def device_name(self, device_index=None):
        return "cpu"

    def device(self, device_index=None):
        return contextlib.nullcontext()

    def current_device(self):
        return int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self):
        return "cpu"

    def device_count(self):
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def is_available(self):
        return True

    def is_synchronized_device(self):
        return True

    def use_host_timers(self):
        return True

    def resolves_data_dependency(self):
        return True

    def handles_memory_backpressure(self):
        return True

    def communication_backend_name(self):
        return "gloo"

    def get_compile_backend(self):
        return "inductor"

    def is_bf16_supported(self):
        return True

    def is_fp16_supported(self):
        return True

    def is_triton_supported(self):
        return False

    def supported_dtypes(self):
        return [torch.float32, torch.bfloat16, torch.float16]

    def stream(self, stream):
        return contextlib.nullcontext()

    def random(self):
        return torch.random

    def manual_seed(self, seed):
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self):
        return torch.initial_seed()

    def default_generator(self, device_index):
        return torch.default_generator

    def get_rng_state(self, device_index=None):
        return torch.get_rng_state()

    def set_rng_state(self, new_state, device_index=None):
        torch.set_rng_state(new_state)

    def memory_allocated(self, device_index=None):
        """Resident now."""
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    memory_reserved = memory_cached = memory_allocated

    def max_memory_allocated(self, device_index=None):
        """Resident at most."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    max_memory_reserved = max_memory_cached = max_memory_allocated

    def memory_stats(self, device_index=None):
        return {"allocated_bytes.all.current": self.memory_allocated(), "allocated_bytes.all.peak": self.max_memory_allocated()}

    def total_memory(self, device_index=None):
        return os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()

    def available_memory(self, device_index=None):
        return os.sysconf("SC_AVPHYS_PAGES") * resource.getpagesize()

    def pin_memory(self, tensor, align_bytes=1, make_copy=True, match_shape=True):
        return tensor

    def is_pinned(self, tensor):
        return tensor.is_pinned()

    def on_accelerator(self, tensor):
        return tensor.device.type == "cpu"

    def visible_devices_envs(self):
        return ["CUDA_VISIBLE_DEVICES"]

    def export_envs(self):
        return []


_accelerator = DeepSpeedAccelerator()


def get_accelerator():
    """The accelerator of this process: the host."""
    return _accelerator


def is_current_accelerator_supported():
    """Whether this package computes on it."""
    return True
