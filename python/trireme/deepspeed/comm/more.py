"""Functions of DeepSpeed's comm that torch.distributed does not have."""
import torch.distributed as dist

from ..accelerator import get_accelerator


def _yes():
    """True: torch.distributed has it."""
    return True


has_all_gather_into_tensor = has_reduce_scatter_tensor = has_all_reduce_coalesced = has_coalescing_manager = _yes


def allgather_fn(output_tensor, input_tensor, group=None, async_op=False, debug=None):
    """torch.distributed's all_gather_into_tensor()."""
    # pylint: disable=unused-argument
    return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def reduce_scatter_fn(output_tensor, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False, prof=False, debug=None):
    """torch.distributed's reduce_scatter_tensor()."""
    # pylint: disable=unused-argument,too-many-arguments
    return dist.reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op)


def inference_all_reduce(tensor, op=dist.ReduceOp.SUM, group=None):
    """Reduces in place, and returns the tensor."""
    dist.all_reduce(tensor, op=op, group=group)
    return tensor


class _All:
    """A handle of several operations."""

    def __init__(self, handles):
        self._handles = handles

    def wait(self):
        """Until all are done."""
        for handle in self._handles:
            handle.wait()

    def is_completed(self):
        """Whether all are."""
        return all(handle.is_completed() for handle in self._handles)


def all_gather_coalesced(output_tensors, input_tensors, group=None, async_op=False):
    """all_gather_into_tensor() of each pair; returns a handle if async_op."""
    done = _All([dist.all_gather_into_tensor(output, tensor, group=group, async_op=True)
                 for output, tensor in zip(output_tensors, input_tensors, strict=True)])
    if async_op:
        return done
    return done.wait()


def get_world_group():
    """The group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group=None):
    """The global ranks of a group, of all ranks without one."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def get_global_rank(group=None, group_rank=0):
    """The global rank of a rank in a group; without one the rank itself."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def initialize_mesh_device(mesh_shape, mesh_dim_names):
    """torch.distributed's DeviceMesh of all ranks. Collective."""
    return dist.device_mesh.init_device_mesh(get_accelerator().device_name(), tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def set_backend():
    """Nothing: the backend is torch.distributed's."""


def init_deepspeed_backend(ds_backend, timeout=None, init_method=None):
    """Nothing: init_distributed() joins the ranks."""
