"""Programs of the zoo's collection "padded", each trained by plain PyTorch in one process and by an engine whose ranks
share layers; every rank does both.

    trireme launch --num_gpus 4 python tests/python/tensor_programs.py FAMILY TENSOR STAGE prints what differs, on rank
    0

"llama@tokens" is a "llama" whose ranks have some tokens each between layers.
"wide@overlap" is a "wide" whose ranks exchange large sums by pieces.
"""
import sys

import tensor_compare
import torch
import torch.distributed as dist
import trireme
from zoo import padded

# With another seed, noise leads the losses of wide models apart by 1e-3 in so many steps.
STEPS, SEED, CLIPPING = 10, 1, 0.5
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-4, "weight_decay": 0.1}
OPTIMIZER = {"type": "AdamW", "params": ADAMW}
# The suffixes of a family's name: a key of tensor_parallel that is on.
KEYS = {"tokens": "sequence_parallel", "overlap": "tp_overlap_comm"}
# Mistakes that a comparison must see: what each does to an engine's model and batches.
PLANTED = {
    "gradient": lambda model: [p for p in model.parameters() if p.dim() > 1][-2].register_hook(lambda gradient: gradient * 1.0001),
    "weight": lambda model: [p for p in model.parameters() if p.dim() > 1][2].data.view(-1)[3].add_(1e-3),
    "loss": lambda model: model.register_forward_hook(lambda module, inputs, output: output.__setitem__("loss", output["loss"] * 1.0001)),
}


def build(family):
    """The model, the same everywhere."""
    return tensor_compare.seeded(padded.PROGRAMS[f"padded {family}"].build, SEED)


def batch(number, rank=0, ranks=1):
    """The part of a batch that `rank` has among `ranks`, by names."""
    return {name: whole.chunk(ranks)[rank] for name, whole in zip(("input_ids", "attention_mask", "labels"), padded.batch(number))}


def config(tensor, stage, ranks):
    """The configuration of an engine that takes a batch in one step."""
    return tensor_compare.configuration(tensor, stage, optimizer=OPTIMIZER, gradient_clipping=CLIPPING, train_micro_batch_size_per_gpu=padded.SAMPLES * tensor // ranks)


def differences(family, tensor, stage, planted=None):
    """{kind: [the largest relative difference on any rank, where]}. Collective."""
    trireme.init_distributed()
    family, _, key = family.partition("@")
    program = padded.PROGRAMS[f"padded {family}"]
    tensor_compare.SECTION = {KEYS[key]: True} if key else {}

    def spoil(model):
        if planted:
            PLANTED[planted](model)
        return {}

    own = tensor_compare.compare(
        tensor, stage, program.build, program.loss, batch_of=program.batch, steps=STEPS, seed=SEED, clipping=CLIPPING, closely=True,
        initialize=spoil, optimizer=OPTIMIZER, optimizer_of=lambda parameters: torch.optim.AdamW(parameters, **ADAMW), **program.options)
    every = [None] * trireme.comm.get_world_size()
    dist.all_gather_object(every, own)
    return {kind: max(one[kind] for one in every) for kind in own}


if __name__ == "__main__":
    result = differences(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    if trireme.comm.get_rank() == 0:
        for what, (relative, where) in result.items():
            print(f"{what:20} {relative:.1e} {where}")
