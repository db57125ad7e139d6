"""Amazon SageMaker's model-parallel names on the library: `import trireme.smp as smp`."""
from .config import init, state
from .messages import barrier, dp_barrier, mp_barrier
from .model import DistributedModel
from .optimizer import DistributedOptimizer
from .outputs import StepOutput
from .partition import partition, set_partition
from .ranks import (dp_rank, dp_size, get_dp_group, get_mp_group, get_pp_group, get_rdp_group, get_tp_group, is_initialized, local_rank, local_size, mp_rank,
                    mp_size, pp_rank, pp_size, rank, rdp_rank, rdp_size, size, tp_rank, tp_size)
from .step import step
from .trace import is_tracing

__all__ = ["DistributedModel", "DistributedOptimizer", "StepOutput", "barrier", "dp_barrier", "dp_rank", "dp_size", "get_dp_group", "get_mp_group", "get_pp_group",
           "get_rdp_group", "get_tp_group", "init", "is_initialized", "is_tracing", "local_rank", "local_size", "mp_barrier", "mp_rank", "mp_size", "partition",
           "pp_rank", "pp_size", "rank", "rdp_rank", "rdp_size", "set_partition", "size", "state", "step", "tp_rank", "tp_size"]
