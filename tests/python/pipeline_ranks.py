"""Trains small models in stages and whole, on the ranks that run this: pipeline_engine_test.py starts it.

Arguments: a folder that all runs share. Rank 0 prints a line of JSON, {case: {layout: outcome}}, where a layout is
"whole" or a number of stages. An outcome has the losses and a digest of each weight.
"""
import dataclasses
import hashlib
import itertools
import json
import sys
import typing

import torch
import trireme
from torch import nn
from trireme.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from trireme.runtime.pipe import schedule as schedules
from trireme.runtime.pipe.topology import PipeDataParallelTopology

STEPS, MICRO_BATCHES, WIDTH, WORDS = 3, 4, 8, 11
# by the number of ranks; those that stages do not take are data parallel
LAYOUTS = {1: ("whole",), 2: ("whole", 2), 4: (2, 4)}
# The last layout of each number of ranks, without data parallelism, saves checkpoints. From which ranks' one a layout
# resumes:
SAVED_BY = {(1, "whole"): 1, (2, "whole"): 2, (2, 2): 1, (4, 2): 4, (4, 4): 2}


class Block(nn.Module):
    """[batch, WIDTH] -> [batch, WIDTH], in any nesting: {"hidden": hidden, "rest": [scale, None]}."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, value):
        hidden, (scale, nothing) = value["hidden"], value["rest"]
        assert nothing is None
        return {"hidden": hidden + scale * self.down(torch.tanh(self.up(self.norm(hidden)))), "rest": [scale, None]}


def begin(inputs):
    return {"hidden": inputs[0], "rest": [inputs[1], None]}


def end(value):
    return value["hidden"]


class Word(nn.Embedding):
    """An embedding with a buffer."""

    def __init__(self):
        super().__init__(WORDS, WIDTH)
        self.register_buffer("ones", torch.ones(WIDTH))


def embed(word, inputs):
    return {"hidden": word(inputs[0]) * word.ones, "rest": [inputs[1], None]}


def head(word, value):
    return value["hidden"] @ word.weight.t()


def layers_of(is_tied):
    blocks = [LayerSpec(Block) for _ in range(6)]
    if is_tied:
        return [TiedLayerSpec("word", Word, forward_fn=embed), *blocks, TiedLayerSpec("word", Word, forward_fn=head)]
    return [begin, *blocks, end]


def loss_of(outputs, labels):
    return nn.functional.cross_entropy(outputs.float(), labels)


def batches(data_rank, case, step=0):
    """((words or numbers, scale), labels), from those of `step` on."""
    dtype = torch.bfloat16 if "bf16" in case.config else torch.float32
    for number in itertools.count(step * case.micro_batches):
        generator = torch.Generator().manual_seed(100 * number + data_rank)
        words = torch.randint(WORDS, (3,), generator=generator)
        numbers = torch.randn(3, WIDTH, generator=generator, dtype=dtype)
        yield (words if case.is_tied else numbers, torch.tensor(0.5, dtype=dtype)), words % WIDTH


class AllForwardsFirst(schedules.PipeSchedule):
    """GPipe, as a program writes it."""

    def steps(self):
        for index in range(self.micro_batches):
            yield [kind(buffer_id=index) for kind, is_there in (
                (schedules.RecvActivation, not self.is_first_stage), (schedules.LoadMicroBatch, self.is_first_stage or self.is_last_stage),
                (schedules.ForwardPass, True), (schedules.SendActivation, not self.is_last_stage)) if is_there]
        for index in range(self.micro_batches):
            yield [kind(buffer_id=index) for kind, is_there in (
                (schedules.RecvGrad, not self.is_last_stage), (schedules.BackwardPass, True), (schedules.SendGrad, not self.is_first_stage))
                   if is_there]
        yield [schedules.ReduceTiedGrads(), schedules.ReduceGrads(), schedules.OptimizerStep()]


def no_decay(module):
    """Two groups; one has nothing on a stage without blocks."""
    vectors = [p for p in module.parameters() if p.ndim < 2]
    return [{"params": [p for p in module.parameters() if p.ndim >= 2]}, {"params": vectors, "weight_decay": 0.0, "lr": 5e-3}]


@dataclasses.dataclass
class Case:
    """A training. `recomputed`: layers of a checkpoint interval."""
    config: dict
    is_tied: bool = False
    recomputed: int = 0
    schedule: typing.Any = None
    cut_for: str = "1f1b"  # a schedule of two parts on each stage, or one
    micro_batches: int = MICRO_BATCHES
    optimizer: typing.Callable | None = None
    scheduler: typing.Callable | None = None
    resumes_from: str | None = None


def _zero(stage, **more):
    """Gradients are summed in the order of a model without stages, at every stage."""
    return {"zero_optimization": {"stage": stage}, **more, "trireme": {"pipeline": {"whole_gradients": False}, **more.get("trireme", {})}}


CASES = {
    **{f"ZeRO {stage}": Case(_zero(stage)) for stage in range(4)},
    **{f"tied, ZeRO {stage}": Case(_zero(stage, deterministic=True), is_tied=True) for stage in range(4)},
    "ZeRO 3, copy": Case(_zero(3, trireme={"gather": "copy"})),
    "bf16": Case(_zero(2, bf16={"enabled": True})),
    "fp16": Case(_zero(1, fp16={"enabled": True, "auto_cast": True, "initial_scale_power": 8})),
    "recomputed": Case(_zero(3), recomputed=1),
    "gpipe": Case(_zero(2), schedule="gpipe"),
    "zb-h1": Case(_zero(1), schedule="zb-h1"),
    "interleaved": Case(_zero(2), cut_for="interleaved"),
    "dualpipe-v": Case(_zero(1), cut_for="dualpipe-v", recomputed=1, micro_batches=8),
    "zb-v": Case(_zero(3, deterministic=True), is_tied=True, cut_for="zb-v", micro_batches=8),
    "own schedule": Case(_zero(2), schedule=AllForwardsFirst),
    "parameter groups": Case(_zero(2), optimizer=lambda module: torch.optim.AdamW(no_decay(module), lr=1e-2)),
    "client optimizer": Case(_zero(1), optimizer=lambda module: torch.optim.NAdam(no_decay(module), lr=1e-2),
                             scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)),
    "scheduler": Case(_zero(1, scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3}})),
    "resumed": Case(_zero(2), resumes_from="ZeRO 2"),
    "resumed, tied": Case(_zero(3, deterministic=True), is_tied=True, resumes_from="tied, ZeRO 3"),
}


class Whole(nn.Module):
    """The layers of a PipelineModule of one stage, under the same names, for an engine that knows no stages."""

    def __init__(self, layers):
        super().__init__()
        for name, layer in layers.named_children():
            self.add_module(name, layer)
        self._layers = [layers]

    def forward(self, inputs):
        return self._layers[0](inputs)


def train(case, stages, folder, name):
    """The outcome of one training. One that resumes has the last steps alone."""
    whole, size = stages == "whole", trireme.comm.world().size
    torch.manual_seed(0)
    topology = PipeDataParallelTopology(1, size) if whole else PipeDataParallelTopology(stages, size // stages)
    module = PipelineModule(layers_of(case.is_tied), topology=topology, loss_fn=loss_of, seed_layers=True, partition_method="uniform",
                            activation_checkpoint_interval=case.recomputed,
                            **({} if whole else {"schedule": case.cut_for, "chunks": 1 if case.cut_for == "1f1b" else 2}))
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": case.micro_batches, "gradient_clipping": 0.5, "steps_per_print": 0,
              **case.config}
    if case.optimizer is None:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}}
    model = Whole(module) if whole else module
    engine, *_ = trireme.initialize(model=model, optimizer=case.optimizer and case.optimizer(model), lr_scheduler=case.scheduler, config=config)
    step = 0
    if case.resumes_from:
        path, state = engine.load_checkpoint(f"{folder}/{case.resumes_from} on {SAVED_BY[size, stages]}")
        assert path.endswith("global_step2") and state == {"step": 2}, (path, state)
        step = state["step"]
    if case.schedule and not whole:
        engine.set_schedule(case.schedule)
    data, losses = batches(module.mpu().data_parallel_id, case, step), []
    for step in range(step, STEPS):
        if whole:
            total = torch.zeros(())
            for inputs, labels in itertools.islice(data, case.micro_batches):
                loss = loss_of(engine(inputs), labels)
                total += loss.detach().float()
                engine.backward(loss)
                engine.step()
            loss = (total / case.micro_batches).reshape(1)
            engine.world.all_reduce(loss)
            loss = loss / engine.world.size
        else:
            loss = engine.train_batch(data)
        losses.append(loss.item())
        if step == 1 and stages == LAYOUTS[size][-1] and any(other.resumes_from == name for other in CASES.values()):
            engine.save_checkpoint(f"{folder}/{name} on {size}", client_state={"step": 2})
    outcome = {"losses": losses, "weights": digests(engine, model)}
    engine.destroy()
    return outcome


def digests(engine, model):
    """A digest of each weight, by its name in the whole model. Copies of tied weights must be alike."""
    found, copies = {}, model.tied_copies() if isinstance(model, PipelineModule) else {}
    owners = {id(copy): name for name, by_part in copies.items() for copy in by_part.values()}
    with trireme.zero.GatheredParameters(list(model.parameters())):
        for name, weight in model.named_parameters():
            name = owners.get(id(weight), name)
            digest = hashlib.sha256(repr(weight.tolist()).encode()).hexdigest()[:16]
            assert found.setdefault(name, digest) == digest, f"copies of {name} differ on one stage"
    merged = {}
    for text in engine.world.gather(json.dumps(found)):
        for name, digest in json.loads(text).items():
            assert merged.setdefault(name, digest) == digest, f"copies of {name} differ"
    return merged


def main():
    trireme.init_distributed()
    world = trireme.comm.world()
    outcomes = {name: {stages: train(case, stages, sys.argv[1], name) for stages in LAYOUTS[world.size]} for name, case in CASES.items()}
    if world.rank == 0:
        print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
