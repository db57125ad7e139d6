"""Messages of ranks beside steps: barriers, and bytes of a pipeline's first rank."""
import torch.distributed as dist

from . import ranks
from .config import state

_groups = {}  # torch.distributed's, by ranks


def barrier():
    """Returns when every rank of the world has called it. Collective."""
    state.world.barrier()


def dp_barrier():
    """Returns when every rank of this stage has called it. Collective over them."""
    _barrier(ranks.get_dp_group())


def mp_barrier():
    """Returns when every rank of this copy of the model has called it. Collective over them."""
    _barrier(ranks.get_mp_group())


def _barrier(members):
    if len(members) > 1:
        dist.barrier(group=_group_of(members))


def broadcast_bytes(payload, members):
    """Fills `payload`, uint8 on the host, with that of the first of `members`. Collective over them."""
    if payload.numel():
        dist.broadcast(payload, members[0], group=_group_of(members))


def _group_of(members):
    """A group on the host, of some ranks, this one among them. Collective over them when first called."""
    key = tuple(members)
    if key not in _groups:
        _groups[key] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    return _groups[key]
