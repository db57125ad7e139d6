"""Random pipelines against plain PyTorch, on the ranks that run this: random_pipelines_test.py and
random_pipelines_slow_test.py start it.

Arguments: the first seed, and how many. Each seed draws a model (tied layers over chunks and stages, operations in
place, long runs of layers without parameters), a schedule, a ZeRO stage, and the lengths of its micro-batches. Rank 0
prints a line of JSON: [[seed, description, difference], …], where a difference is the largest one of losses, of each
parameter's gradient relative to its norm, and of weights after two steps.
"""
import copy
import json
import random
import sys

import torch
import trireme
from torch import nn
from trireme.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from trireme.runtime.pipe.topology import PipeDataParallelTopology

WIDTH, LR, SEED = 5, 0.25, 1234
SCHEDULES = {"1f1b": 1, "gpipe": 1, "zb-h1": 1, "interleaved": 2, "zb-v": 2, "dualpipe-v": 2}  # chunks


def scaled(module, inputs):
    return torch.tanh(inputs @ module.weight.t())


def double(inputs):
    return 2 * inputs


def layers_of(draw, count):
    """(layers of a pipeline, how to call each in plain PyTorch, keys of ties)."""
    specs, biases, is_writable = [LayerSpec(nn.Linear, WIDTH, WIDTH)], {key: draw.random() < 0.5 for key in "abc"}, True
    while len(specs) < count:
        kind = draw.choice(("linear", "norm", "tied", "tied", "tied", "in place", "function", "functions"))
        if kind == "linear":
            specs.append(LayerSpec(nn.Linear, WIDTH, WIDTH))
        elif kind == "norm":
            specs.append(LayerSpec(nn.LayerNorm, WIDTH))
        elif kind == "tied":
            key = draw.choice("abc")
            specs.append(TiedLayerSpec(key, nn.Linear, WIDTH, WIDTH, bias=biases[key], forward_fn=draw.choice((None, scaled))))
        elif kind == "in place" and is_writable:
            specs.append(nn.LeakyReLU(inplace=True))
        elif kind == "function":
            specs.append(double)
        elif kind == "functions":
            specs.extend([double, nn.Tanh()] * 2)
        # Where autograd keeps its result, no operation in place may follow, in plain PyTorch either.
        is_writable = kind in ("linear", "function") or (kind == "tied" and specs[-1].forward_fn is None)
    return specs


def plain_of(specs):
    """[(module or None, function)] by layer, with the weights that seed_layers gives."""
    plain, tied = [], {}
    for index, spec in enumerate(specs):
        module = spec if isinstance(spec, nn.Module) else None
        if isinstance(spec, LayerSpec):
            key = getattr(spec, "key", None)
            if key is None or key not in tied:
                torch.manual_seed(SEED + index)
                module = spec.build()
                tied[key] = module
            module = tied[key] if key is not None else module
        call = getattr(spec, "forward_fn", None)
        plain.append((module, (lambda inputs, call=call, module=module: call(module, inputs)) if call else module or spec))
    return plain


def weights_of(module):
    with trireme.zero.GatheredParameters(list(module.parameters())):
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def run(seed):
    """[description, difference] of one pipeline."""
    draw, size = random.Random(seed), trireme.comm.world().size
    stages = draw.choice([count for count in (2, 4) if count <= size])
    schedule = draw.choice(list(SCHEDULES))
    chunks, zero, micro_batches = SCHEDULES[schedule], draw.randrange(4), 2 * stages
    changes = draw.random() < 0.4
    specs = layers_of(draw, stages * chunks + draw.randrange(8))
    module = PipelineModule([copy.copy(spec) for spec in specs], topology=PipeDataParallelTopology(stages, size // stages), loss_fn=nn.functional.mse_loss,
                            seed_layers=True, base_seed=SEED, partition_method="uniform", dynamic_shape=changes, schedule=schedule, chunks=chunks)
    # ZB-V would wait for ever under `deterministic` with some ties, and is refused.
    deterministic = draw.random() < 0.3 and schedule != "zb-v"
    engine, *_ = trireme.initialize(model=module, config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": micro_batches, "gradient_clipping": 0.0, "steps_per_print": 0,
        "deterministic": deterministic, "zero_optimization": {"stage": zero}, "optimizer": {"type": "SGD", "params": {"lr": LR}}})
    plain, data_ranks = plain_of(specs), size // stages
    parameters = list({parameter: None for layer, _ in plain if layer is not None for parameter in layer.parameters()})
    worst = 0.0
    before = weights_of(module)
    for step in range(2):
        generator = torch.Generator().manual_seed(seed + step)
        rows = [draw.choice((1, 2, 5)) if changes else 2 for _ in range(micro_batches)]
        data = [[(torch.randn(count, WIDTH, generator=generator), torch.randn(count, WIDTH, generator=generator)) for count in rows]
                for _ in range(data_ranks)]
        loss, total = engine.train_batch(iter(data[module.mpu().data_parallel_id])).item(), 0.0
        for inputs, labels in (batch for of_rank in data for batch in of_rank):
            for _, function in plain:
                inputs = function(inputs)
            part = nn.functional.mse_loss(inputs, labels) / micro_batches / data_ranks
            part.backward()
            total += part.item()
        worst = max(worst, abs(loss - total) / max(1.0, abs(total)))
        after = weights_of(module)
        for name, weight in after.items():
            index, _, inner = name.partition(".")
            parameter = dict(plain[int(index)][0].named_parameters())[inner]
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            difference = ((before[name] - weight) / LR - expected).norm().item()
            # of the weight's rounding
            worst = max(worst, (difference - 1e-6 * weight.norm().item()) / max(expected.norm().item(), 1e-2))
        before = after
        for parameter in parameters:  # torch.optim would import its compiler, at more than a second on each rank
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad, alpha=LR)
                parameter.grad = None
    for name, weight in before.items():
        index, _, inner = name.partition(".")
        worst = max(worst, (weight - dict(plain[int(index)][0].named_parameters())[inner]).abs().max().item())
    engine.destroy()
    return f"{schedule}, {stages} stages, {size} ranks, ZeRO {zero}, deterministic {deterministic}, lengths change {changes}, {len(specs)} layers", worst


def main():
    trireme.init_distributed()
    world, first, count = trireme.comm.world(), int(sys.argv[1]), int(sys.argv[2])
    outcomes = []
    for seed in range(first, first + count):
        description, difference = run(seed)
        outcomes.append([seed, description, max(json.loads(text) for text in world.gather(json.dumps(difference)))])
    if world.rank == 0:
        print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
