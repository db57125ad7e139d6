"""Amazon SageMaker's model-parallel names on the library: `import trireme.smp as smp`."""
from . import amp, nn, optimizers
from .checkpoints import get_full_state_dict_from_sharded_data_parallel_checkpoint, resume_from_checkpoint, save_checkpoint
from .checkpointing import checkpoint, checkpoint_sequential, set_activation_checkpointing
from .config import state
from .delayed import delay_param_initialization, model_creation
from .files import load, save
from .messages import (DP_GROUP, MP_GROUP, PP_GROUP, RDP_GROUP, TP_GROUP, WORLD, CommGroup, RankType, allgather, barrier, broadcast, dp_barrier,
                       get_dp_process_group, get_mp_process_group, get_pp_process_group, get_rdp_process_group, get_tp_process_group, get_world_process_group, mp_barrier,
                       recv_from, send)
from .model import DistributedModel
from .nn.registry import set_tensor_parallelism, tensor_parallelism, tp_register, tp_register_with_module
from .optimizer import DistributedOptimizer
from .outputs import StepOutput
from .partition import partition, register_parameter, set_partition
from .ranks import (dp_rank, dp_size, get_dp_group, get_mp_group, get_pp_group, get_rdp_group, get_tp_group, is_initialized, local_rank, local_size, mp_rank,
                    mp_size, pp_rank, pp_size, rank, rdp_rank, rdp_size, size, tp_rank, tp_size)
from .start import init
from .step import step
from .trace import is_tracing

__all__ = ["CommGroup", "DP_GROUP", "DistributedModel", "DistributedOptimizer", "MP_GROUP", "PP_GROUP", "RDP_GROUP", "RankType", "StepOutput", "TP_GROUP",
           "WORLD", "allgather", "amp", "barrier", "broadcast", "checkpoint", "checkpoint_sequential", "delay_param_initialization", "dp_barrier", "dp_rank",
           "dp_size", "get_dp_group", "get_dp_process_group", "get_full_state_dict_from_sharded_data_parallel_checkpoint", "get_mp_group",
           "get_mp_process_group", "get_pp_group", "get_pp_process_group", "get_rdp_group", "get_rdp_process_group", "get_tp_group", "get_tp_process_group",
           "get_world_process_group", "init", "is_initialized", "is_tracing", "load", "local_rank", "local_size", "model_creation", "mp_barrier", "mp_rank",
           "mp_size", "nn", "optimizers", "partition", "pp_rank", "pp_size", "rank", "rdp_rank", "rdp_size", "recv_from", "register_parameter",
           "resume_from_checkpoint", "save", "save_checkpoint", "send", "set_activation_checkpointing", "set_partition", "set_tensor_parallelism", "size",
           "state", "step", "tensor_parallelism", "tp_rank", "tp_register", "tp_register_with_module", "tp_size"]
