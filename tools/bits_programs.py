"""Trains the programs of tools/bits on the ranks that run this, and prints the hash of each one's weights on rank 0.

    trireme launch --num_gpus 4 python bits_programs.py STEPS

Every program trains the same Transformer, whose output layer is its embedding, with gradient accumulation and clipping.
"""
import hashlib
import itertools
import json
import sys

import torch
import trireme
from torch import nn
from trireme.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from trireme.runtime.pipe.topology import PipeDataParallelTopology

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


# name -> (what differs from the configuration of train(), a pipeline's schedule). Of four ranks, pipelines and
# sequences leave two that are data-parallel.
PROGRAMS = {
    "zero-0": (zero(0), None),
    "zero-1": (zero(1), None),
    "zero-2": (zero(2), None),
    "zero-3-shared": (zero(3, "shared"), None),
    "zero-3-copy": (zero(3, "copy"), None),
    "hybrid": ({**zero(3, "copy", mics_shard_size=2), "optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}, None),
    "sequence-ulysses": (sequences("ulysses"), None),
    "sequence-ring": (sequences("ring"), None),
    "pipeline-1f1b": (zero(1), "1f1b"),
    "pipeline-zb-h1": ({"zero_optimization": {"stage": 2}, "trireme": {"pipeline": {"whole_gradients": False}}}, "zb-h1"),
    # The first scales overflow, so that steps are skipped; later ones grow again.
    "fp16": ({**zero(2), "fp16": {"enabled": True, "initial_scale_power": 19, "loss_scale_window": 2, "hysteresis": 1}}, None),
    "deterministic": ({**zero(3, "copy"), "deterministic": True, "optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}, None),
}


def train(steps, overrides, schedule):
    """The hash of the weights of all ranks after `steps`."""
    torch.manual_seed(0)
    model = pipeline(schedule) if schedule else Transformer()
    config = {"train_micro_batch_size_per_gpu": SAMPLES, "gradient_accumulation_steps": MICRO_BATCHES, "gradient_clipping": 0.5,
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}},
              "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}}, "steps_per_print": 0, **overrides}
    engine, *_ = trireme.initialize(model=model, config=config)
    size = overrides.get("sequence_parallel_size", 1)
    data = batches(model.mpu().data_parallel_id if schedule else engine.global_rank // size)
    for _ in range(steps):
        if schedule:
            engine.train_batch(data)
            continue
        for words, labels in itertools.islice(data, MICRO_BATCHES):
            batch = {"input_ids": words, "labels": labels}
            if size > 1:
                batch = engine.cut(**batch, position_ids=torch.arange(LENGTH).unsqueeze(0))
            engine.backward(engine(**batch))
            engine.step()
    with trireme.zero.GatheredParameters(list(model.parameters())):
        found = {name: [str(weight.dtype), hashlib.sha256(bytes(weight.detach().contiguous().view(torch.uint8).flatten().tolist())).hexdigest()]
                 for name, weight in model.named_parameters()}
    ranks = [json.loads(text) for text in engine.world.gather(json.dumps(found))]
    if "fp16" in overrides and not 0 < engine.skipped_steps < steps:
        sys.exit(f"fp16: {engine.skipped_steps} of {steps} steps were skipped; some must be, and some not")
    engine.destroy()
    return hashlib.sha256(json.dumps(ranks, sort_keys=True).encode()).hexdigest()


def main():
    trireme.init_distributed()
    for name in sorted(PROGRAMS):
        found = train(int(sys.argv[1]), *PROGRAMS[name])
        if trireme.comm.world().rank == 0:
            print(name, found, flush=True)


if __name__ == "__main__":
    main()
