"""Activation checkpointing under DeepSpeed's names: torch.utils.checkpoint, not reentrant, with this rank's random
numbers."""
import contextlib
import sys

import torch
from torch.utils import checkpoint as torch_checkpoint

from .. import config as configs
from ..errors import UnsupportedError
from .missing import names_of
from .utils.logging import logger

__path__ = []  # runtime.activation_checkpointing.checkpointing is this module, too
__getattr__ = names_of(__name__)
checkpointing = sys.modules[__name__]
_configured = False


def configure(mpu_, deepspeed_config=None, partition_activations=None, contiguous_checkpointing=None, num_checkpoints=None,
              checkpoint_in_cpu=None, synchronize=None, profile=None):
    """Accepts DeepSpeed's options. Of activations that lie in host memory nothing is partitioned or moved, which is
    logged.

    Raises  UnsupportedError: partition_activations with model parallelism (`mpu_` of more than one rank).
    """
    global _configured  # pylint: disable=global-statement
    section = configs.read(deepspeed_config).get("activation_checkpointing", {}) if deepspeed_config is not None else {}
    asked = {"partition_activations": partition_activations, "contiguous_memory_optimization": contiguous_checkpointing,
             "number_checkpoints": num_checkpoints, "cpu_checkpointing": checkpoint_in_cpu,
             "synchronize_checkpoint_boundary": synchronize, "profile": profile}
    on = [name for name, value in asked.items() if (section.get(name) if value is None else value)]
    if "partition_activations" in on and mpu_ is not None and mpu_.get_model_parallel_world_size() > 1:
        raise UnsupportedError("checkpointing.configure(partition_activations=True): model parallelism is not there yet")
    if on:
        logger.info("checkpointing: no meaning for activations in host memory: %s", ", ".join(on))
    _configured = True


def is_configured():
    """Whether configure() was called."""
    return _configured


def reset():
    """Forgets what a forward without a backward left: nothing is left here."""


def checkpoint(function, *args, **kwargs):
    """function(*args), of which autograd keeps the inputs alone; backward computes it again, with the same random
    numbers."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


class CudaRNGStatesTracker:
    """Random number generators by name; fork() draws from one of them for a scope."""

    def __init__(self):
        self.states_ = {}
        self.seeds_ = set()

    def reset(self):
        """Forgets all of them."""
        self.states_.clear()
        self.seeds_.clear()

    def get_states(self):
        """By name."""
        return dict(self.states_)

    def set_states(self, states):
        """The reverse of get_states()."""
        self.states_ = dict(states)

    def add(self, name, seed):
        """A generator of its own. Raises Exception: the name or the seed is there already, as in DeepSpeed."""
        for known, value, what in ((self.seeds_, seed, "seed"), (self.states_, name, "cuda rng state")):
            if value in known:
                raise Exception(f"{what} {value} already exists")  # pylint: disable=broad-exception-raised
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        """While it lasts, random numbers are those of `name`. Raises Exception: there is none."""
        if name not in self.states_:
            raise Exception(f"cuda rng state {name} is not added")  # pylint: disable=broad-exception-raised
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker():
    """The tracker of this process."""
    return _tracker


def model_parallel_cuda_manual_seed(seed):
    """Seeds this rank's generator with `seed`, and the tracker's "model-parallel-rng" with another of it."""
    _tracker.reset()
    torch.manual_seed(seed)
    _tracker.add("model-parallel-rng", seed + 2718)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed


def set_num_layers(nlayers):
    """Accepted: buffers are not made ahead."""


def partition_activations_in_checkpoint(partition_activation):
    """Accepted: without model parallelism there is nothing to partition."""
