"""Numbers of this rank under smp's names. `rdp`: ranks that have the same parameters; `dp`: ranks that take different
samples, which those along the tensor axis do, too; `mp`: ranks that have one copy of the model together. So
mp · rdp = pp · dp = size.
"""
from .config import state


def is_initialized():
    """Whether smp.init() has been called."""
    return state.is_initialized


def rank():
    """This rank's number in the world."""
    return state.world.rank


def size():
    """The number of ranks."""
    return state.world.size


def local_rank():
    """This rank's number on its host."""
    return state.world.local_rank


def local_size():
    """The number of ranks of this host."""
    return state.world.local_size


def pp_rank():
    """This rank's stage."""
    return state.place["pipe"]


def pp_size():
    """The number of stages."""
    return state.topology.size_of("pipe")


def tp_rank():
    """This rank's slice of layers."""
    return state.place["tensor"]


def tp_size():
    """The number of slices of a layer."""
    return state.topology.size_of("tensor")


def rdp_rank():
    """This rank's place among those that have the same parameters."""
    return state.place["data"]


def rdp_size():
    """The number of ranks that have the same parameters."""
    return state.topology.size_of("data")


def get_pp_group():
    """The ranks of the stages, in ascending order."""
    return state.topology.group_of(rank(), "pipe")


def get_tp_group():
    """The ranks that have slices of the same layers."""
    return state.topology.group_of(rank(), "tensor")


def get_rdp_group():
    """The ranks that have the same parameters."""
    return state.topology.group_of(rank(), "data")


def get_mp_group():
    """The ranks that have one copy of the model together."""
    return state.topology.ranks_at([("data", rdp_rank())])


def get_dp_group():
    """The ranks of this stage, which take different samples."""
    return state.topology.ranks_at([("pipe", pp_rank())])


def get_whole_group():
    """The ranks that have all tensors of the model together, and of its optimizer: those of a copy, or all where copies
    share them."""
    return list(range(size())) if state.cfg.zero_stage else get_mp_group()


def mp_rank():
    """This rank's place among those that have one copy of the model."""
    return get_mp_group().index(rank())


def mp_size():
    """The number of ranks that have one copy of the model."""
    return len(get_mp_group())


def dp_rank():
    """This rank's place among those of its stage."""
    return get_dp_group().index(rank())


def dp_size():
    """The number of ranks of a stage."""
    return len(get_dp_group())
