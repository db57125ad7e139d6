"""The ranks of the job: torch.distributed's functions, and Trireme's own world beside them.

Whatever is not defined here is torch.distributed's, such as all_reduce, broadcast and ReduceOp. Engines use the world of
`world()`: shared memory between the ranks of one host.
"""
import atexit
import datetime
import os
import weakref

import torch.distributed as dist

from .._native import core
from ..utils.logging import logger

_world = None
engines = weakref.WeakSet()  # those that use the world


def __getattr__(name):
    return getattr(dist, name)


def world():
    """The world that init_distributed() joined; joins it if nobody has yet. Collective then."""
    if _world is None:
        init_distributed()
    return _world


def is_initialized():
    """Whether init_distributed() was called."""
    return _world is not None and dist.is_initialized()


def _init_torch(joined, backend, timeout, init_method, rank, size):
    if joined is not None and joined.size == 1 and init_method is None and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    if rank >= 0:
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, timeout=timeout)
        return
    dist.init_process_group(backend, init_method=init_method, timeout=timeout)


def init_distributed(dist_backend=None, auto_mpi_discovery=True, distributed_port=29500, verbose=True,
                     timeout=None, init_method=None, dist_init_required=None, config=None, rank=-1, world_size=-1):
    """Joins the ranks that the launcher's variables name, and initialises torch.distributed if nobody has. Collective.

    Without a launcher the world has one rank. `timeout` is a datetime.timedelta, 30 minutes if not given, and bounds every wait
    for a peer (TRIREME_TIMEOUT_S overrides it for engines). `dist_backend` is torch.distributed's, "gloo" if not given.

    Raises  ConfigError: launcher variables that are missing or contradict each other. CommTimeoutError: a peer that did not come.
    """
    # pylint: disable=global-statement,unused-argument
    global _world
    if _world is not None:
        return
    timeout = timeout or datetime.timedelta(minutes=30)
    if dist_init_required is False and not dist.is_initialized():
        raise RuntimeError("init_distributed: dist_init_required=False, but torch.distributed is not initialised; initialise it "
                           "first, or leave the argument out")
    _world = core.init(timeout.total_seconds())
    os.environ.setdefault("RANK", str(_world.rank))
    os.environ.setdefault("WORLD_SIZE", str(_world.size))
    os.environ.setdefault("LOCAL_RANK", str(_world.local_rank))
    if not dist.is_initialized():
        atexit.register(_leave_torch)
        _init_torch(_world, dist_backend or "gloo", timeout, init_method, rank, world_size)
    if verbose and _world.rank == 0:
        logger.info("comm: %d rank%s, shared memory", _world.size, "s" if _world.size > 1 else "")
    atexit.register(_leave)


def _leave_torch():
    # Who made it takes it down: a thread of Gloo that lets a tensor go while Python ends would abort the process.
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave():
    # While Python can still be called: the library's threads give back tensors that Python may know.
    global _world  # pylint: disable=global-statement
    for engine in list(engines):
        engine.release()
    if _world is not None:
        _world.close()
    _world = None
    core.clear_wait_hook()


def get_local_rank():
    """This process's rank on its host."""
    return world().local_rank
