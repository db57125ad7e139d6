"""Helpers that the tests of FSDP programs share: a small model, its training on this rank's part of a batch, and a
comparison with plain PyTorch."""
import pathlib

import harness

harness.RankServer.imports = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed._composable.fsdp", "torch.distributed.checkpoint")
PROGRAMS = pathlib.Path(__file__).parent / "programs" / "for_fsdp"

START = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from trireme.fsdp import *
from trireme.fsdp import FullyShardedDataParallel as FSDP
from trireme import ranks
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))
class Net(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.word = nn.Embedding(13, 8)
        self.layers = nn.ModuleList([Block(8) for _ in range(3)])
        self.head = nn.Linear(8, 13, bias=False)
        if tied: self.head.weight = self.word.weight
    def forward(self, tokens):
        x = self.word(tokens)
        for layer in self.layers: x = layer(x)
        return self.head(x)
def net(**more):
    torch.manual_seed(0)
    return Net(**more)
def batch(step):  # of all ranks
    g = torch.Generator().manual_seed(step)
    return torch.randint(13, (8, 5), generator=g), torch.randint(13, (8, 5), generator=g)
def own(step, micro=0, micros=1):
    return [t.chunk(micros)[micro].chunk(ranks.world().size)[ranks.world().rank] for t in batch(step)]
def loss_of(model, tokens, labels):
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
def sharded(model, **options):
    for layer in model.layers: fully_shard(layer, **options)
    return fully_shard(model, **options)
def mean(loss):
    value = loss.detach().clone()
    ranks.world().all_reduce(value, "mean")
    return value.item()
def farthest(ones, others):
    assert set(ones) == set(others), (set(ones) ^ set(others))
    return max((ones[name] - others[name]).abs().max().item() for name in ones)
def gradients(model):
    return {name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
def weights(model):
    return {name: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for name, v in model.state_dict().items()}
def train(model, optimizer, data, loss_value, clip=None, micros=1, steps=5, sync=False):
    told = []
    for step in range(steps):
        loss = 0
        for micro in range(micros):
            if sync: model.set_requires_gradient_sync(micro == micros - 1)
            part = loss_of(model, *data(step, micro, micros)) / micros
            part.backward()
            loss += loss_value(part)
            if sync and micro < micros - 1: assert all(p.grad is None for p in model.parameters())  # nothing is reduced yet
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip) if clip else torch.zeros(())
        told.append((loss, float(norm), gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    return told
def whole(step, micro=0, micros=1):
    return [t.chunk(micros)[micro] for t in batch(step)]
def compared(make=lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), change=lambda model: None, options={}, tied=True, **more):
    plain, ours = net(tied=tied), net(tied=tied)
    change(plain); change(ours)
    sharded(ours, **options)
    sync = more.pop("sync", False)  # the plain model reduces nothing anyway
    expected = train(plain, make(plain.parameters()), whole, lambda loss: loss.item(), **more)
    found = train(ours, make(ours.parameters()), own, mean, sync=sync, **more)
    return {"losses": max(abs(one[0] - other[0]) for one, other in zip(found, expected)),
            "norms": max(abs(one[1] - other[1]) for one, other in zip(found, expected)),
            "gradients": max(farthest(one[2], other[2]) for one, other in zip(found, expected)),
            "weights": farthest(weights(ours), weights(plain)), "moved": farthest(weights(ours), weights(net(tied=tied)))}
def raised(function):
    try:
        function()
    except BaseException as error:
        return type(error).__name__ + ": " + str(error)
"""


class Case(harness.Case):
    """Each in two ranks, beside one process of plain PyTorch on the whole batch."""

    def ran(self, text, ranks=2, **options):
        return self.on_ranks(ranks, START + text, **options)

    def assert_same(self, result):
        """compared()'s: the sums of two halves are rounded otherwise than those of the whole."""
        for name in ("losses", "norms", "gradients", "weights"):
            self.assertLessEqual(result[name], 1e-5, name)
        self.assertGreater(result["moved"], 1e-2)

    def assert_all_near(self, found, limit=None):
        """{name: largest difference}; by default they may be those of `near`, which a class has."""
        self.assertTrue(found)
        for name, one in found.items():
            with self.subTest(name):
                self.assertLessEqual(one, self.near if limit is None else limit)
