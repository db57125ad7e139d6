"""A small model, its batches and its training, for programs that a test writes; and what they share."""
import harness

_MODEL = """
import os
import torch, trireme as deepspeed
from trireme.errors import *
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh(),
                               torch.nn.Linear(32, 1))
def batch(step):  # of all ranks
    g = torch.Generator().manual_seed(step)
    return torch.randn(4, 8, generator=g), torch.randn(4, 1, generator=g)
def train(engine, steps=4, first=0):
    losses = []
    for step in range(first, first + steps):
        x, y = (t.tensor_split(engine.world_size)[engine.global_rank] for t in batch(step))
        loss = torch.nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
def alone(net, optimizer, steps=4, scheduler=None):
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if scheduler: scheduler.step()
    return flat(net)
def flat(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])
def raised(function):
    try:
        function()
    except BaseException as error:
        return [kind.__name__ for kind in type(error).__mro__] + [str(error)]
def config(stage=3, **more):
    size = deepspeed.comm.get_world_size() if deepspeed.comm.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    return {"train_micro_batch_size_per_gpu": 4 // size, "zero_optimization": {"stage": stage}, **more}
"""


class Case(harness.Case):
    def ran(self, ranks, text):
        """The result of a program that begins with what stands above."""
        return self.on_ranks(ranks, _MODEL + text)
