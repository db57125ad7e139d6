"""Trains the programs of tools/bits on the ranks that run this, and prints the hash of each one's weights on rank 0.

    trireme launch --num_gpus 4 python bits_programs.py STEPS FOLDER

Every program trains the same Transformer, whose output layer is its embedding, with gradient accumulation and clipping.
Where weights could be the same without what a program is named for, its check tells.
"""
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import sys

import torch
import trireme
from torch import nn
from trireme.fsdp import fully_shard
from trireme.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from trireme.runtime.pipe.topology import PipeDataParallelTopology

FOLDER = sys.argv[2]  # for what is on disk
WORDS, WIDTH, HEADS, LENGTH, SAMPLES, MICRO_BATCHES = 61, 16, 4, 16, 2, 4


class Words(nn.Module):
    """Embeds words and positions; its weight is the output layer's too."""

    def __init__(self):
        super().__init__()
        self.weight, self.positions = nn.Parameter(torch.randn(WORDS, WIDTH) / 4), nn.Embedding(LENGTH, WIDTH)

    def forward(self, input_ids, position_ids=None):
        position_ids = torch.arange(LENGTH).unsqueeze(0) if position_ids is None else position_ids
        return nn.functional.embedding(input_ids, self.weight) + self.positions(position_ids)


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self):
        super().__init__()
        self.norm, self.project, self.join = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden):
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.project(self.norm(hidden)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.join(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(hidden)


def logits_of(words, hidden):
    return nn.functional.linear(hidden, words.weight)


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Transformer(nn.Module):
    """The model in one piece."""

    def __init__(self):
        super().__init__()
        self.words, self.blocks = Words(), nn.ModuleList(Block() for _ in range(4))

    def forward(self, input_ids, labels, position_ids=None):
        hidden = self.words(input_ids, position_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return loss_of(logits_of(self.words, hidden), labels)


def pipeline(schedule):
    """The same in two stages."""
    layers = [TiedLayerSpec("words", Words), *[LayerSpec(Block) for _ in range(4)], TiedLayerSpec("words", Words, forward_fn=logits_of)]
    topology = PipeDataParallelTopology(2, trireme.comm.world().size // 2)
    return PipelineModule(layers, topology=topology, loss_fn=loss_of, seed_layers=True, partition_method="uniform", schedule=schedule)


def batches(data_rank):
    """(words, the words that follow), for ever."""
    for number in itertools.count():
        generator = torch.Generator().manual_seed(1000 * number + data_rank)
        tokens = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def zero(stage, gather=None, **section):
    return {"zero_optimization": {"stage": stage, **section}, "trireme": {"gather": gather} if gather else {}}


def sequences(attention):
    return {"sequence_parallel_size": 2, "zero_optimization": {"stage": 2}, "trireme": {"sequence_attention": attention}}


def on_disk(stage, **sections):
    """States, or weights and states, in FOLDER."""
    return zero(stage, **{name: {"device": "nvme", "nvme_path": FOLDER, "buffer_count": count} for name, count in sections.items()})


def half(**keys):
    return {**zero(2), "fp16": {"enabled": True, "loss_scale": 1.0}, "communication_data_type": "fp16", **keys}


def skips_some(engine, steps):
    """Some steps must overflow, and some must not."""
    return None if 0 < engine.skipped_steps < steps else f"{engine.skipped_steps} of {steps} steps were skipped"


def has_files(count):
    """A check: each rank has so many files, which have no names, in FOLDER, and has written into them."""
    def check(engine, steps):  # pylint: disable=unused-argument
        opened = [path for path in pathlib.Path("/proc/self/fd").iterdir() if os.path.lexists(path) and os.readlink(path).startswith(FOLDER)]
        blocks = [path.stat().st_blocks for path in opened]
        return None if len(blocks) == count and all(blocks) else f"the files have {blocks} blocks; {count} files with some are expected"
    return check


class OwnOptimizer(torch.optim.RMSprop):
    """An optimizer that the library does not have: it steps itself, on parts."""

    elements = 0  # that it has stepped

    def step(self, closure=None):
        OwnOptimizer.elements += sum(weight.numel() for group in self.param_groups for weight in group["params"] if weight.grad is not None)
        return super().step(closure)


def steps_itself(engine, steps):
    """The program's optimizer must have stepped each element on one rank; before, it is tried on a few elements."""
    found = sum(int(text) for text in engine.world.gather(str(OwnOptimizer.elements)))
    whole = sum(weight.numel() for weight in engine.module.parameters())
    return None if steps * whole <= found < (steps + 1) * whole else f"the optimizer has stepped {found} elements, not {steps} times {whole}"


def cuts_layers(engine, steps):  # pylint: disable=unused-argument
    """Every element of each matrix in a block must be with one rank: of whole layers two ranks would have it."""
    for name, weight in engine.module.blocks.named_parameters():
        found = sum(int(text) for text in engine.world.gather(str(trireme.utils.safe_get_local_fp32_param(weight).numel())))
        if weight.dim() > 1 and found != weight.numel():
            return f"ranks update {found} elements of {name}, which has {weight.numel()}"
    return None


@dataclasses.dataclass
class Program:
    """Keys that differ from the configuration of train(), a pipeline's schedule, an optimizer that the program makes,
    what is said of the engine that has not done what it is named for, and a program whose bits are others."""

    keys: dict
    schedule: str | None = None
    optimizer: object = None
    check: object = lambda engine, steps: None
    unlike: str | None = None


LAYERS = [{"patterns": [r".*project\.weight"], "partition_type": "column", "shape": [3, -1]}, {"patterns": [r".*mlp\.1\.weight"], "partition_type": "column"},
          {"patterns": [r".*(join|mlp\.3)\.weight"], "partition_type": "row"}]
TENSOR = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": LAYERS}}
# Pipelines, sequences and layers that are cut leave two of four ranks that are data-parallel.
PROGRAMS = {
    "zero-0": Program(zero(0)),
    "zero-1": Program(zero(1)),
    "zero-2": Program(zero(2)),
    "zero-3-shared": Program(zero(3, "shared")),
    "zero-3-copy": Program(zero(3, "copy")),
    "hybrid": Program({**zero(3, "copy", mics_shard_size=2), "optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}),
    "sequence-ulysses": Program(sequences("ulysses")),
    "sequence-ring": Program(sequences("ring")),
    "pipeline-1f1b": Program(zero(1), "1f1b"),
    "pipeline-zb-h1": Program({"zero_optimization": {"stage": 2}, "trireme": {"pipeline": {"whole_gradients": False}}}, "zb-h1"),
    "tensor": Program({**zero(1), "tensor_parallel": TENSOR}, check=cuts_layers),
    "tensor-tokens": Program({**zero(3, "copy"), "tensor_parallel": {**TENSOR, "sequence_parallel": True}}, check=cuts_layers),
    "disk-states": Program(on_disk(2, offload_optimizer=4), check=has_files(1)),
    "disk-weights": Program(on_disk(3, offload_param=5, offload_optimizer=4), check=has_files(2)),
    # The first scales overflow, so that steps are skipped; later ones grow again.
    "fp16": Program({**zero(2), "fp16": {"enabled": True, "initial_scale_power": 19, "loss_scale_window": 2, "hysteresis": 1}}, check=skips_some),
    "deterministic": Program({**zero(3, "copy"), "deterministic": True, "optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}),
    # Without a loss scale many gradients are so small that fp16 rounds them otherwise when they are divided before.
    "half": Program(half()),
    "half-prescaled": Program(half(prescale_gradients=True), unlike="half"),
    "half-predivided": Program(half(gradient_predivide_factor=3.0), unlike="half"),
    "client-optimizer": Program(zero(2), optimizer=lambda parameters: OwnOptimizer(parameters, lr=1e-3, momentum=0.9), check=steps_itself),
}


def hash_of(world, weights):
    """The hash of the (name, tensor) of all ranks."""
    found = {name: [str(weight.dtype), hashlib.sha256(bytes(weight.detach().contiguous().view(torch.uint8).flatten().tolist())).hexdigest()]
             for name, weight in weights}
    ranks = [json.loads(text) for text in world.gather(json.dumps(found))]
    return hashlib.sha256(json.dumps(ranks, sort_keys=True).encode()).hexdigest()


def train(name, steps):
    """The hash of the weights after `steps`."""
    program = PROGRAMS[name]
    torch.manual_seed(0)
    model = pipeline(program.schedule) if program.schedule else Transformer()
    config = {"train_micro_batch_size_per_gpu": SAMPLES, "gradient_accumulation_steps": MICRO_BATCHES, "gradient_clipping": 0.5,
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}},
              "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}}, "steps_per_print": 0, **program.keys}
    own = program.optimizer(model.parameters()) if program.optimizer else None
    engine, *_ = trireme.initialize(model=model, optimizer=own, config={key: value for key, value in config.items() if own is None or key != "optimizer"})
    size = config.get("sequence_parallel_size", 1)
    data = batches(model.mpu().data_parallel_id if program.schedule else engine.global_rank // (size * max(engine.autotp_size(), 1)))
    for _ in range(steps):
        if program.schedule:
            engine.train_batch(data)
            continue
        for words, labels in itertools.islice(data, MICRO_BATCHES):
            batch = {"input_ids": words, "labels": labels}
            if size > 1:
                batch = engine.cut(**batch, position_ids=torch.arange(LENGTH).unsqueeze(0))
            engine.backward(engine(**batch))
            engine.step()
    world, wrong = engine.world, program.check(engine, steps)
    if wrong:
        sys.exit(f"{name}: {wrong}")
    engine.destroy()  # after which every parameter is whole
    return hash_of(world, model.named_parameters())


def train_fsdp(name, steps):
    """The same of a program that is written for FSDP: ZeRO stage 3, by fully_shard() of each block and the model."""
    world = trireme.comm.world()
    torch.manual_seed(0)
    model = Transformer()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer, data = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2), batches(world.rank)
    for _ in range(steps):
        for words, labels in itertools.islice(data, MICRO_BATCHES):
            (model(words, labels) / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: weight.full_tensor() for name, weight in model.state_dict().items()}
    for weight_name, weight in model.named_parameters():
        found = sum(int(text) for text in world.gather(str(weight.to_local().numel())))
        if found != weights[weight_name].numel():
            sys.exit(f"{name}: ranks have {found} elements of {weight_name}, which has {weights[weight_name].numel()}")
    return hash_of(world, weights.items())


def main():
    trireme.init_distributed()
    steps, found = int(sys.argv[1]), {}
    for name, trained in sorted({**dict.fromkeys(PROGRAMS, train), "fsdp": train_fsdp}.items()):
        found[name] = trained(name, steps)
        if trireme.comm.world().rank == 0:
            print(name, found[name], flush=True)
    for name, program in PROGRAMS.items():
        if program.unlike and found[name] == found[program.unlike]:
            sys.exit(f"{name}: has the bits of {program.unlike}, so that its keys were not seen")


if __name__ == "__main__":
    main()
