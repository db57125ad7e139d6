"""Which rank stands where: named axes, and the groups of ranks along them. Views of trireme::Topology."""
import collections

import torch.distributed as dist

from ...._native import core
from ....errors import ConfigError
from ... import comm
from ...missing import names_of

__getattr__ = names_of(__name__)


class ProcessTopology:
    """Ranks on named axes in row-major order: neighbours on the last axis are neighbouring ranks.

    axes  names; dims  as many sizes.
    Raises  ConfigError: an axis, a position on one or their number that does not fit. ShapeError: a rank that is not
            there.
    """

    def __init__(self, axes, dims):
        self.axes, self.dims = list(axes), list(dims)
        if len(self.axes) != len(self.dims):
            raise ConfigError(f"ProcessTopology: {len(self.axes)} axes {self.axes} and {len(self.dims)} dims {self.dims}; give each axis one")
        self.ranks = core.Topology(list(zip(self.axes, self.dims)))
        self.ProcessCoord = collections.namedtuple("ProcessCoord", self.axes)  # pylint: disable=invalid-name

    def __repr__(self):
        return f"{type(self).__name__}(axes={self.axes}, dims={self.dims})"

    def get_rank(self, **coord_kwargs):
        """The rank at a full coordinate: get_rank(pipe=0, data=1)."""
        return self.ranks.rank_of(list(coord_kwargs.items()))

    def get_axis_names(self):
        """Names of the axes, in order."""
        return list(self.axes)

    def get_rank_repr(self, rank, omit_axes=("data", "pipe"), inner_sep="_", outer_sep="-"):
        """Where `rank` stands, for names of files: "a_01-b_01"."""
        places = zip(self.axes, self.get_coord(rank))
        return outer_sep.join(f"{axis}{inner_sep}{position:02d}" for axis, position in places if axis not in omit_axes)

    def get_dim(self, axis):
        """The number of ranks along an axis."""
        self.ranks.check_axis(axis)
        return self.ranks.size_of(axis)

    def get_coord(self, rank):
        """Where `rank` stands, as a namedtuple: ProcessCoord(pipe=0, data=1)."""
        return self.ProcessCoord(*self.ranks.coordinate_of(rank))

    def get_axis_comm_lists(self, axis):
        """Lists of the ranks that differ in their position on `axis` alone."""
        self.ranks.check_axis(axis)
        return self.ranks.groups_along(axis)

    def filter_match(self, **filter_kwargs):
        """The ranks at all of these positions, ascending: filter_match(pipe=0, data=1)."""
        return self.ranks.ranks_at(list(filter_kwargs.items()))

    def get_axis_list(self, axis, idx):
        """The ranks at position `idx` of an axis, ascending."""
        return self.ranks.ranks_at([(axis, idx)])

    def world_size(self):
        """The number of ranks."""
        return self.ranks.size


class PipeDataParallelTopology(ProcessTopology):
    """Pipelines, each over neighbouring groups of data-parallel ranks."""

    def __init__(self, num_pp, num_dp):
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """The same, with the slices of a layer on neighbouring ranks."""

    def __init__(self, num_pp, num_mp, num_dp):
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def _nearly_square(size):
    """Two factors of `size`: its prime factors in turn."""
    factors, turn, prime = [1, 1], 0, 2
    while size > 1:
        if size % prime:
            prime += 1
            continue
        factors[turn] *= prime
        size //= prime
        turn = 1 - turn
    return factors


class PipelineParallelGrid:
    """This rank's place in a topology, as Megatron's `mpu`: which stage, which copy, and its groups of ranks.

    topology  of all ranks; None: pipelines and copies, as near to a square as the number of ranks allows.

    Groups are of torch.distributed; each is made by the first call that asks for it, collectively over its own ranks.
    Raises  ConfigError: a topology of another number of ranks.
    """

    # pylint: disable=too-many-instance-attributes

    def __init__(self, topology=None, process_group=None):  # pylint: disable=unused-argument
        world = comm.world()
        self.global_rank, self.world_size = world.rank, world.size
        self._topo = topology or PipeDataParallelTopology(*_nearly_square(self.world_size))
        ranks = self._topo.ranks
        if ranks.size != self.world_size:
            raise ConfigError(f"PipelineParallelGrid: {self._topo} has {ranks.size} ranks, the job {self.world_size}; their dims must "
                              f"multiply to {self.world_size}")
        self.data_parallel_size, self.pipe_parallel_size, self.model_parallel_size = map(ranks.size_of, ("data", "pipe", "model"))
        self.slice_parallel_size = self.model_parallel_size
        self.stage_id = ranks.position_of(self.global_rank, "pipe")
        self.data_parallel_id = ranks.position_of(self.global_rank, "data")
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == self.pipe_parallel_size - 1
        self.dp_group, self.pp_group, self.slice_group = (ranks.group_of(self.global_rank, axis) for axis in ("data", "pipe", "model"))
        self.dp_groups, self.pipe_groups = ranks.groups_along("data"), ranks.groups_along("pipe")
        self._model = ranks.ranks_at([("data", self.data_parallel_id)]) if "data" in self._topo.axes else list(range(self.world_size))
        self.ds_model_rank, self.ds_model_world_size = self._model.index(self.global_rank), len(self._model)
        pipelines = [ranks.group_of(rank, "pipe") for rank in range(self.world_size)]
        self.p2p_groups = [[rank, pipe[(pipe.index(rank) + 1) % len(pipe)]] for rank, pipe in enumerate(pipelines)]
        self._groups = {}

    def group_of(self, ranks):
        """torch.distributed's group of some ranks, this one among them. Collective over them when first called."""
        key = tuple(ranks)
        if key not in self._groups:
            is_world = len(key) == self.world_size
            self._groups[key] = dist.group.WORLD if is_world else dist.new_group(ranks, use_local_synchronization=True)
        return self._groups[key]

    def stage_to_global(self, stage_id, **kwargs):
        """The rank of another stage of this pipeline; further positions replace this rank's own."""
        place = self._topo.get_coord(self.global_rank)._asdict()
        return self._topo.get_rank(**{**place, "pipe": stage_id, **kwargs})

    def topology(self):
        """The ProcessTopology."""
        return self._topo

    def get_global_rank(self):
        """This rank in the job."""
        return self.global_rank

    def get_stage_id(self):
        """This rank's stage."""
        return self.stage_id

    def get_data_parallel_id(self):
        """Which copy of the model this rank belongs to."""
        return self.data_parallel_id

    def get_pipe_parallel_rank(self):
        """This rank's stage."""
        return self.stage_id

    def get_pipe_parallel_world_size(self):
        """The number of stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self):
        """The stages of this rank's pipeline."""
        return self.group_of(self.pp_group)

    def get_data_parallel_rank(self):
        """Which copy of the model this rank belongs to."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self):
        """The number of copies."""
        return self.data_parallel_size

    def get_data_parallel_group(self):
        """The ranks that have the same part of the model."""
        return self.group_of(self.dp_group)

    def get_model_parallel_rank(self):
        """This rank among those that share one copy of the model, of all stages and slices."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self):
        """How many ranks share one copy of the model."""
        return self.ds_model_world_size

    def get_model_parallel_group(self):
        """The ranks that share one copy of the model."""
        return self.group_of(self._model)

    def get_slice_parallel_rank(self):
        """This rank among the slices of its layers; 0 without the axis "model"."""
        return self._topo.ranks.position_of(self.global_rank, "model")

    def get_slice_parallel_world_size(self):
        """The number of slices of each layer."""
        return self.slice_parallel_size

    def get_slice_parallel_group(self):
        """The slices of this rank's layers."""
        return self.group_of(self.slice_group)
