"""Messages of a program's own between the stages of a pipeline, over torch.distributed, beside those of an engine.

A program calls them in pairs and in one order on both stages, outside of train_batch(). Ranks are those of this rank's
pipeline.
"""
import torch.distributed as dist

from ....errors import ConfigError, UnsupportedError
from ...missing import names_of

__getattr__ = names_of(__name__)

_grids, _requests = [], []  # of the last init_process_groups(); of messages that were begun


def can_send_recv():
    """True: torch.distributed sends messages between two ranks."""
    return True


def init_process_groups(grid):
    """`grid`, a PipelineParallelGrid, says which rank has which stage. Raises ConfigError: it has one stage."""
    if grid.pipe_parallel_size < 2:
        raise ConfigError("p2p.init_process_groups: the grid has one stage, which has nobody to send to; give it 2 or more")
    _grids[:] = [grid]


def _rank_of(call, stage):
    """The rank that has `stage`. Raises ConfigError: there is no grid, no such stage, or it is this rank's own."""
    if not _grids:
        raise ConfigError(f"p2p.{call}: no grid says which rank has which stage; call p2p.init_process_groups(engine.grid) before")
    own, count = _grids[0].get_stage_id(), _grids[0].pipe_parallel_size
    if not 0 <= stage < count or stage == own:
        raise ConfigError(f"p2p.{call}: stage {stage}, and this rank has stage {own} of {count}; name another stage")
    return _grids[0].stage_to_global(stage)


def send(tensor, dest_stage, async_op=False):
    """Sends `tensor` to a stage, which calls recv(); with async_op it returns at once, and wait() waits."""
    rank = _rank_of("send", dest_stage)
    if async_op:
        _requests.append((dist.isend(tensor, rank), tensor))
        return None
    return dist.send(tensor, rank)


def recv(tensor, src_stage, async_op=False):
    """Fills `tensor`, of the shape and dtype that was sent, from a stage; with async_op it is filled after wait()."""
    rank = _rank_of("recv", src_stage)
    if async_op:
        _requests.append((dist.irecv(tensor, rank), tensor))
        return None
    return dist.recv(tensor, rank)


def wait():
    """Waits for all messages with async_op."""
    while _requests:
        _requests.pop(0)[0].wait()


def send_obj(msg, dest):
    """Refused: objects between ranks travel as pickles, which run what they say."""
    raise UnsupportedError("p2p.send_obj: Trireme sends no pickled objects; use torch.distributed.send_object_list([msg], dest)")


def recv_obj(sender):
    """As send_obj()."""
    raise UnsupportedError("p2p.recv_obj: Trireme reads no pickled objects; use torch.distributed.recv_object_list([None], sender)")
