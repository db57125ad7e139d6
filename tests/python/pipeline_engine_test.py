"""Engines of pipelines: the same bits as without stages, DeepSpeed's methods, checkpoints, and what is left when a
stage ends."""
import json
import pathlib
import tempfile
import unittest

import harness
from harness import Case, RankServer, main

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import

_RANKS = pathlib.Path(__file__).with_name("pipeline_ranks.py")


class SameBits(unittest.TestCase):
    """pipeline_ranks.py on 1, 2 and 4 ranks. `outcomes` are by case and (ranks, layout)."""

    @classmethod
    def setUpClass(cls):
        cls.outcomes = {}
        with tempfile.TemporaryDirectory() as folder:
            for ranks in (1, 2, 4):
                status, out, err = RankServer.run(ranks, [_RANKS, folder])
                if status:
                    raise AssertionError(f"exit status {status}\n{out[-6000:]}\n{err[-6000:]}")
                for name, by_layout in json.loads(out.splitlines()[-1]).items():
                    cls.outcomes.setdefault(name, {}).update({(ranks, layout): outcome for layout, outcome in by_layout.items()})

    def assert_stages_change_nothing(self, names):
        for name in names:
            found = self.outcomes[name]
            for whole, staged in (((1, "whole"), (2, "2")), ((1, "whole"), (4, "4")), ((2, "whole"), (4, "2"))):
                with self.subTest(case=name, ranks=staged[0], stages=staged[1]):
                    self.assertEqual(found[staged], found[whole])

    def names(self, beginning):
        return [name for name in self.outcomes if name.startswith(beginning)]

    def test_at_every_zero_stage(self):
        self.assertEqual(len(self.names("ZeRO")), 5)
        self.assert_stages_change_nothing(self.names("ZeRO"))

    def test_with_tied_weights_under_deterministic(self):
        self.assertEqual(len(self.names("tied")), 4)
        self.assert_stages_change_nothing(self.names("tied"))

    def test_in_16_bits(self):
        self.assert_stages_change_nothing(("bf16", "fp16"))

    def test_with_layers_that_are_computed_again(self):
        self.assert_stages_change_nothing(("recomputed",))
        self.assertEqual(self.outcomes["recomputed"], self.outcomes["ZeRO 3"])

    def test_under_other_schedules_and_one_of_the_programs_own(self):
        self.assert_stages_change_nothing(("gpipe", "zb-h1", "own schedule"))

    def test_with_several_parts_of_the_model_on_each_stage(self):
        self.assert_stages_change_nothing(("interleaved", "dualpipe-v", "zb-v"))

    def test_with_parameter_groups_optimizers_and_schedulers_of_the_program(self):
        names = ("parameter groups", "client optimizer", "scheduler")
        self.assert_stages_change_nothing(names)
        losses = [self.outcomes[name][4, "4"]["losses"][-1] for name in (*names, "ZeRO 2")]
        self.assertEqual(len(set(losses)), len(losses), losses)

    def test_from_checkpoints_of_another_number_of_stages(self):
        self.assert_stages_change_nothing(self.names("resumed"))
        for resumed, whole in (("resumed", "ZeRO 2"), ("resumed, tied", "tied, ZeRO 3")):
            for layout in ((1, "whole"), (2, "2"), (4, "4")):
                one, other = self.outcomes[resumed][layout], self.outcomes[whole][layout]
                self.assertEqual((one["losses"], one["weights"]), (other["losses"][2:], other["weights"]), layout)


_BEGIN = """
import collections, json, torch, trireme as deepspeed
from torch import nn
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.errors import DataError
deepspeed.init_distributed()
def make(layers=None, loss_fn=nn.functional.mse_loss, **options):
    torch.manual_seed(0)
    layers = layers or [LayerSpec(nn.Linear, 3, 3, bias=False), LayerSpec(nn.Linear, 3, 3, bias=False)]
    net = deepspeed.PipelineModule(layers, num_stages=2, loss_fn=loss_fn, seed_layers=True, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "optimizer": {"type": "Adam"}}
    return deepspeed.initialize(model=net, config=config, **options)
def batches(count, rows=2):
    for number in range(count):
        yield torch.full((rows, 3), number + 1.0), torch.zeros(rows, 3)
def raised(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
"""


# The value that each rank leaves in told[name] is that test's.
_METHODS = _BEGIN + """
told = {}
engine, *_ = make()
two_chunks = lambda stages, micro_batches: deepspeed.pipe.make_schedule("interleaved", stages, micro_batches, 2)
told["refused"] = [[raised(call) for call in (lambda: engine(torch.ones(2, 3)), lambda: engine.backward(torch.ones(())), lambda: engine.step(),
                                              lambda: engine.optimizer.step(), lambda: engine.no_sync())],
                   raised(lambda: engine.train_batch()), raised(lambda: engine.train_batch([1])), raised(lambda: engine.set_schedule(two_chunks)),
                   raised(lambda: engine.set_schedule("1f2b")), raised(lambda: engine.set_schedule(3)),
                   raised(lambda: engine.eval_batch(iter([]), reduce_output="sum"))]
told["place"] = [isinstance(engine.optimizer, torch.optim.Optimizer), engine.is_first_stage(), engine.is_last_stage(), engine.grid.get_stage_id(),
                 engine.num_stages, engine.micro_batches, engine.dp_world_size, engine.train_batch_size(), type(engine).__name__,
                 isinstance(engine, deepspeed.DeepSpeedEngine)]

data = list(zip(torch.arange(15.0).reshape(5, 3), torch.zeros(5, 3)))
engine, _, loader, _ = make(training_data=data)
engine.set_batch_fn(lambda batch: (2 * batch[0], batch[1]))
again = [engine.train_batch().item() for _ in range(3)]  # 6 micro-batches of 2 from 5 samples, the last of which is dropped
engine.set_batch_fn(None)
other = raised(lambda: engine.train_batch(iter([torch.ones(2, 3)] * 2)))
engine.set_dataloader([{"x": torch.ones(2, 3), "y": torch.zeros(2, 3)}] * 2)
engine.set_batch_fn(lambda batch: (batch["x"], batch["y"]))
dicts = engine.train_batch().item()
engine.set_batch_fn(None)
before = [p.clone() for p in engine.module.parameters()]
ended = raised(lambda: engine.train_batch(batches(1)))
def broken():
    yield next(batches(1))
    if engine.is_first_stage(): raise KeyError("lost")
    yield next(batches(1))
failed = raised(lambda: engine.train_batch(broken()))
is_unchanged = all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters()))
engine.train_batch(batches(2))
told["batches"] = [len(loader), len(set(again)), other, ended, failed, is_unchanged, dicts]

engine, *_ = make(loss_fn=lambda outputs, labels: (outputs - labels).abs().sum())
plain = lambda value: value.tolist() if isinstance(value, torch.Tensor) else [plain(each) for each in value] if isinstance(value, (list, tuple)) else value
told["evaluation"] = [plain(engine.eval_batch(batches(4), **options)) for options in (
    {}, {"bcast_loss": False}, {"num_micro_batches": 1}, {"reduce_output": None}, {"return_logits": True}, {"compute_loss": False},
    {"compute_loss": False, "reduce_output": None})]
engine.set_dataiterator(batches(2))
engine.eval_batch(batches(2))
engine.train_batch()  # its own data are still there

engine, *_ = make()
engine.train_batch(batches(2))
engine.reset_activation_shape()
wide = engine.train_batch(batches(2, rows=5)).item()
odd, *_ = make([LayerSpec(nn.Linear, 3, 3), lambda x: collections.OrderedDict(a=x), lambda x: x["a"], LayerSpec(nn.Linear, 3, 3)])
told["shapes"] = [wide, raised(lambda: odd.train_batch(batches(2)))]  # the last one: no message passes any more
with open(f"{folder}/{deepspeed.comm.world().rank}", "w") as file: json.dump(told, file)
"""


class Methods(Case):
    """DeepSpeed's methods of an engine of two stages: one run of _METHODS for all tests."""

    told = None  # by rank

    def of_ranks(self, name):
        if Methods.told is None:
            script = self.write("methods.py", f"folder = {str(self.folder)!r}" + _METHODS)
            status, out, err = RankServer.run(2, [script], as_deepspeed=True)
            self.assertEqual(status, 0, out + err)
            Methods.told = [json.loads((self.folder / str(rank)).read_text()) for rank in (0, 1)]
        return [told[name] for told in Methods.told]

    def test_what_only_train_batch_does_is_refused(self):
        for refusals, none, no_iterator, chunks, unknown, number, reduction in self.of_ranks("refused"):
            for error, text in refusals:
                self.assertEqual((error, text.partition(": ")[2]), ("PipelineError", "Only train_batch() is accessible in pipeline mode."))
            self.assertIn("there are no batches; pass data_iter, or training_data= to initialize(), or call set_dataloader()", none[1])
            self.assertEqual(no_iterator, ["ConfigError", "set_dataiterator: list is no iterator; pass iter() of it"])
            self.assertIn("it needs as many chunks, placed alike", chunks[1])
            self.assertIn("'1f2b' is no schedule; use one of 1f1b", unknown[1])
            self.assertIn("3 is no schedule; use a name", number[1])
            self.assertEqual(reduction, ["UnsupportedError", "eval_batch: reduce_output='sum' is not there; use \"avg\" or None"])

    def test_an_engine_knows_its_place(self):
        for rank, found in enumerate(self.of_ranks("place")):
            self.assertEqual(found, [True, rank == 0, rank == 1, rank, 2, 2, 1, 4, "PipelineEngine", True])

    def test_batches_come_from_wherever_the_program_has_them(self):
        for rank, (micro_batches, losses, other, ended, failed, is_unchanged, dicts) in enumerate(self.of_ranks("batches")):
            self.assertEqual((micro_batches, losses, is_unchanged), (2, 3, True))
            self.assertIn("a batch is a Tensor; expected (inputs, labels), which set_batch_fn() can make of it", other[1])
            self.assertEqual(ended[0], "DataError")
            self.assertIn("the data ended after 1 of 2 micro-batches", ended[1])
            self.assertEqual(failed[0], "KeyError" if rank == 0 else "DataError")
            self.assertIn("lost", failed[1])
            self.assertGreater(dicts, 0)

    def test_an_evaluation_has_every_argument_of_deepspeeds(self):
        first, last = self.of_ranks("evaluation")
        mean, alone, one, each, logits, outputs, every = last
        self.assertEqual(first, [mean, None, one, None, [mean, None], None, None])
        self.assertEqual((alone, one, logits), (mean, each[0], [mean, every[1]]))
        self.assert_close([mean], [sum(each) / 2], 1e-6)
        self.assert_close(every[1][0], [2 * value for value in every[0][0]])
        self.assert_close(outputs[0], [(a + b) / 2 for a, b in zip(every[0][0], every[1][0])])

    def test_shapes_change_when_the_program_says_so_and_foreign_values_are_refused(self):
        (wide, refused), (other_wide, ended) = self.of_ranks("shapes")
        self.assertEqual(wide, other_wide)
        self.assertEqual(refused, ["ShapeError", "a value between layers is a OrderedDict; hand on tensors, None, numbers, texts, and tuples, lists or "
                                                 "dictionaries of these. This engine is spent: make a new one with initialize(), and load a "
                                                 "checkpoint"])
        self.assertEqual(ended[0], "PeerLostError")
        self.assertIn("train_batch failed in stage 0, ForwardPass, micro-batch 0: a value between layers is a OrderedDict", ended[1])


# The value that each rank leaves in told[name] is that test's.
_SEAMS = _BEGIN + """
import numpy, time
from torch.utils import checkpoint
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.pipe.schedule import PipeSchedule, OptimizerStep, LoadMicroBatch, TrainSchedule
told = {}
def trained(module, plain, steps=2, micro_batches=2):
    # the largest difference of losses and this stage's weights from plain PyTorch, after some steps
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": micro_batches, "gradient_clipping": 0.0,
              "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=module, config=config)
    parameters = [p for layer in plain if isinstance(layer, nn.Module) for p in layer.parameters()]
    optimizer, worst = torch.optim.SGD(parameters, lr=0.1), 0.0
    for _ in range(steps):
        loss, total = engine.train_batch(batches(micro_batches)).item(), 0.0
        for inputs, labels in batches(micro_batches):
            for layer in plain: inputs = layer(inputs)
            part = nn.functional.mse_loss(inputs, labels) / micro_batches
            part.backward()
            total += part.item()
        optimizer.step()
        optimizer.zero_grad()
        worst = max(worst, abs(loss - total))
    names = {f"{i}.{name}": p for i, layer in enumerate(plain) if isinstance(layer, nn.Module) for name, p in layer.named_parameters()}
    for name, parameter in module.named_parameters():
        worst = max(worst, (parameter - names[name]).abs().max().item())
    return worst, engine
def linear(layer):
    torch.manual_seed(1234 + layer)
    return nn.Linear(3, 3)
def pipeline(layers, **options):
    return PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, seed_layers=True, partition_method="uniform", **options)

# Two pipelines whose second stages have no parameters, and a module beside them.
layers = [LayerSpec(nn.Linear, 3, 3), nn.Tanh()]
first = trained(pipeline(layers), [linear(0), nn.Tanh()])
second = trained(pipeline(layers), [linear(0), nn.Tanh()])
other, *_ = deepspeed.initialize(model=nn.Linear(1, 1), config={"train_batch_size": 2, "optimizer": {"type": "SGD"}})
first[1].train_batch(batches(2)), second[1].train_batch(batches(2))
again = first[1].module
deepspeed.initialize(model=again, config={"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}})
told["without parameters"] = [first[0], second[0], first[1].is_spent, second[1].is_spent]

reentrant = lambda function, *inputs: checkpoint.checkpoint(function, *inputs, use_reentrant=True)
told["in place"] = [trained(pipeline([LayerSpec(nn.Linear, 3, 3), lambda x: x, nn.LeakyReLU(inplace=True), LayerSpec(nn.Linear, 3, 3)], schedule=schedule,
                                     chunks=chunks), [linear(0), lambda x: x, nn.LeakyReLU(), linear(3)])[0] for schedule, chunks in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2))]
told["recomputed"] = [trained(pipeline([LayerSpec(nn.Linear, 3, 3), nn.Tanh(), LayerSpec(nn.Linear, 3, 3)], schedule=schedule, activation_checkpoint_interval=1,
                                       activation_checkpoint_func=reentrant), [linear(0), nn.Tanh(), linear(2)])[0] for schedule in ("1f1b", "gpipe")]
told["not split"] = []
for schedule, chunks in (("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2)):
    began, module = time.time(), pipeline([LayerSpec(nn.Linear, 3, 3) for _ in range(4)], schedule=schedule, chunks=chunks,
                                          activation_checkpoint_interval=1, activation_checkpoint_func=reentrant)
    plain = [linear(layer) for layer in range(4)]
    told["not split"].append([*raised(lambda: trained(module, plain, micro_batches=4)), time.time() - began])
    module = pipeline([LayerSpec(nn.Linear, 3, 3) for _ in range(4)], schedule=schedule, chunks=chunks, activation_checkpoint_interval=1)
    told["not split"][-1].append(trained(module, plain, micro_batches=4)[0])

# State of tied parameters, whose copies lie on another stage, or in another part of the same one.
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state, safe_set_full_fp32_param
told["tied"] = []
for schedule, chunks in (("1f1b", 1), ("zb-v", 2)):
    module = pipeline([TiedLayerSpec("a", nn.Linear, 3, 3), LayerSpec(nn.Linear, 3, 3), LayerSpec(nn.Linear, 3, 3), TiedLayerSpec("a", nn.Linear, 3, 3)],
                      schedule=schedule, chunks=chunks)
    engine, *_ = deepspeed.initialize(model=module, config={"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
                                                            "optimizer": {"type": "Adam"}})
    engine.train_batch(batches(4))
    seen = []
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1 and (name in ("0.weight", "3.weight")):
            value = safe_get_full_fp32_param(parameter).tolist()
            try:
                state = safe_get_full_optimizer_state(parameter, "exp_avg").tolist()
            except deepspeed.errors.StateError as error:
                state = str(error)
            is_copy = hasattr(parameter, "ds_pipe_replicated")
            seen.append([name, is_copy, value, state, is_copy and [raised(lambda: safe_set_full_fp32_param(parameter, parameter))[1],
                                                                  raised(lambda: safe_get_full_grad(parameter))[1]]])
    told["tied"].append(seen)

# Names of DeepSpeed's.
from deepspeed.pipe import DualPipeVModule
from deepspeed.runtime.pipe import p2p, schedule as schedules
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
rank = deepspeed.comm.world().rank
def dualpipev(**options):
    return DualPipeVModule([LayerSpec(nn.Linear, 3, 3) for _ in range(4)], num_stages=2, loss_fn=nn.functional.mse_loss, seed_layers=True,
                           partition_method="uniform", **options)
difference, engine = trained(dualpipev(), [linear(layer) for layer in range(4)], micro_batches=4)
engine.set_schedule(schedules.DualPipeVSchedule)
with torch.no_grad():
    engine.module.activate_phase(1)
    of_phase = engine.module(torch.ones(2, 3))
    parts = [engine.module(torch.ones(2, 3), chunk=chunk) for chunk in (0, 1)]
told["DualPipeV"] = [difference, engine.train_batch(batches(4)).item(), isinstance(engine, DualPipeVEngine), [torch.equal(of_phase, part) for part in parts],
                     raised(lambda: dualpipev(chunks=1))[1], raised(lambda: engine.module.activate_phase(2))[1],
                     raised(lambda: schedules.DualPipeVSchedule(3, 2, 0))[1]]
whole, forward = ([each for step in schedules.DualPipeVSchedule(4, 2, rank, forward_only=only) for each in step] for only in (False, True))
told["DualPipeV"] += [sorted({each.name for each in forward}), sum(each.name == "ForwardPass" for each in whole),
                      sorted(each.buffer_id for each in whole if each.name == "ForwardPass"), {each.phase for each in whole if each.name == "ForwardPass"} == {0, 1}]
class Commits(TrainSchedule):
    def steps(self):
        for step in super().steps():
            yield [schedules.CommitP2P(), *step]
engine, *_ = make()
first = engine.train_batch(batches(2)).item()
engine.set_schedule(Commits)
told["commits"] = engine.train_batch(batches(2)).item() < first
told["p2p"] = [raised(lambda: p2p.send(torch.ones(1), 1))[1]]
p2p.init_process_groups(engine.grid)
values = torch.full((3,), 1.0 + rank)
if rank:
    p2p.recv(values, 0)
    p2p.send(values * 2, 0, async_op=True)
else:
    p2p.send(values, 1)
    p2p.recv(values, 1, async_op=True)
p2p.wait()
told["p2p"] += [values.tolist(), raised(lambda: p2p.send(values, rank))[1], raised(lambda: p2p.send_obj({}, 1))[1], p2p.can_send_recv()]
def in_scope():
    with deepspeed.zero.Init():
        pipeline([LayerSpec(nn.Linear, 3, 3)] * 2)
told["in scope"] = [raised(in_scope), trained(pipeline([LayerSpec(nn.Linear, 3, 3)] * 2), [linear(0), linear(1)])[0]]
def of_scope(scope, zero):
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 3, **zero}}
    torch.manual_seed(0)
    with scope(config_dict_or_path=config):
        net = nn.Linear(3, 3)
    engine, *_ = deepspeed.initialize(model=net, config=config)
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    return safe_get_full_fp32_param(net.weight).tolist()
from deepspeed.runtime.zero.mics import MiCS_Init
told["MiCS"] = [of_scope(MiCS_Init, {"mics_shard_size": 1}), of_scope(MiCS_Init, {"mics_shard_size": 2}), of_scope(deepspeed.zero.Init, {}),
                raised(lambda: of_scope(deepspeed.zero.MiCS_Init, {}))]

# Schedules that cannot train, or that only one rank has.
engine, *_ = make()
def without(kind, of_stage=(0, 1)):
    class Changed(TrainSchedule):
        def steps(self):
            for step in super().steps():
                yield [each for each in step if not isinstance(each, kind) or self.stage_id not in of_stage]
    return Changed
rank = deepspeed.comm.world().rank
told["schedules"] = [raised(lambda: engine.set_schedule(schedule)) for schedule in (
    without(OptimizerStep), without(OptimizerStep, (1,)), without(LoadMicroBatch, (1,)), "inference", "gpipe" if rank else "1f1b",
    "gpipe" if rank else "no such")]
engine.train_batch(batches(2))
if rank: engine.set_train_batch_size(8)
told["batch size"] = raised(lambda: engine.train_batch(batches(4)))
if rank: engine.set_train_batch_size(4)
told["evaluation"] = [raised(lambda: engine.eval_batch(batches(4), num_micro_batches=3 if rank else 2)),
                      raised(lambda: engine.eval_batch(batches(2)) if rank else engine.train_batch(batches(2)))]
told["goes on"] = [engine.eval_batch(batches(2)).item(), engine.train_batch(batches(2)).item()]

# Values of Python's own between stages.
Pair = collections.namedtuple("Pair", "x size")
def pack(x): return Pair(x, [x.size(), 2 ** 70, numpy.float32(0.5), numpy.int64(3), Pair(1, None)])
def check(pair):
    assert isinstance(pair, Pair) and isinstance(pair.size[0], torch.Size) and pair.size[0] == (2, 3), pair
    assert pair.size[1:] == [2 ** 70, numpy.float32(0.5), numpy.int64(3), Pair(1, None)] and type(pair.size[2]) is numpy.float32, pair
    return pair.x
told["values"] = trained(pipeline([LayerSpec(nn.Linear, 3, 3), pack, check, LayerSpec(nn.Linear, 3, 3)]), [linear(0), lambda x: x, lambda x: x, linear(3)])[0]
data = [(torch.full((3,), float(i)), torch.zeros(3), "more") for i in range(8)]
engine, _, loader, _ = make(training_data=data)
told["in order"] = [batch[0][:, 0].tolist() for _, batch in zip(range(4), loader)]
engine.train_batch()

# Losses beside the loss, and recomputation by the configuration.
class WithMore(PipelineModule):
    def get_additional_losses(self):
        WithMore.calls += 1
        return {"aux": torch.tensor(float(WithMore.calls))}
WithMore.calls = 0
module = WithMore([LayerSpec(nn.Linear, 3, 3)] * 2, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
engine, *_ = deepspeed.initialize(model=module, config={
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "optimizer": {"type": "SGD"},
    "pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}})
before = engine.get_additional_losses()
engine.train_batch(batches(4))
told["more"] = [before, engine.get_additional_losses()["aux"].item(), WithMore.calls, module.activation_checkpoint_interval]

# A step that fails: the first error and every later call say that the engine is spent.
class Wrong(nn.Module):
    fails = False
    def forward(self, x):
        if Wrong.fails: raise KeyError("of the program")
        return x
engine, *_ = make([LayerSpec(nn.Linear, 3, 3), LayerSpec(nn.Linear, 3, 3), LayerSpec(Wrong), LayerSpec(nn.Linear, 3, 3)])
engine.train_batch(batches(2))
Wrong.fails = True
began = time.time()
try:
    engine.train_batch(batches(2))
except Exception as error:
    said = str(error) + " ".join(getattr(error, "__notes__", []))
took, Wrong.fails = time.time() - began, False
told["spent"] = [said, took, *[raised(call) for call in (
    lambda: engine.train_batch(batches(2)), lambda: engine.eval_batch(batches(2)), lambda: engine.set_schedule("gpipe"),
    lambda: engine.reset_activation_shape(), lambda: engine.save_checkpoint(folder))]]
float_loss, *_ = make(loss_fn=lambda outputs, labels: 1.0)
told["loss"] = raised(lambda: float_loss.train_batch(batches(2)))
with open(f"{folder}/{rank}", "w") as file: json.dump(told, file)
"""


class RightOrRefused(Case):
    """Programs that are near the edge: one run of _SEAMS for all tests."""

    told = None  # by rank

    def of_ranks(self, name):
        if RightOrRefused.told is None:
            script = self.write("seams.py", f"folder = {str(self.folder)!r}" + _SEAMS)
            status, out, err = RankServer.run(2, [script], as_deepspeed=True, environment={"TRIREME_TIMEOUT_S": "20"})
            self.assertEqual(status, 0, out[-6000:] + err[-6000:])
            RightOrRefused.told = [json.loads((self.folder / str(rank)).read_text()) for rank in (0, 1)]
        return [told[name] for told in RightOrRefused.told]

    def test_engines_of_stages_without_parameters_live_together(self):
        for first, second, first_ended, second_ended in self.of_ranks("without parameters"):
            self.assertLess(max(first, second), 1e-6)
            self.assertEqual((first_ended, second_ended), (True, False))  # the first one's module was initialized again

    def test_a_stage_may_begin_in_place(self):
        for differences in self.of_ranks("in place"):
            self.assertLess(max(differences), 1e-6)

    def test_reentrant_recomputation_gives_the_same(self):
        for differences in self.of_ranks("recomputed"):
            self.assertLess(max(differences), 1e-6)

    def test_reentrant_recomputation_is_refused_where_backward_is_split(self):
        for schedule, *of_ranks in zip(("zb-h1", "zb-v", "dualpipe-v"), *self.of_ranks("not split"), strict=True):
            for _, text, seconds, difference in of_ranks:
                self.assertIn(f"pipeline: schedule '{schedule}' splits backward passes in two, and CheckpointFunctionBackward of reentrant "
                              "checkpointing cannot be split; use use_reentrant=False", text)
                self.assertIn(f"or schedule '{'1f1b' if schedule == 'zb-h1' else 'interleaved'}'", text)
                self.assertLess(seconds, 5)
                self.assertLess(difference, 1e-6)
            self.assertIn("ConfigError", [error for error, *_ in of_ranks])

    def test_a_copy_of_a_tied_parameter_says_where_its_states_are(self):
        elsewhere, beside = zip(*self.of_ranks("tied"))
        [[_, is_copy, owner, state, _]], [[_, is_also_copy, copy, said, refused]] = elsewhere
        self.assertEqual((is_copy, is_also_copy), (False, True))
        self.assertEqual(copy, owner)
        self.assertEqual(len(state), 3)
        self.assertIn("is a copy of the tied parameter '0.weight', and the gradient and the states are those of stage 0; call it there", said)
        self.assertIn("set that one, there", refused[0])
        self.assertTrue(refused[1].startswith("safe_get_full_grad: the parameter is a copy"))
        [owner, copy], [] = beside
        self.assertEqual((owner[1], copy[1]), (False, True))
        self.assertEqual(owner[2:4], copy[2:4])

    def test_dualpipev_has_deepspeeds_names(self):
        for difference, loss, is_engine, of_phase, chunks, phase, few, kinds, forwards, buffers, has_phases in self.of_ranks("DualPipeV"):
            self.assertLess(difference, 1e-6)
            self.assertGreater(loss, 0)
            self.assertTrue(is_engine and has_phases)
            self.assertEqual(of_phase, [False, True])
            self.assertIn("DualPipeVModule: schedule='dualpipe-v', chunks=1; leave them out", chunks)
            self.assertIn("activate_phase: 2; use 0", phase)
            self.assertIn("DualPipeV of 2 stages needs 4 or more", few)
            self.assertLessEqual(set(kinds), {"ForwardPass", "LoadMicroBatch", "RecvActivation", "SendActivation"})
            self.assertEqual((forwards, buffers), (8, list(range(8))))

    def test_messages_of_a_programs_own_and_commits_of_its_schedule(self):
        self.assertEqual(self.of_ranks("commits"), [True, True])
        for rank, (early, values, own, objects, can) in enumerate(self.of_ranks("p2p")):
            self.assertIn("call p2p.init_process_groups(engine.grid) before", early)
            self.assertEqual((values, can), ([1.0] * 3 if rank else [2.0] * 3, True))
            self.assertIn(f"stage {rank}, and this rank has stage {rank} of 2; name another stage", own)
            self.assertIn("use torch.distributed.send_object_list", objects)

    def test_a_module_inside_of_zero_init_is_refused_on_every_rank(self):
        for (error, text), difference in self.of_ranks("in scope"):
            self.assertEqual(error, "ConfigError")
            self.assertIn("make the PipelineModule outside of it: initialize() shards each stage's layers at ZeRO 3", text)
            self.assertLess(difference, 1e-6)

    def test_mics_init_makes_what_zero_init_makes(self):
        for alone, together, plain, refused in self.of_ranks("MiCS"):
            self.assertEqual((alone, together), (plain, plain))
            self.assertEqual(refused[0], "ConfigError")
            self.assertIn('has no "zero_optimization": {"mics_shard_size": N}', refused[1])

    def test_schedules_that_cannot_train_are_refused_on_every_rank(self):
        for none, on_one, unloaded, inference, different, unknown in self.of_ranks("schedules"):
            self.assertIn("stage 0 has no OptimizerStep, so that its weights would never change", none[1])
            self.assertIn("stage 1 has no OptimizerStep", on_one[1])
            self.assertIn("has no LoadMicroBatch before it", unloaded[1])
            self.assertIn("there is no backward pass", inference[1])
            self.assertIn("set_schedule: the ranks differ: `set_schedule, schedule '1f1b' of 2 micro-batches` on rank 0 and `set_schedule, schedule "
                          "'gpipe' of 2 micro-batches` on rank 1", different[1])
            self.assertIn("'no such' is no schedule", unknown[1])
            self.assertEqual({error for error, _ in (none, on_one, unloaded, inference, different, unknown)}, {"ConfigError"})

    def test_ranks_that_differ_are_told_at_once(self):
        for error, text in self.of_ranks("batch size"):
            self.assertEqual(error, "ConfigError")
            self.assertIn("`train_batch, schedule '1f1b' of 2 micro-batches` on rank 0 and `train_batch, schedule '1f1b' of 4 micro-batches` on rank 1", text)
        for counts, calls in self.of_ranks("evaluation"):
            self.assertIn("`eval_batch, 2 micro-batches, computes_loss 1` on rank 0 and `eval_batch, 3 micro-batches", counts[1])
            self.assertIn("`train_batch, schedule '1f1b' of 2 micro-batches` on rank 0 and `eval_batch, 2 micro-batches", calls[1])
        for evaluated, loss in self.of_ranks("goes on"):
            self.assertEqual(evaluated, loss)

    def test_values_of_pythons_own_pass_between_stages(self):
        self.assertLess(max(self.of_ranks("values")), 1e-6)

    def test_additional_losses_are_averaged_and_the_configuration_recomputes(self):
        self.assertEqual(self.of_ranks("more"), [[None, 2.5, 0, 1], [None, 2.5, 4, 1]])

    def test_training_data_are_read_in_order(self):
        for batches in self.of_ranks("in order"):
            self.assertEqual(batches, [[0, 1], [2, 3], [4, 5], [6, 7]])

    def test_a_failed_step_ends_the_engine_and_every_later_call_says_so(self):
        for rank, (first, took, *later) in enumerate(self.of_ranks("spent")):
            self.assertIn("This engine is spent: make a new one with initialize(), and load a checkpoint", first)
            self.assertIn("of the program", first)
            self.assertLess(took, 5)
            for (error, text), call in zip(later, ("train_batch", "eval_batch", "set_schedule", "reset_activation_shape", "save_checkpoint"), strict=True):
                self.assertEqual(error, "StateError", rank)
                self.assertTrue(text.startswith(f"{call}: this engine is spent; make a new one with initialize()"), text)
                self.assertIn("train_batch failed in stage 1, ForwardPass, micro-batch 0", text)

    def test_a_loss_that_is_no_tensor_is_named(self):
        self.assertIn("the loss function returned a float; expected a tensor of one floating element", self.of_ranks("loss")[1][1])


# Stage 1 has a fault in the second backward pass of the second step; stage 0 says what it met, even when the launcher
# wants it to end.
_FAULT = _BEGIN + """
import os, signal, sys, time
class Fault(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs):
        return inputs.clone()

    @staticmethod
    def backward(context, gradient):
        Fault.calls += 1
        if Fault.calls == 4:
            os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == "is killed" else time.sleep(60)
        return gradient
Fault.calls = 0
signal.signal(signal.SIGTERM, signal.SIG_IGN if os.environ["RANK"] == "0" else signal.SIG_DFL)
engine, *_ = make([LayerSpec(nn.Linear, 3, 3), LayerSpec(nn.Linear, 3, 3), Fault.apply, LayerSpec(nn.Linear, 3, 3)])
try:
    for step in range(3):
        began = time.time()
        engine.train_batch(batches(2))
except deepspeed.errors.CommError as error:
    with open(sys.argv[1] + "/said", "w") as file:
        json.dump([type(error).__name__, str(error), time.time() - began], file)
    raise
"""


class Faults(Case):
    def fault(self, kind):
        script = self.write("fault.py", _FAULT)
        status, out, err = harness.launch(2, ["-m", "trireme.as_deepspeed", script, self.folder, kind],
                                          environment={"TRIREME_TIMEOUT_S": "3"}, timeout_s=60)
        self.assertNotEqual(status, 0)
        said = self.folder / "said"
        self.assertTrue(said.exists(), f"stage 0 met no error\n{out}\n{err}")
        return json.loads(said.read_text())

    def test_a_stage_that_is_killed_is_named_with_its_instruction_and_micro_batch(self):
        kind, text, seconds = self.fault("is killed")
        self.assertEqual(kind, "PeerLostError")
        self.assertIn("stage 0, RecvGrad, micro-batch 1", text)
        self.assertRegex(text, "rank 1 .*died")
        self.assertLess(seconds, 2)

    def test_a_stage_that_hangs_is_named_after_the_timeout(self):
        kind, text, seconds = self.fault("hangs")
        self.assertEqual(kind, "CommTimeoutError")
        self.assertIn("stage 0, RecvGrad, micro-batch 1", text)
        self.assertIn("rank 1", text)
        self.assertLess(seconds, 6)


if __name__ == "__main__":
    main()
