"""Programs over two and three axes that take their place among ranks from deepspeed.utils.groups, and programs that mix
layers that they have cut with what cuts whole ones."""
import unittest

from harness import Case, main

_BEGIN = """
import torch, deepspeed
from megatron import Enter, Leave
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from deepspeed.utils import groups, safe_get_full_fp32_param
deepspeed.init_distributed()
RANK, WORLD, WIDTH, INNER, MICRO_BATCHES = dist.get_rank(), dist.get_world_size(), 6, 8, 4
SGD = {"type": "SGD", "params": {"lr": 0.1}}
PAIRS = [dist.new_group([first, first + 1]) for first in range(0, WORLD, 2)]


class Mpu:
    get_model_parallel_world_size = lambda self: 2
    get_model_parallel_rank = lambda self: RANK % 2
    get_model_parallel_group = lambda self: PAIRS[RANK // 2]


class Block(nn.Module):
    group = PAIRS[RANK // 2]

    def __init__(self, is_cut=False):
        super().__init__()
        inner = INNER // 2 if is_cut else INNER
        self.is_cut, self.fc1, self.fc2 = is_cut, nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH, bias=False)
        if is_cut:
            for parameter in self.parameters():
                parameter.tensor_model_parallel = True

    def forward(self, x):
        y = self.fc2(F.gelu(self.fc1(Enter.apply(x, Block.group) if self.is_cut else x)))
        return x + (Leave.apply(y, Block.group) if self.is_cut else y)


def cut(name, whole, place):
    dim = {"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1}.get(name.partition(".")[2])
    return whole if dim is None or place is None else whole.chunk(2, dim)[place]


def loss_of(outputs, labels):
    return F.mse_loss(outputs, labels)


def batch(number):
    values = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(number))
    return values[0], values[1]


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, WIDTH))


def fill(module, place):
    values = dict(plain().named_parameters())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(cut(name, values[name], place))
    return module


def expected():
    model = plain()
    loss = sum(loss_of(model(inputs), labels) for inputs, labels in map(batch, range(MICRO_BATCHES))) / MICRO_BATCHES
    loss.backward()
    return loss.detach(), {name: (p - 0.1 * p.grad).detach() for name, p in model.named_parameters()}


def config_of(data, stage=1, **more):
    return {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": MICRO_BATCHES // data, "optimizer": SGD, "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage}, **more}


def stages_of(topology, is_cut):
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(Block, is_cut), LayerSpec(Block, is_cut), LayerSpec(nn.Linear, WIDTH, WIDTH)]
    return PipelineModule(layers, topology=topology, loss_fn=loss_of, partition_method="uniform")


def sliced():
    return fill(nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(True), Block(True), nn.Linear(WIDTH, WIDTH)), RANK % 2)


# Trains the batches that groups say are this rank's.
def compare(engine, place):
    loss, weights = expected()
    data = groups.get_data_parallel_world_size()
    assert data == engine.dp_world_size and groups.get_data_parallel_rank() == engine.get_data_parallel_rank()
    assert engine.mp_world_size == groups.get_model_parallel_world_size() == (1 if place is None else 2)
    assert engine.get_model_parallel_rank() == groups.get_model_parallel_rank() == (place or 0)
    assert engine.seq_dp_world_size == data
    batches = map(batch, range(groups.get_data_parallel_rank(), MICRO_BATCHES, data))
    if isinstance(engine, deepspeed.PipelineEngine):
        total = engine.train_batch(batches)
    else:
        total = 0
        for inputs, labels in batches:
            each = loss_of(engine(inputs), labels)
            engine.backward(each)
            engine.step()
            total = total + each.detach() * data / MICRO_BATCHES
        dist.all_reduce(total, group=groups.get_data_parallel_group())
        total = total / data
    torch.testing.assert_close(total, loss, rtol=1e-5, atol=0)
    for name, parameter in engine.module.named_parameters():
        torch.testing.assert_close(safe_get_full_fp32_param(parameter), cut(name, weights[name], place), rtol=1e-5, atol=1e-6)
    engine.destroy()


def refusals(make):
    try:
        make()
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    of_ranks = [None] * WORLD
    dist.all_gather_object(of_ranks, said)
    return of_ranks
"""


class AxesOfUsers(Case):
    def run_program(self, body):
        """The value that it leaves in `result`, or None."""
        return self.on_ranks(4, _BEGIN + "result = None\n" + body, as_deepspeed=True)

    def test_groups_tell_whose_batches_the_stages_of_a_pipeline_take(self):
        self.run_program("""
for axes, dims in ((["pipe", "data"], [2, 2]), (["data", "pipe"], [2, 2]), (["pipe", "data"], [4, 1])):
    topology = ProcessTopology(axes, dims)
    module = fill(stages_of(topology, False), None)
    compare(deepspeed.initialize(model=module, config=config_of(topology.get_dim("data")))[0], None)
""")

    def test_groups_tell_whose_batches_ranks_take_that_have_the_slices_of_the_program(self):
        self.run_program("""
for stage in (0, 3):
    compare(deepspeed.initialize(model=sliced(), config=config_of(2, stage), mpu=Mpu())[0], RANK % 2)
assert groups.get_tensor_model_parallel_src_rank() == RANK // 2 * 2
compare(deepspeed.initialize(model=fill(plain(), None), config=config_of(4))[0], None)  # the groups are those of the newest engine
""")

    def test_an_axis_model_lies_anywhere_in_a_topology(self):
        self.run_program("""
for axes in (["pipe", "data", "model"], ["model", "pipe", "data"], ["pipe", "model", "data"], ["data", "model", "pipe"]):
    for data, stages in ((1, 2), (2, 1)):
        topology = ProcessTopology(axes, [{"pipe": stages, "data": data, "model": 2}[axis] for axis in axes])
        made = [(ranks, dist.new_group(ranks)) for ranks in topology.get_axis_comm_lists("model")]
        Block.group = next(group for ranks, group in made if RANK in ranks)
        place = topology.get_coord(RANK).model
        compare(deepspeed.initialize(model=fill(stages_of(topology, True), place), config=config_of(data, 2))[0], place)
""")

    def test_rules_that_would_cut_slices_once_more_are_refused(self):
        said = self.run_program("""
rules = {"autotp_size": 2, "partition_config": {"layer_specs": [{"patterns": [".*fc1.*"], "partition_type": "column"},
                                                                {"patterns": [".*fc2.*"], "partition_type": "row"}]}}
topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)


def of_stages():
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(Block), LayerSpec(Block, True), LayerSpec(nn.Linear, WIDTH, WIDTH)]
    return PipelineModule(layers, topology=topology, loss_fn=loss_of, partition_method="uniform")


result = [refusals(lambda: deepspeed.initialize(model=sliced(), config=config_of(2, tensor_parallel=rules))),
          refusals(lambda: deepspeed.initialize(model=sliced(), config=config_of(2, tensor_parallel=rules), mpu=Mpu())),
          refusals(lambda: deepspeed.initialize(model=of_stages(), config=config_of(1, tensor_parallel=rules)))]
""")
        for of_ranks, name in zip(said, ("1.fc1.weight", "1.fc1.weight", "2.fc1.weight")):
            for one in of_ranks:
                self.assertIn(f"ConfigError: tensor_parallel.autotp_size=2 cuts whole layers, and parameter '{name}' has tensor_model_parallel = True", one)
                self.assertIn("leave tensor_parallel out", one)

    def test_slices_of_the_program_are_not_given_for_the_whole(self):
        for one in self.run_program("""
engine, *_ = deepspeed.initialize(model=sliced(), config=config_of(2, 3), mpu=Mpu())
result = refusals(engine._zero3_consolidated_16bit_state_dict)
engine.destroy()
"""):
            self.assertIn("UnsupportedError: _zero3_consolidated_16bit_state_dict: the program has cut its layers itself", one)

    def test_an_mpu_that_does_not_fit_slices_of_the_program_is_told_what_fits(self):
        far, lacks = self.run_program("""
groups_of_far = [dist.new_group([0, 2]), dist.new_group([1, 3])]


class Far(Mpu):
    get_model_parallel_group = lambda self: groups_of_far[RANK % 2]


class Lacks:
    get_model_parallel_world_size = lambda self: 2


result = [refusals(lambda: deepspeed.initialize(model=sliced(), config=config_of(2), mpu=mpu())) for mpu in (Far, Lacks)]
""")
        for rank, one in enumerate(far):
            self.assertIn(f"rank {rank} is in the tensor group of ranks {[rank % 2, rank % 2 + 2]}; with an mpu of 2 ranks it is ranks", one)
        for one in lacks:
            self.assertIn("Lacks lacks a getter of the group or rank on its tensor axis; the program has cut its layers over that group: give it both", one)


if __name__ == "__main__":
    main()
