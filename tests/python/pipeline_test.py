"""Topologies, schedules and layers of pipelines: DeepSpeed's documented examples, formulas and errors."""
import re
import xml.dom.minidom

import torch
import trireme
from harness import Case, main
from pipeline_ranks import AllForwardsFirst
from trireme import pipe
from trireme.errors import ConfigError, PipelineSpecError, ShapeError, UnsupportedError
from trireme.runtime.pipe import ProcessTopology, schedule as schedules
from trireme.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, PipelineParallelGrid


class Topologies(Case):
    def test_documented_examples(self):
        grid = ProcessTopology(axes=["x", "y"], dims=[2, 3])
        self.assertEqual(grid.get_rank(x=0, y=1), 1)
        self.assertEqual(grid.get_axis_names(), ["x", "y"])
        self.assertEqual(grid.get_dim("y"), 3)
        self.assertEqual((grid.get_coord(rank=1).x, grid.get_coord(rank=1).y), (0, 1))
        self.assertEqual(grid.get_axis_list(axis="x", idx=0), [0, 1, 2])
        self.assertEqual(grid.get_axis_list(axis="y", idx=0), [0, 3])
        self.assertEqual(grid.world_size(), 6)
        square = ProcessTopology(axes=["a", "b"], dims=[2, 2])
        self.assertEqual(square.get_rank_repr(rank=3), "a_01-b_01")
        self.assertEqual(square.get_rank_repr(rank=3, omit_axes=["a"]), "b_01")
        self.assertEqual(square.get_rank_repr(3, inner_sep=":", outer_sep="/"), "a:01/b:01")
        cube = ProcessTopology(axes=["pipe", "data", "model"], dims=[2, 2, 2])
        self.assertEqual(cube.get_rank_repr(5), "model_01")
        self.assertEqual(cube.get_axis_comm_lists("pipe"), [[0, 4], [1, 5], [2, 6], [3, 7]])
        self.assertEqual(cube.filter_match(pipe=0, data=1), [2, 3])
        self.assertEqual(repr([cube.get_coord(rank) for rank in cube.filter_match(pipe=0, data=1)]),
                         "[ProcessCoord(pipe=0, data=1, model=0), ProcessCoord(pipe=0, data=1, model=1)]")

    def test_orders_of_the_axes_that_have_names(self):
        topology = PipeDataParallelTopology(num_pp=2, num_dp=3)
        self.assertEqual((topology.get_axis_names(), topology.dims), (["pipe", "data"], [2, 3]))
        topology = PipeModelDataParallelTopology(num_pp=2, num_mp=3, num_dp=4)
        self.assertEqual((topology.get_axis_names(), topology.dims), (["pipe", "data", "model"], [2, 4, 3]))
        self.assertEqual(repr(topology), "PipeModelDataParallelTopology(axes=['pipe', 'data', 'model'], dims=[2, 4, 3])")

    def test_what_is_not_there_is_named(self):
        grid = ProcessTopology(axes=["pipe", "data"], dims=[2, 3])
        for use, text in ((lambda: grid.get_rank(pipe=2, data=0), 'position 2 on axis "pipe"; expected 0 to 1'),
                          (lambda: grid.get_rank(pipe=0), 'the coordinate lacks the axis "data"; give its position'),
                          (lambda: grid.get_dim("model"), 'the topology has no axis "model".'),
                          (lambda: grid.get_axis_comm_lists("pip"), 'the topology has no axis "pip". Did you mean `pipe`?'),
                          (lambda: grid.filter_match(data=-1), 'position -1 on axis "data"; expected 0 to 2'),
                          (lambda: grid.get_axis_list("pipe", 5), 'position 5 on axis "pipe"; expected 0 to 1'),
                          (lambda: ProcessTopology(["a"], [0]), 'the axis "a" has size 0; expected 1 or more'),
                          (lambda: ProcessTopology(["a"], []), "ProcessTopology: 1 axes ['a'] and 0 dims []; give each axis one")):
            with self.assertRaises(ConfigError) as caught:
                use()
            self.assertEqual(str(caught.exception), text)
        for rank in (6, -1):
            with self.assertRaisesRegex(ShapeError, f"rank {rank} is not in the topology; expected 0 to 5"):
                grid.get_coord(rank)

    def test_a_grid_knows_this_ranks_place_and_groups(self):
        found = self.on_ranks(4, _GATHER + """
import trireme as deepspeed
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
deepspeed.init_distributed()
rank = dist.get_rank()
def seen(grid):
    sums = []
    for group in (grid.get_pipe_parallel_group(), grid.get_data_parallel_group(), grid.get_model_parallel_group(), grid.get_slice_parallel_group()):
        ranks = torch.tensor([1 << rank])
        dist.all_reduce(ranks, group=group)
        sums.append(ranks.item())
    return [grid.get_global_rank(), grid.get_stage_id(), grid.get_data_parallel_id(), grid.get_pipe_parallel_rank(),
            grid.get_pipe_parallel_world_size(), grid.get_data_parallel_rank(), grid.get_data_parallel_world_size(),
            grid.get_model_parallel_rank(), grid.get_model_parallel_world_size(), grid.get_slice_parallel_rank(),
            grid.get_slice_parallel_world_size(), grid.is_first_stage, grid.is_last_stage, sums, grid.p2p_groups,
            grid.stage_to_global(0), grid.dp_groups, grid.pipe_groups]
square = PipelineParallelGrid()
sliced = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))
result = everybodys([seen(square), seen(sliced), str(square.topology())])
""", as_deepspeed=True)
        for rank, (square, sliced, topology) in enumerate(found):
            stage, copy = divmod(rank, 2)
            pipe_ranks, data_ranks = 0b0101 << copy, 0b11 << 2 * stage
            self.assertEqual(square, [rank, stage, copy, stage, 2, copy, 2, stage, 2, 0, 1, stage == 0, stage == 1,
                                      [pipe_ranks, data_ranks, pipe_ranks, 1 << rank], [[0, 2], [1, 3], [2, 0], [3, 1]], copy,
                                      [[0, 1], [2, 3]], [[0, 2], [1, 3]]])
            self.assertEqual(sliced, [rank, stage, 0, stage, 2, 0, 1, rank, 4, copy, 2, stage == 0, stage == 1,
                                      [pipe_ranks, 1 << rank, 0b1111, data_ranks], [[0, 2], [1, 3], [2, 0], [3, 1]], copy,
                                      [[0], [1], [2], [3]], [[0, 2], [1, 3]]])
            self.assertEqual(topology, "PipeDataParallelTopology(axes=['pipe', 'data'], dims=[2, 2])")

    def test_a_grid_of_another_number_of_ranks_is_refused(self):
        with self.assertRaisesRegex(ConfigError, "has 4 ranks, the job 1; their dims must multiply to 1"):
            PipelineParallelGrid(PipeDataParallelTopology(2, 2))


def train_steps(micro_batches, stages, stage):
    """The instructions of TrainSchedule, from its documented formulas."""
    def even(number):
        return number % 2 == 0

    def turn(t):
        if even(t) == even(stage):
            return True, (t // 2 if even(t) else (t - 1) // 2) - stage // 2
        return False, t // 2 - stages + (stage + 1) // 2 if even(t) else (t - 1) // 2 - stages + 1 + stage // 2

    def valid(micro_batch):
        return 0 <= micro_batch < micro_batches

    buffers = max(2, min(stages - stage, micro_batches))
    before = -1
    for t in range(2 * (micro_batches + stages - 1)):
        forward, now = turn(t)
        names = []
        if forward:
            names += [("SendGrad", before)] * (valid(before) and stage > 0) + [("RecvActivation", now)] * (valid(now) and stage > 0)
        else:
            names += [("RecvGrad", now)] * (valid(now) and stage < stages - 1) + [("SendActivation", before)] * (valid(before) and stage < stages - 1)
        if valid(now):
            names += [("LoadMicroBatch", now)] * (forward and stage in (0, stages - 1)) + [("ForwardPass" if forward else "BackwardPass", now)]
        step = [f"{name}(buffer_id={micro_batch % buffers})" for name, micro_batch in names]
        if t == 2 * (micro_batches + stages - 1) - 1:
            step += ["ReduceTiedGrads()", "ReduceGrads()", "OptimizerStep()"]
        yield step
        before = now


def inference_steps(micro_batches, stages, stage):
    """The instructions of InferenceSchedule, from its documented formulas."""
    for t in range(micro_batches + stages - 1):
        now = t - stage
        received, sent = (t % 2, (t + 1) % 2) if stage % 2 == 0 else ((t + 1) % 2, t % 2)
        is_now, is_before = 0 <= now < micro_batches, 0 <= now - 1 < micro_batches
        step = [f"LoadMicroBatch(buffer_id={received})"] * (stage in (0, stages - 1) and is_now)
        send = [f"SendActivation(buffer_id={sent})"] * (stage < stages - 1 and is_before)
        receive = [f"RecvActivation(buffer_id={received})"] * (stage > 0 and is_now)
        yield step + (send + receive if stage % 2 == 0 else receive + send) + [f"ForwardPass(buffer_id={received})"] * is_now


class Schedules(Case):
    def test_streams_are_those_of_the_formulas(self):
        for stages in range(1, 9):
            for micro_batches in range(1, 17):
                for stage in range(stages):
                    train = schedules.TrainSchedule(micro_batches, stages, stage)
                    self.assertEqual([list(map(repr, step)) for step in train], list(train_steps(micro_batches, stages, stage)))
                    self.assertEqual(train.num_pipe_buffers(), max(2, min(stages - stage, micro_batches)))
                    inference = schedules.InferenceSchedule(micro_batches=micro_batches, stages=stages, stage_id=stage)
                    self.assertEqual([list(map(repr, step)) for step in inference.steps()], list(inference_steps(micro_batches, stages, stage)))
                    self.assertEqual(inference.num_pipe_buffers(), 2)

    def test_data_parallel_is_the_documented_example(self):
        class Documented(schedules.PipeSchedule):
            def steps(self):
                for step_id in range(self.micro_batches):
                    cmds = [schedules.LoadMicroBatch(buffer_id=0), schedules.ForwardPass(buffer_id=0), schedules.BackwardPass(buffer_id=0)]
                    if step_id == self.micro_batches - 1:
                        cmds.extend([schedules.ReduceGrads(), schedules.OptimizerStep()])
                    yield cmds

            def num_pipe_buffers(self):
                return 1

        for stage in range(2):
            found = schedules.DataParallelSchedule(3, 2, stage)
            self.assertEqual(repr(list(found)), repr(list(Documented(3, 2, stage))))
            self.assertEqual(found.num_pipe_buffers(), 1)
        whole = Documented.of_all_stages(3, 1)
        whole.check()
        self.assertEqual(whole.streams, schedules.DataParallelSchedule.of_all_stages(3, 1).streams)

    def test_members_of_schedules_and_instructions(self):
        schedule = schedules.TrainSchedule(micro_batches=8, stages=4, stage_id=3)
        self.assertEqual((schedule.stage, schedule.num_stages, schedule.num_micro_batches, schedule.is_first_stage, schedule.is_last_stage),
                         (3, 4, 8, False, True))
        instruction = schedules.RecvGrad(2, layer="x")
        self.assertEqual((instruction.buffer_id, instruction.layer, instruction.name, repr(instruction)),
                         (2, "x", "RecvGrad", "RecvGrad(buffer_id=2, layer='x')"))
        self.assertIsInstance(instruction, schedules.BufferOpInstruction)
        self.assertEqual(repr(schedules.PipeInstruction(a=1)), "PipeInstruction(a=1)")
        with self.assertRaises(TypeError):
            schedules.PipeSchedule(1, 1, 0)  # steps() is abstract  # pylint: disable=abstract-class-instantiated
        with self.assertRaisesRegex(ConfigError, "TrainSchedule: stage_id=4; with 4 stages use 0 to 3"):
            schedules.TrainSchedule(8, 4, 4)
        with self.assertRaisesRegex(ConfigError, "TrainSchedule: micro_batches=0; use 1 or more"):
            schedules.TrainSchedule(0, 4, 0)

    def test_a_subclass_becomes_a_schedule_that_is_checked_and_simulated(self):
        for stages, micro_batches in ((1, 1), (2, 5), (4, 8)):
            own, published = AllForwardsFirst.of_all_stages(micro_batches, stages), pipe.make_schedule("gpipe", stages, micro_batches)
            own.check(barriers=True)
            self.assertEqual((own.name, own.streams, own.buffers), ("AllForwardsFirst", published.streams, published.buffers))
            self.assertEqual(schedules.TrainSchedule.of_all_stages(micro_batches, stages).streams,
                             pipe.make_schedule("1f1b", stages, micro_batches).streams)
            self.assertAlmostEqual(own.simulate().bubble_share, (stages - 1) / (micro_batches + stages - 1))

    def test_a_subclass_that_cannot_be_executed_is_refused_by_its_instruction(self):
        class Deaf(AllForwardsFirst):
            def steps(self):
                for step in super().steps():
                    yield [each for each in step if not isinstance(each, schedules.RecvGrad)]

        with self.assertRaisesRegex(ConfigError, r"'Deaf': stage 1's SendGrad\(micro_batch=0, .*\) is received by nobody; let stage 0"):
            Deaf.of_all_stages(2, 2).check()

        class Foreign(AllForwardsFirst):
            def steps(self):
                yield [schedules.PipeInstruction(a=1)]

        with self.assertRaisesRegex(ConfigError, r"PipeInstruction\(a=1\) is no instruction of a pipeline; derive its class from one of"):
            Foreign.of_all_stages(2, 2)

        class Timed(schedules.ForwardPass):
            pass

        class Derived(AllForwardsFirst):
            def steps(self):
                for step in super().steps():
                    yield [Timed(each.buffer_id) if isinstance(each, schedules.ForwardPass) else each for each in step]

        Derived.of_all_stages(2, 2).check()

    def test_published_schedules_by_name(self):
        self.assertEqual(pipe.schedule_names(), ["1f1b", "inference", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
        for name in pipe.schedule_names():
            schedule = pipe.make_schedule(name, stages=4, micro_batches=8, chunks=2)
            schedule.check()
            timeline = schedule.simulate(forward=1, backward_input=1, backward_weight=1, message=0.25)
            self.assertEqual((schedule.name, schedule.stages, schedule.micro_batches, len(schedule.streams), len(timeline.slots)),
                             (name, 4, 8, 4, 4))
            self.assertLess(0, timeline.bubble_share)
            self.assertEqual(max(end for slots in timeline.slots for _, _, end in slots), timeline.makespan)
            drawing = xml.dom.minidom.parseString(timeline.svg(name))
            self.assertEqual(len(drawing.getElementsByTagName("rect")), sum(map(len, timeline.slots)))
        first = pipe.make_schedule("interleaved", 2, 2, 2).streams[1][0][0]
        self.assertEqual((first.name, first.chunk, first.micro_batch, first.buffer, first.peer), ("RecvActivation", 0, 0, 0, 0))
        self.assertEqual(pipe.make_schedule("1f1b", 2, 2).simulate(backward_input=0.5, backward_weight=0.5).text(),
                         "stage 0  0   1   .   0'  .   1'\nstage 1  .   0   0'  1   1'  .\n")
        with self.assertRaisesRegex(ConfigError, "'1f2b' is no schedule; use one of 1f1b, "):
            pipe.make_schedule("1f2b", 2, 2)

    def test_computations_of_ones_own(self):
        order = [[("ForwardPass", 0, 0), ("ForwardPass", 1, 0), ("BackwardInput", 1, 0), ("BackwardInput", 0, 0), ("BackwardWeight", 0, 0),
                  ("BackwardWeight", 1, 0)]] * 2
        schedule = pipe.assemble("mine", 1, order, chunks=2, placement="v")
        schedule.check()
        self.assertEqual(schedule.simulate().makespan, 10)
        sends = [each.chunk for stream in schedule.streams for step in stream for each in step if each.name == "SendActivation"]
        self.assertEqual(sends, [0, 1])  # the second stage has the middle of the V
        with self.assertRaisesRegex(ConfigError, "stage 0 computes chunk 0 of micro-batch 0 0 times forward"):
            pipe.assemble("mine", 1, [[]])
        with self.assertRaisesRegex(ConfigError, "placement='w'; use \"loop\" or \"v\""):
            pipe.assemble("mine", 1, [[]], placement="w")
        with self.assertRaisesRegex(ConfigError, "'Forward' is no instruction; use one of LoadMicroBatch, "):
            pipe.assemble("mine", 1, [[("Forward", 0, 0)]])


# everybodys(value): that of each rank, by rank.
_GATHER = """
import json, os, torch, torch.distributed as dist
def everybodys(value):
    path = f"{folder}/rank"
    with open(f"{path}{dist.get_rank()}", "w") as file: json.dump(value, file)
    dist.barrier()
    every = [json.load(open(f"{path}{rank}")) for rank in range(dist.get_world_size())]
    dist.barrier()
    return every
"""
_LAYERS = _GATHER + """
import torch, torch.distributed as dist, trireme as deepspeed
from torch import nn
from deepspeed.pipe import PipelineModule, LayerSpec, TiedLayerSpec
deepspeed.init_distributed()
def raised(function):
    try:
        function()
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__] + [str(error)]
"""


class Modules(Case):
    def on(self, ranks, text):
        """As on_ranks(), for a program that begins with _LAYERS."""
        return self.on_ranks(ranks, _LAYERS + text, as_deepspeed=True)

    def test_a_stage_has_its_own_layers_under_the_names_of_the_whole_model(self):
        found = self.on(4, """
built = []
class Counted(nn.Linear):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        if self.weight.device.type != "meta": built.append(self.in_features)
layers = [LayerSpec(Counted, 2, 3, bias=False), torch.tanh, LayerSpec(Counted, 3, 4), lambda x: 2 * x, nn.ReLU(), LayerSpec(Counted, 4, 2)]
module = PipelineModule(layers, num_stages=2, partition_method="uniform")
result = everybodys([built, sorted(module.state_dict()), module.partitions(), module.stage_id, module.num_pipeline_stages(),
                     [module.stage_owner(layer) for layer in range(6)], module.mpu().get_data_parallel_world_size(), str(module.topology()),
                     module.ckpt_prefix("run", "tag"), module.ckpt_layer_path("run", 1), repr(layers[0]),
                     [type(each).__name__ for each in module.forward_funcs]])
""")
        for rank, (built, names, parts, stage, stages, owners, copies, topology, prefix, layer, spec, functions) in enumerate(found):
            self.assertEqual((parts, stage, stages, owners, copies), ([0, 3, 6], rank // 2, 2, [0, 0, 0, 1, 1, 1], 2))
            self.assertEqual((built, names), ([2, 3], ["0.weight", "2.bias", "2.weight"]) if stage == 0 else ([4], ["5.bias", "5.weight"]))
            self.assertEqual(topology, "PipeDataParallelTopology(axes=['pipe', 'data'], dims=[2, 2])")
            self.assertEqual((prefix, layer), (f"run/tag/module-pipe_0{stage}", f"run/layer_0{3 * stage + 1}-model_states.pt"))
            self.assertEqual(spec, "Counted(2, 3, bias=False)")
            self.assertEqual(functions, ["Counted", "builtin_function_or_method", "Counted"] if stage == 0 else ["function", "ReLU", "Counted"])

    def test_partitions_by_parameters_and_type(self):
        found = self.on(2, """
layers = [LayerSpec(nn.Linear, 10, 10), nn.Linear(1, 1), nn.Tanh(), LayerSpec(nn.Linear, 1, 1), abs]
parts = lambda **options: PipelineModule(layers, num_stages=2, **options).partitions()
before = torch.get_rng_state()
PipelineModule([LayerSpec(nn.Linear, 10, 10)] * 2, num_stages=2)
one = torch.get_rng_state()
torch.set_rng_state(before)
nn.Linear(10, 10)
is_same = torch.equal(torch.get_rng_state(), one)
result = [parts(), parts(partition_method="type:linear"), parts(partition_method="TYPE:^(tanh|ABS)$"), is_same]
""")
        self.assertEqual(found, [[0, 1, 5], [0, 3, 5], [0, 4, 5], True])

    def test_a_profile_measures_times_and_memory_and_the_partition_follows(self):  # by a clock of calls
        found = self.on(2, """
import trireme.deepspeed.runtime.pipe.module as of_layers
class Clock:
    calls = 0
    def perf_counter(self): return self.calls
of_layers.time = clock = Clock()
class Linear(nn.Linear):
    def forward(self, inputs):
        clock.calls += 1
        return super().forward(inputs)
class Slow(Linear):
    def forward(self, inputs):
        for _ in range(60): inputs = super().forward(inputs)
        return inputs
layers = [LayerSpec(Linear, 64, 64)] * 6 + [LayerSpec(Slow, 64, 64)] + [LayerSpec(Linear, 64, 64)]
before = torch.get_rng_state()
module = PipelineModule(layers, num_stages=2, partition_method="profile", profile_input=torch.ones(32, 64))
profiles = module.layer_profiles
PipelineModule._bytes_of_a_rank = staticmethod(lambda: 100)
refused = raised(lambda: PipelineModule(layers, num_stages=2, partition_method="profile", profile_input=torch.ones(32, 64)))
result = everybodys([module.partitions(), [each.parameter_bytes for each in profiles], profiles[1].activation_bytes,
                     profiles[6].activation_bytes > 50 * profiles[1].activation_bytes, [each.seconds for each in profiles], refused[0], refused[-1],
                     raised(lambda: PipelineModule(layers, num_stages=2, partition_method="profile"))[-1],
                     raised(lambda: PipelineModule(layers, num_stages=2, partition_method="profile", profile_input=torch.ones(1, 3)))[-1]])
""")
        self.assertEqual(found[0][:-1], found[1][:-1])
        self.assertIn("failed on rank 0, which says why", found[1][-1])
        parts, parameters, activations, holds_more, seconds, kind, limit, missing, wrong = found[0]
        self.assertEqual(parts, [0, 6, 8])
        self.assertEqual(parameters, [4 * (64 * 64 + 64)] * 8)
        self.assertEqual(activations, 4 * 32 * 64)  # the layer's input
        self.assertTrue(holds_more)
        self.assertEqual(seconds, [1] * 6 + [60, 1])
        self.assertEqual(kind, "PipelineSpecError")
        self.assertRegex(limit, "no partition over 2 stages stays within 100 bytes; the least for which there is one is [0-9]+")
        self.assertIn("give profile_input=, what the first layer takes", missing)
        self.assertIn("layer 0, Linear, failed on profile_input: ", wrong)

    def test_tied_layers_share_a_module_under_the_name_of_the_first(self):
        found = self.on(4, """
def head(embedding, hidden): return hidden @ embedding.weight.t()
def layers(): return [TiedLayerSpec("word", nn.Embedding, 5, 4), nn.Tanh(), LayerSpec(nn.Linear, 4, 4), TiedLayerSpec("word", nn.Embedding, 5, 4, forward_fn=head)]
torch.manual_seed(dist.get_rank())
module = PipelineModule(layers(), num_stages=2, partition_method="uniform")
names, tied = sorted(module.state_dict()), module.tied_parameters()
weight = module.tied_modules["word"].weight
first = weight.sum().item()
weight.grad = torch.full_like(weight, 1.0 + module.stage_id) if module.stage_id else None
module.allreduce_tied_weight_gradients()
whole = PipelineModule(layers(), topology=deepspeed.runtime.pipe.topology.PipeDataParallelTopology(1, 4))
result = everybodys([names, tied, first, weight.grad.unique().tolist(), sorted(whole.state_dict()), list(whole(torch.arange(3)).shape), whole.tied_parameters(),
                     raised(lambda: PipelineModule([TiedLayerSpec("a", nn.Linear, 1, 1, tied_weight_attr=["wieght"])] * 2, num_stages=2))])
""")
        for rank, (names, tied, first, gradient, whole, shape, nothing, refused) in enumerate(found):
            self.assertEqual(names, ["0.weight"] if rank < 2 else ["0.weight", "2.bias", "2.weight"])
            self.assertEqual((tied, first, gradient), ({"0.weight": [0, 1]}, found[rank % 2][2], [2.0]))
            self.assertEqual((whole, shape, nothing), (["0.weight", "2.bias", "2.weight"], [3, 5], {}))
            self.assertEqual(refused[0], "PipelineSpecError")
            self.assertIn("its module has no parameter 'wieght'; name one of its own in tied_weight_attr", refused[-1])
        self.assertNotEqual(found[0][2], found[1][2])

    def test_seeded_layers_are_the_same_at_any_number_of_stages(self):
        text = """
def layers(): return [LayerSpec(nn.Linear, 4, 4), nn.Dropout(0.5), LayerSpec(nn.Linear, 4, 4), nn.Dropout(0.5)]
torch.manual_seed(dist.get_rank())
module = PipelineModule(layers(), num_stages=dist.get_world_size(), seed_layers=True, base_seed=7, partition_method="uniform")
weights = {name: value.sum().item() for name, value in module.state_dict().items()}
outputs = torch.ones(2, 4)
for stage in range(dist.get_world_size()):
    if stage == module.stage_id: outputs = module(outputs)
    dist.broadcast(outputs.detach(), stage)
    outputs = outputs.detach()
merged = {}
for each in everybodys(weights): merged.update(each)
seeds = []
PipelineModule(layers(), num_stages=dist.get_world_size(), seed_layers=True, base_seed=7, seed_fn=seeds.append, partition_method="uniform")
result = [merged, outputs.tolist(), sum(everybodys(seeds), [])]
"""
        one, two = self.on(1, text), self.on(2, text)
        self.assertEqual(one, two)
        self.assertEqual(one[2], [7, 8, 9, 10])
        self.assertIn(0.0, sum(one[1], []))

    def test_recomputed_layers_give_the_same_and_only_those_that_may_be(self):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 4), torch.nn.Tanh(), lambda pair: (pair, 2 * pair), lambda pair: pair[0] * pair[1], torch.nn.Linear(4, 1)]
        inputs = torch.ones(3, 4)
        asked = []

        def watched(function, *inputs):
            asked.append(len(inputs))
            return trireme.checkpointing.checkpoint(function, *inputs)

        def gradients(**options):
            for parameter in (*layers[0].parameters(), *layers[4].parameters()):
                parameter.grad = None
            module = pipe.PipelineModule(layers, num_stages=1, activation_checkpoint_func=watched, **options)
            module(inputs).sum().backward()
            return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])

        expected = gradients()
        self.assertEqual(asked, [])
        for interval, calls in ((1, [1, 1]), (2, [1, 1]), (3, [1, 2]), (10, [1])):
            asked.clear()
            self.assertTrue(torch.equal(gradients(activation_checkpoint_interval=interval), expected))
            self.assertEqual(asked, calls, interval)
        asked.clear()
        self.assertTrue(torch.equal(gradients(activation_checkpoint_interval=1, checkpointable_layers=["Tanh"]), expected))
        self.assertEqual(asked, [1])

    def test_inputs_and_outputs_are_any_nesting(self):
        module = pipe.PipelineModule([lambda inputs: {"a": [inputs[0] + 1], "b": inputs[1]}, lambda inputs: inputs["a"][0] * inputs["b"]], num_stages=1,
                                     partition_method="uniform", loss_fn=torch.nn.functional.mse_loss)
        self.assertEqual(module((torch.ones(2), 3)).tolist(), [6, 6])
        self.assertEqual((module.get_additional_losses(), module.loss_fn(torch.ones(1), torch.zeros(1)).item()), (None, 1))

    def test_files_of_layers_are_found_by_their_prefix(self):
        topology = PipeModelDataParallelTopology(num_pp=1, num_mp=1, num_dp=1)
        module = pipe.PipelineModule(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Tanh()), topology=topology)
        paths = [self.folder / f"layer_{layer:02d}-model_0{part}-model_states.pt" for layer, part in ((0, 0), (1, 1), (1, 0))]
        for path in paths:
            path.touch()
        self.assertEqual(module.ckpt_layer_path(self.folder, 1), str(paths[2]))
        self.assertEqual(module.ckpt_layer_path_list(self.folder, 1), [str(paths[2]), str(paths[1])])
        self.assertEqual(module.ckpt_prefix(self.folder, 3), f"{self.folder}/3/module-pipe_00-model_00")

    def test_what_makes_no_pipeline_is_refused(self):
        linear = torch.nn.Linear(1, 1)
        for make, kind, text in (
                (lambda: pipe.PipelineModule([linear]), PipelineSpecError, "must provide num_stages or topology"),
                (lambda: pipe.PipelineModule([linear], num_stages=2), PipelineSpecError, r"num_stages \(2\) must divide distributed world size \(1\)"),
                (lambda: pipe.PipelineModule([linear], num_stages=1, partition_method="type:Conv"), PipelineSpecError,
                 'no layer\'s class matches "type:Conv"; the classes are Linear'),
                (lambda: pipe.PipelineModule([linear], num_stages=1, partition_method="magic"), UnsupportedError, "partition_method='magic'; use"),
                (lambda: pipe.PipelineModule([pipe.PipelineModule([linear], num_stages=1)], num_stages=1), UnsupportedError, "is a PipelineModule itself"),
                (lambda: pipe.PipelineModule([3], num_stages=1), PipelineSpecError, "the layer 3 cannot be called"),
                (lambda: pipe.PipelineModule([linear], num_stages=1, checkpointable_layers="Linear"), ConfigError, "give a list of names of classes"),
                (lambda: pipe.LayerSpec(abs), PipelineSpecError, "is no class of modules; give one derived from torch.nn.Module"),
                (lambda: pipe.PipelineModule([linear], num_stages=1).stage_owner(1), ConfigError, "layer 1; there are layers 0 to 0"),
                (lambda: pipe.PipelineModule([linear], num_stages=1).set_checkpoint_interval(-1), ConfigError, "-1; use 0")):
            with self.assertRaisesRegex(kind, text):
                make()
        self.assertTrue(issubclass(PipelineSpecError, RuntimeError))
        found = self.on(2, """
shared = nn.Linear(1, 1)
result = raised(lambda: PipelineModule([shared, nn.Tanh(), shared], num_stages=2, partition_method="uniform"))[-1]
""")
        self.assertEqual(found, "PipelineModule: layers 0 and 2 share a parameter, on stages 0 and 1; use TiedLayerSpec")

    def test_building_says_so_where_it_is_asked_to(self):
        with self.assertLogs(trireme.logger, "INFO") as told:
            pipe.LayerSpec(torch.nn.Linear, 2, out_features=3).build(log=True)
        self.assertTrue(any(re.search(r"building Linear\(2, out_features=3\)", line) for line in told.output))


if __name__ == "__main__":
    main()
