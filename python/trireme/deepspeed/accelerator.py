"""The device that ranks compute on, behind the methods that programs ask."""
import contextlib
import functools
import importlib
import os
import resource
import sys

import torch

from .._native import core
from ..device import local_device
from .missing import names_of

__path__ = []  # accelerator.real_accelerator is this module, too
real_accelerator = sys.modules[__name__]
__getattr__ = names_of(__name__)


def _nothing(*_args, **_kwargs):
    """Nothing: the host has no such thing."""


class DeepSpeedAccelerator:
    """The host. `device_index` is accepted everywhere and means nothing; sizes are in bytes."""

    # pylint: disable=missing-function-docstring,too-many-public-methods

    _name = "cpu"
    _compile_backend = "inductor"
    supports_nvtx_domain = False
    BFloat16Tensor, ByteTensor, DoubleTensor = torch.BFloat16Tensor, torch.ByteTensor, torch.DoubleTensor
    FloatTensor, HalfTensor = torch.FloatTensor, torch.HalfTensor
    IntTensor, LongTensor = torch.IntTensor, torch.LongTensor
    Event = Stream = None
    current_stream = default_stream = create_graph = _nothing
    replay_graph = register_host_memory = unregister_host_memory = _nothing
    empty_cache = synchronize = set_device = range_push = range_pop = lazy_call = _nothing
    reset_peak_memory_stats = reset_max_memory_allocated = reset_max_memory_cached = _nothing

    def device_name(self, device_index=None):
        return "cpu"

    def device(self, device_index=None):
        return contextlib.nullcontext()

    def current_device(self):
        return int(core.environment("LOCAL_RANK") or 0)

    def current_device_name(self):
        return "cpu"

    def device_count(self):
        """Ranks of this host, as the launcher's variables say; 1 without them."""
        # Variables of DeepSpeed and of torchrun
        counts = (int(core.environment(name) or 0) for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"))
        return next((count for count in counts if count > 0), 1)

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
        return self._compile_backend

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

    def unpin_memory(self, tensor):
        return tensor

    def pin_memory_alignment(self):
        return 1

    def pin_empty(self, *size, dtype, device="cpu"):
        return self.pin_memory(torch.empty(*size, dtype=dtype, device=device))

    def pin_empty_like(self, tensor, device="cpu", dtype=None):
        return self.pin_memory(torch.empty_like(tensor, device=device, dtype=dtype))

    def is_pinned(self, tensor):
        return tensor.is_pinned()

    def on_accelerator(self, tensor):
        return tensor.device.type == "cpu"

    def visible_devices_envs(self):
        return ["CUDA_VISIBLE_DEVICES"]

    def export_envs(self):
        return []

    def set_visible_devices_envs(self, current_env, local_accelerator_ids):
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def is_fp64_supported(self):
        return True

    def is_current_stream_capturing(self):
        return False

    def prefer_triton_grouped_mm(self):
        return False

    def capture_to_graph(self, graph, pool=None, stream=None):
        return contextlib.nullcontext()

    def set_compile_backend(self, backend):
        """Raises ValueError: torch.compile() has no such backend."""
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"{backend} not supported by {self.device_name()}. Supported Backends are {known}")
        self._compile_backend = backend

    def op_builder_dir(self):
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name):
        """The class of that name; NotImplementedBuilder: DeepSpeed has none."""
        builders = importlib.import_module(".ops.op_builder", __package__)
        return getattr(builders, class_name, None) or builders.NotImplementedBuilder

    def create_op_builder(self, op_name):
        """An object of the class that get_op_builder() gives."""
        return self.get_op_builder(op_name)()

    def build_extension(self):
        """torch.utils.cpp_extension's BuildExtension."""
        return importlib.import_module("torch.utils.cpp_extension").BuildExtension


class CudaAccelerator(DeepSpeedAccelerator):
    """The NVIDIA GPUs of this process, as torch.cuda has them."""

    # pylint: disable=missing-function-docstring,too-many-public-methods

    _name = "cuda"
    _of_torch = frozenset((
        "Event", "Stream", "current_stream", "default_stream", "empty_cache", "synchronize", "set_device",
        "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached", "device", "current_device",
        "device_count", "is_available", "is_bf16_supported", "stream", "random", "manual_seed", "manual_seed_all", "initial_seed",
        "get_rng_state", "set_rng_state", "memory_allocated", "memory_reserved", "memory_cached", "max_memory_allocated",
        "max_memory_reserved", "max_memory_cached", "memory_stats"))

    def __getattribute__(self, name):
        if name in CudaAccelerator._of_torch:
            return getattr(torch.cuda, name)
        return super().__getattribute__(name)

    def device_name(self, device_index=None):
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device_name(self):
        return self.device_name(torch.cuda.current_device())

    def range_push(self, message):
        torch.cuda.nvtx.range_push(message)

    def range_pop(self):
        torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback):
        callback()

    def create_graph(self):
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph, pool=None, stream=None):
        return torch.cuda.graph(graph, pool=pool, stream=stream)

    def replay_graph(self, graph):
        graph.replay()

    def is_current_stream_capturing(self):
        return torch.cuda.is_current_stream_capturing()

    def is_synchronized_device(self):
        return False

    def use_host_timers(self):
        return False

    def resolves_data_dependency(self):
        return False

    def handles_memory_backpressure(self):
        return False

    def communication_backend_name(self):
        return "nccl"

    def is_triton_supported(self):
        return torch.cuda.get_device_capability()[0] >= 7

    def default_generator(self, device_index):
        return torch.cuda.default_generators[device_index]

    def total_memory(self, device_index=None):
        return torch.cuda.get_device_properties(device_index or torch.cuda.current_device()).total_memory

    def available_memory(self, device_index=None):
        return torch.cuda.mem_get_info(device_index)[0]

    def pin_memory(self, tensor, align_bytes=1, make_copy=True, match_shape=True):
        return tensor.pin_memory()

    def on_accelerator(self, tensor):
        return tensor.is_cuda


@functools.cache
def get_accelerator():
    """The accelerator of this process: the GPU where there is one (and TRIREME_DEVICE is not "cpu"), else the host."""
    return CudaAccelerator() if local_device().type == "cuda" else DeepSpeedAccelerator()


CPU_Accelerator, CUDA_Accelerator = DeepSpeedAccelerator, CudaAccelerator


def is_current_accelerator_supported():
    """Whether this package computes on it."""
    return True
