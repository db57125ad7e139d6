"""checkpoint() and checkpoint_sequential(), where programs of smp import them from."""
from ..checkpointing import checkpoint, checkpoint_sequential

__all__ = ["checkpoint", "checkpoint_sequential"]
