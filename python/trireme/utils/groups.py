"""The groups of ranks: all of them are data parallel, every other kind of parallelism has one rank."""
import torch.distributed as dist

from ..missing import names_of

__getattr__ = names_of(__name__, """
    _create_model_parallel _create_expert_and_data_parallel _create_expert_data_and_model_parallel _get_expert_parallel_group
    _get_expert_data_parallel_group _get_max_expert_size_name _get_max_expert_parallel_group _get_local_all_to_all_group
""")

mpu = mesh_device = None
_own_group = None


def initialize(ep_size=1, mpu=None):  # pylint: disable=redefined-outer-name
    """Accepts what is: no experts over ranks, no model parallelism. Raises NotImplementedError: others."""
    if ep_size != 1 or mpu is not None:
        raise NotImplementedError("groups.initialize(ep_size, mpu): expert and model parallelism are not there yet")


def _rank():
    return dist.get_rank() if dist.is_initialized() else 0


def _size():
    return dist.get_world_size() if dist.is_initialized() else 1


def _alone():
    """The group of this rank alone; collective when it is first asked for."""
    global _own_group  # pylint: disable=global-statement
    if _own_group is None:
        made = [dist.new_group([rank]) for rank in range(_size())]
        _own_group = made[_rank()]
    return _own_group


def get_data_parallel_group():
    """All ranks, as torch.distributed's group."""
    return dist.group.WORLD


def get_data_parallel_rank():
    """This rank."""
    return _rank()


def get_data_parallel_world_size():
    """The number of ranks."""
    return _size()


def _get_data_parallel_group_ranks():
    return list(range(_size()))


def get_model_parallel_group():
    """This rank alone. Collective when it is first called."""
    return _alone()


def get_model_parallel_rank():
    """0."""
    return 0


def get_model_parallel_world_size():
    """1."""
    return 1


def get_tensor_model_parallel_src_rank():
    """This rank."""
    return _rank()


def _get_broadcast_src_rank():
    return 0


_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
get_tensor_model_parallel_group = _get_sequence_parallel_group = get_model_parallel_group
get_tensor_model_parallel_rank = _get_sequence_parallel_rank = _get_expert_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_world_size = _get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_world_size = _get_expert_parallel_world_size = get_model_parallel_world_size
_get_expert_model_parallel_world_size = get_model_parallel_world_size
bwc_tensor_model_parallel_world_size = bwc_pipeline_parallel_world_size = lambda mpu=None: 1
