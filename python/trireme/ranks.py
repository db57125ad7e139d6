"""The ranks of the job: Trireme's own world, beside torch.distributed, and the engines that use it."""
import atexit
import ctypes
import datetime
import os
import secrets
import socket
import sys
import time
import urllib.parse
import weakref

import torch
import torch.distributed as dist

from ._native import core

TIMEOUT = datetime.timedelta(minutes=30)  # of a wait for a peer
_world = None
engines = weakref.WeakSet()  # those that use the world


def living():
    """The engines that may still train."""
    return [engine for engine in engines if not engine.is_spent]


def world():
    """The world that join() has joined; joins it if nobody has yet. Collective then."""
    if _world is None:
        join()
    return _world


def is_joined():
    """Whether there is a world."""
    return _world is not None


def join(backend="gloo", timeout=TIMEOUT, *, init_method=None, rank=-1, size=-1):
    """Joins the ranks that torch.distributed or the launcher's variables name, and initialises torch.distributed if
    nobody has, by `backend`, `init_method`, `rank` and `size`. Nothing where there is a world already. Collective.

    Raises  ConfigError: launcher variables that are missing or contradict each other. CommTimeoutError: a peer that did
            not come.
    """
    global _world  # pylint: disable=global-statement
    if _world is not None:
        return
    if not dist.is_initialized():
        made = []
        atexit.register(_leave_torch, os.getpid(), made)
        _init_torch(backend, timeout, init_method, rank, size)
        _world = _join(backend, timeout)
        made.append(weakref.ref(dist.distributed_c10d._get_default_group()))  # pylint: disable=protected-access
    else:
        atexit.register(_let_go, os.getpid())
        _world = _join(backend, timeout)
    os.environ.setdefault("RANK", str(_world.rank))
    os.environ.setdefault("WORLD_SIZE", str(_world.size))
    os.environ.setdefault("LOCAL_RANK", str(_world.local_rank))
    atexit.register(_leave, os.getpid())


def _init_torch(backend, timeout, init_method, rank, size):
    """Initialises torch.distributed; whether it could, by what the arguments and the environment say of the ranks."""
    variables = {}
    if rank >= 0 and size > 0:
        variables = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    elif core.environment("RANK") is None or not (core.environment("MASTER_ADDR") or init_method):
        return False
    where = urllib.parse.urlparse(init_method or "env://")
    if where.scheme == "tcp" and where.hostname and where.port and not where.query:
        variables.update(MASTER_ADDR=where.hostname, MASTER_PORT=str(where.port))
    elif where.scheme != "env" or where.query or backend == "mpi":
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout, init_method=init_method)
        return True
    # torch.distributed would wait without a word, and its store would listen on all addresses of the host.
    met = core.await_ranks(timeout.total_seconds(), variables)
    store = dist.HashStore()
    if met.host:
        store = dist.PrefixStore(met.path + "torch",
                                 dist.TCPStore(met.host, met.port, met.size, met.serves, timeout, wait_for_workers=False,
                                               multi_tenant=True))
    dist.init_process_group(backend, store=store, rank=met.rank, world_size=met.size, timeout=timeout)
    return True


def _store_of_host(made, timeout):
    """A store for the ranks of this host, at a port of the loopback address alone; only they know what its keys begin
    with. Collective."""
    words = torch.zeros(3, dtype=torch.int64)  # the port and a secret
    store = None
    if made.rank == 0:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            words[0] = listener.getsockname()[1]
            store = dist.TCPStore("127.0.0.1", int(words[0]), made.size, True, timeout, wait_for_workers=False,
                                  master_listen_fd=listener.detach())
        words[1:] = torch.tensor([secrets.randbits(63), secrets.randbits(63)])
    made.broadcast(words, 0)
    store = store or dist.TCPStore("127.0.0.1", int(words[0]), made.size, False, timeout)
    return dist.PrefixStore(f"trireme/{int(words[1]):016x}{int(words[2]):016x}", store)


def _join(backend, timeout):
    """The world, over what torch.distributed has; where it has nothing, over what mpirun or srun say, or alone."""
    seconds = timeout.total_seconds()
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()  # pylint: disable=protected-access
        group = dist.distributed_c10d._get_default_group()  # pylint: disable=protected-access
        return core.join(store, group, dist.get_rank(), dist.get_world_size(), seconds)
    made = core.init(seconds)
    # For programs that ask torch.distributed.
    store = dist.HashStore() if made.size == 1 else _store_of_host(made, timeout)
    dist.init_process_group(backend, store=store, rank=made.rank, world_size=made.size, timeout=timeout)
    return made


# A process that was forked from a rank and ends by sys.exit() calls these as well, but it is no rank: the rank goes on.


def _let_go(process):
    # Threads of groups that the program has made and leaves standing get a moment to let go of the last call's tensors.
    if process == os.getpid() and dist.is_initialized():
        time.sleep(0.2)


def _leave_torch(process, groups):
    # The process that made it takes it down: a thread of Gloo that lets a tensor go while Python ends would abort the
    # process. `groups`: weak references to what join() has made; the program may have taken it down itself.
    if process == os.getpid():
        if dist.is_initialized():
            groups += [weakref.ref(group) for group in dist.distributed_c10d._world.pg_map]  # pylint: disable=protected-access
            dist.destroy_process_group()
        if any(group() is not None for group in groups):
            # A DeviceMesh, say, still names one, which keeps its threads: they get a moment to let go of the last
            # call's tensors.
            time.sleep(0.2)
        return
    if not dist.is_initialized():
        return
    # The destructors of process groups and stores wait for their threads, which a fork does not copy.
    for group, (_, store) in dist.distributed_c10d._world.pg_map.items():  # pylint: disable=protected-access
        for kept in (group, store):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _leave(process):
    # While Python can still be called: the library's threads give back tensors that Python may know.
    global _world  # pylint: disable=global-statement
    if process != os.getpid():
        return
    saved = [engine.release() for engine in list(engines)]
    if _world is not None:
        _world.close()
    _world = None
    core.clear_wait_hook()
    if not all(saved):
        # Nothing else that is called here can make the exit status say so.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
