"""Amazon SageMaker's model-parallel names on the library: `import trireme.smp as smp`.

So far: the configuration, ranks, cuts of inputs and outputs, and the partition of a model over stages.
"""
from .config import init, state
from .outputs import StepOutput
from .partition import partition, set_partition
from .ranks import (dp_rank, dp_size, get_dp_group, get_mp_group, get_pp_group, get_rdp_group, get_tp_group, is_initialized, local_rank, local_size, mp_rank,
                    mp_size, pp_rank, pp_size, rank, rdp_rank, rdp_size, size, tp_rank, tp_size)
from .trace import is_tracing

__all__ = ["StepOutput", "dp_rank", "dp_size", "get_dp_group", "get_mp_group", "get_pp_group", "get_rdp_group", "get_tp_group", "init", "is_initialized",
           "is_tracing", "local_rank", "local_size", "mp_rank", "mp_size", "partition", "pp_rank", "pp_size", "rank", "rdp_rank", "rdp_size", "set_partition",
           "size", "state", "tp_rank", "tp_size"]
