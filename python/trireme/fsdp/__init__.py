"""FSDP's names on the library: programs that say `from torch.distributed.fsdp import fully_shard`, or
`FullyShardedDataParallel`.

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in loader:
        loss_function(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

`trireme launch --as-fsdp train.py` runs a program with torch's names meaning these.
"""
from .modules import FSDPModule, UnshardHandle, fully_shard, load_checkpoint, register_fsdp_forward_method, save_checkpoint, share_comm_ctx
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

def __getattr__(name):
    """FSDP1's class, whose arguments are torch.distributed.fsdp's: that is imported with it."""
    if name != "FullyShardedDataParallel":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from .wrapper import FullyShardedDataParallel  # pylint: disable=import-outside-toplevel
    return FullyShardedDataParallel


__all__ = ["CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle", "fully_shard", "load_checkpoint",
           "register_fsdp_forward_method", "save_checkpoint", "share_comm_ctx"]
