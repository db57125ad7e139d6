"""Runs a program of Accelerate with PyTorch's own FSDP on a host, where Accelerate itself has it on devices alone.
Arguments: a script and its own."""
import runpy
import sys

import torch
from accelerate import accelerator
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FullyShardedDataParallel


def keep_on_host():
    """PyTorch's FSDP1 ends by SIGSEGV on a host with offload_to_cpu, which Accelerate sets."""
    choose = FullyShardedDataParallel.set_state_dict_type

    def choose_without(module, kind, *configs, **named):
        for config in (*configs, *named.values()):
            if config is not None:
                config.offload_to_cpu = False
        return choose(module, kind, *configs, **named)

    FullyShardedDataParallel.set_state_dict_type = staticmethod(choose_without)


def main():
    keep_on_host()
    make = accelerator.AcceleratorState.__init__

    def make_and_choose(self, *args, **kwargs):
        make(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            if self.mixed_precision != "no":
                plugin.set_mixed_precision(self.mixed_precision)
            self.fsdp_plugin, self.distributed_type = plugin, DistributedType.FSDP
            accelerator.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            # FSDP1 compares it with a device without an index.
            self.device = accelerator.PartialState._shared_state["device"] = torch.device("cpu")

    accelerator.AcceleratorState.__init__ = make_and_choose
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
