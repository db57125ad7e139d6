"""Runs a program of Accelerate with PyTorch's own FSDP on a host, where Accelerate itself has it on devices alone.
Arguments: a script and its own."""
import runpy
import sys

import torch
from accelerate import accelerator
from accelerate.utils import DistributedType


def main():
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
