"""Programs of the zoo, each trained by plain PyTorch in one process and by an engine whose ranks share layers; every
rank does both. tensor_programs_of_users_test.py runs them."""
import math

import torch
from torch import nn
import trireme
from zoo.parts import BATCH, next_token, tokens

# Rounding noise would be most of a gradient that is zero by mathematics, as those of the biases of keys are.
SMALLEST = 1e-4
SECTION = {}  # of every program's `tensor_parallel`


def seeded(make, seed=0):
    torch.manual_seed(seed)
    return make()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-4, weight_decay=0.1)


ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-4, "weight_decay": 0.1}}


class Differences:
    """The largest relative difference of each kind, and where."""

    def __init__(self):
        self.worst = {}

    def see(self, kind, where, one, other, smallest=SMALLEST):
        if one is None or other is None:
            relative = 0.0 if one is other else math.inf
        else:
            one, other = one.detach().double(), other.detach().double()
            if one.shape != other.shape:
                relative, where = math.inf, f"{where}: {list(one.shape)} is not {list(other.shape)}"
            else:
                relative = ((one - other).norm() / other.norm().clamp(min=smallest)).item()
        if not relative <= self.worst.get(kind, [-1.0])[0]:
            self.worst[kind] = [relative, where]


def configuration(tensor, stage, partition_config=None, accumulation=1, optimizer=ADAMW, **more):
    section = {"autotp_size": tensor, **SECTION, **({"partition_config": partition_config} if partition_config else {})}
    return {"train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": accumulation, "optimizer": optimizer,
            "zero_optimization": {"stage": stage}, **({"tensor_parallel": section} if tensor > 1 else {}), **more}


def compare(tensor, stage, make, loss_of=next_token, partition_config=None, batch_of=tokens, steps=3, optimizer_of=adamw, clipping=1.0, between=None,
            accumulation=1, smallest=SMALLEST, closely=False, seed=0, after=None, initialize=None, under_init=False, backward=None, **more):
    """{kind: [difference, where]} of losses, gradients of the first step and weights.

    `closely`: of norms of gradients and of all ranks' mean losses, too, and small gradients and weights count as what
    they are.
    """
    smallest, share, smallest_weight = (1e-12, SMALLEST, 1e-12) if closely else (smallest, 1e-3, 1e-2)
    config = configuration(tensor, stage, partition_config, accumulation, **{"gradient_clipping": clipping, **more})
    with trireme.zero.Init(config_dict_or_path=config, enabled=under_init and stage == 3):
        own = seeded(make, seed)
    plain = seeded(make, seed)
    engine, *_ = trireme.initialize(model=own, config=config, **(initialize(own) if initialize else {}))
    copies, copy = engine.dp_world_size, engine.get_data_parallel_rank()
    assert copies * tensor == engine.world_size, f"{copies} copies with {tensor} ranks for each layer, of {engine.world_size}"
    optimizer = optimizer_of([p for p in plain.parameters() if p.requires_grad])
    found = Differences()
    names = {name: parameter for name, parameter in own.named_parameters()}
    for step in range(steps):
        optimizer.zero_grad()
        means = torch.zeros(2, dtype=torch.float64)  # of this rank's losses and of the expected ones
        for micro in range(accumulation):
            number = (step * accumulation + micro) * copies
            loss = loss_of(engine, own, *batch_of(number + copy))
            means[0] += loss.item() / accumulation
            if backward:
                backward(engine, loss)
            else:
                engine.backward(loss)
            for other in range(copies):
                expected = loss_of(plain, plain, *batch_of(number + other))
                if other == copy:
                    found.see("loss", f"step {step}", loss, expected)
                means[1] += expected.item() / copies / accumulation
                (expected / copies / accumulation).backward()
            if micro + 1 < accumulation:
                engine.step()
        if step == 0:
            whole = math.sqrt(sum(p.grad.norm().item() ** 2 for p in plain.parameters() if p.grad is not None))
            for name, parameter in plain.named_parameters():
                if parameter.requires_grad and parameter.grad is not None:
                    found.see("gradient", name, trireme.utils.safe_get_full_grad(names[name]), parameter.grad, max(smallest, share * whole))
        norm = nn.utils.clip_grad_norm_(plain.parameters(), clipping)
        engine.step()
        if closely:
            torch.distributed.all_reduce(means)
            found.see("mean loss", f"step {step}", *means, smallest)
            found.see("norm", f"step {step}", torch.tensor(engine.get_global_grad_norm()), norm, smallest)
        optimizer.step()
        if between:
            between(engine, own, found, "own") if between.__code__.co_argcount == 4 else between(own)
            between(plain, plain, found, "plain") if between.__code__.co_argcount == 4 else between(plain)
    with trireme.zero.GatheredParameters(list(own.parameters())):
        for name, parameter in plain.named_parameters():
            found.see("weight", name, names[name], parameter, smallest_weight)
    for name, buffer in plain.named_buffers():
        if buffer.is_floating_point():
            found.see("buffer", name, dict(own.named_buffers())[name], buffer)
    if after:
        after(engine, own, plain, found)
    engine.destroy()
    for name, parameter in plain.named_parameters():
        found.see("weight after destroy", name, names[name], parameter, smallest_weight)
    return found.worst


def run(program, tensor, stage):
    """compare()'s result for a program of the zoo, or that of one that makes its engines itself."""
    if program.run:
        return program.run(tensor, stage)
    return compare(tensor, stage, program.build, program.loss, batch_of=program.batch, **program.options)
