"""The ranks of the job: torch.distributed's functions, and Trireme's own world beside them.

Whatever is not defined here is torch.distributed's, such as all_reduce, broadcast and ReduceOp. Engines use the world
of `world()`: shared memory between the ranks of one host.
"""
import types

import torch.distributed as dist

from ... import ranks
from ...ranks import world
from ..missing import names_of
from .logged import configure, counted, get_comm_operation_count, get_logged_comm_ops, has_comm_data, log_summary, reset_log
from .more import (all_gather_coalesced, allgather_fn, get_all_ranks_from_group, get_global_rank, get_world_group,
                   has_all_gather_into_tensor, has_all_reduce_coalesced, has_coalescing_manager, has_reduce_scatter_tensor, inference_all_reduce,
                   init_deepspeed_backend, initialize_mesh_device, reduce_scatter_fn, set_backend)

default_pg_timeout = ranks.TIMEOUT
_of_deepspeed = names_of(__name__)


def __getattr__(name):
    found = counted(name) or getattr(dist, name, None)
    if found is not None and not isinstance(found, types.ModuleType):
        return found
    try:
        return _of_deepspeed(name)
    except AttributeError:
        return getattr(dist, name)


def is_initialized():
    """Whether init_distributed() was called."""
    return ranks.is_joined() and dist.is_initialized()


def init_distributed(dist_backend=None, auto_mpi_discovery=True, distributed_port=29500, verbose=True,
                     timeout=None, init_method=None, dist_init_required=None, config=None, rank=-1, world_size=-1):
    """Joins the ranks that torch.distributed or the launcher's variables name, and initialises torch.distributed if
    nobody has.

    Collective. Without a launcher the world has one rank. `timeout` is a datetime.timedelta, 30 minutes if not given,
    and bounds every wait for a peer (TRIREME_TIMEOUT_S overrides it for engines). `dist_backend` is
    torch.distributed's, "gloo" if not given. Engines exchange data through shared memory where all ranks are on one
    host, else through torch.distributed's process group; TRIREME_COMM=shm or c10d chooses, and rank 0 logs what was
    chosen.

    Raises  ConfigError: launcher variables that are missing or contradict each other. CommTimeoutError: a peer that did
            not come.
    """
    # pylint: disable=unused-argument
    if dist_init_required is False and not ranks.is_joined() and not dist.is_initialized():
        raise RuntimeError("init_distributed: dist_init_required=False, but torch.distributed is not initialised; initialise it "
                           "first, or leave the argument out")
    ranks.join(dist_backend or "gloo", timeout or default_pg_timeout, init_method=init_method, rank=rank, size=world_size)


def get_local_rank():
    """This process's rank on its host."""
    return world().local_rank
