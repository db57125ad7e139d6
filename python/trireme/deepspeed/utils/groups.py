"""The groups of ranks: neighbours share layers (tensor parallelism, slices of the program's own), groups of them
samples (sequence parallelism), the others are data parallel; in a pipeline they are those of its topology. Every other
kind has one rank."""
import torch.distributed as dist

from ..missing import names_of

__getattr__ = names_of(__name__, """
    _create_model_parallel _create_expert_and_data_parallel _create_expert_data_and_model_parallel _get_expert_parallel_group
    _get_expert_data_parallel_group _get_max_expert_size_name _get_max_expert_parallel_group _get_local_all_to_all_group
""")

mpu = mesh_device = None
_own_group = None
_sequence_size = _tensor_size = 1
_topology = None  # of a pipeline
_made = {}  # torch.distributed's groups, by their ranks


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


def set_degrees(sequence, tensor, topology=None):
    """The newest engine's: ranks that share samples, and that share layers; of a pipeline the ProcessTopology."""
    global _sequence_size, _tensor_size, _topology  # pylint: disable=global-statement
    _sequence_size, _tensor_size, _topology = sequence, tensor, topology


def _ranks_along(axis, rank):
    """The ranks along "tensor", "sequence", "data", or "shards" (the last two together). Ascending; `rank` is one of
    them."""
    if _topology is not None:
        name = "model" if axis == "tensor" else "data"
        of_axis = _topology.get_axis_comm_lists(name) if name in _topology.axes else []
        of_rank = next((ranks for ranks in of_axis if rank in ranks), [rank])
        if axis not in ("data", "sequence"):
            return of_rank
        place = of_rank.index(rank)  # neighbours share samples
        first = place - place % _sequence_size
        return of_rank[first:first + _sequence_size] if axis == "sequence" else of_rank[place % _sequence_size::_sequence_size]
    stride, size = {"tensor": (1, _tensor_size), "sequence": (_tensor_size, _sequence_size), "data": (_model_size(), _size() // _model_size()),
                    "shards": (_tensor_size, _size() // _tensor_size)}[axis]
    first = rank - rank // stride % size * stride
    return list(range(first, first + size * stride, stride))


def _model_size():
    """Ranks that together take one sample through all layers of a model without stages."""
    return _sequence_size * _tensor_size


def _size_along(axis):
    return len(_ranks_along(axis, _rank()))


def _place_along(axis):
    return _ranks_along(axis, _rank()).index(_rank())


def _group_along(axis):
    """As torch.distributed's group; collective when it is first asked for."""
    if len(_ranks_along(axis, 0)) == _size():
        return dist.group.WORLD
    if len(_ranks_along(axis, 0)) == 1:
        return _alone()
    all_ranks = tuple(sorted({tuple(_ranks_along(axis, rank)) for rank in range(_size())}))
    if all_ranks not in _made:
        groups = {ranks: dist.new_group(list(ranks)) for ranks in all_ranks}
        _made[all_ranks] = groups[tuple(_ranks_along(axis, _rank()))]
    return _made[all_ranks]


def get_data_parallel_group():
    """Ranks that take different samples, as torch.distributed's group. Collective when it is first called."""
    return _group_along("data")


def get_data_parallel_rank():
    """Place of this rank's samples."""
    return _place_along("data")


def get_data_parallel_world_size():
    """Groups of ranks that take different samples."""
    return _size_along("data")


def _get_data_parallel_group_ranks():
    return _ranks_along("data", _rank())


def _get_sequence_parallel_group():
    return _group_along("sequence")


def _get_sequence_parallel_rank():
    return _place_along("sequence")


def _get_sequence_parallel_world_size():
    return _size_along("sequence")


def _get_sequence_data_parallel_group():
    return _group_along("shards")


def _get_sequence_data_parallel_rank():
    return _place_along("shards")


def _get_sequence_data_parallel_world_size():
    return _size_along("shards")


def get_model_parallel_group():
    """Ranks that share layers, as torch.distributed's group. Collective when it is first called."""
    return _group_along("tensor")


def get_model_parallel_rank():
    """Place of this rank among those that share layers."""
    return _place_along("tensor")


def get_model_parallel_world_size():
    """Ranks that share each layer."""
    return _size_along("tensor")


def get_tensor_model_parallel_src_rank():
    """The first of the ranks that share layers with this one."""
    return _ranks_along("tensor", _rank())[0]


def _get_broadcast_src_rank():
    return _ranks_along("shards", _rank())[0]


def _one(*_, **__):
    return 1


def _zero():
    return 0


_get_data_parallel_group, _get_data_parallel_rank = get_data_parallel_group, get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
get_tensor_model_parallel_group = get_model_parallel_group
get_tensor_model_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_world_size = _get_model_parallel_world_size = get_model_parallel_world_size
_get_expert_parallel_rank = _zero
_get_expert_parallel_world_size = _get_expert_model_parallel_world_size = bwc_pipeline_parallel_world_size = _one


def bwc_tensor_model_parallel_world_size(mpu=None):
    """Ranks that share each layer, as an mpu tells; 1 without one."""
    for kind in ("tensor_model_parallel", "slice_parallel", "model_parallel"):
        getter = getattr(mpu, f"get_{kind}_world_size", None)
        if getter is not None:
            return getter()
    return 1
