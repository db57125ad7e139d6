"""An optimizer of the program's own, element by element, with parameter groups that it changes while training goes
on."""
import argparse

import deepspeed
import torch
from torch import nn

from reporting import report


class SignMomentum(torch.optim.Optimizer):
    """Steps by the soft sign of a running mean of gradients."""

    def __init__(self, params, lr=0.01, momentum=0.9, softness=0.05, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "softness": softness, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["mean"] = torch.zeros_like(p)
                state["step"] += 1
                state["mean"].mul_(group["momentum"]).add_(p.grad, alpha=1 - group["momentum"])
                mean = state["mean"] / (1 - group["momentum"] ** state["step"])
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(mean / (mean.abs() + group["softness"]), alpha=group["lr"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(12)
    model = nn.Sequential(nn.Linear(6, 30), nn.SiLU(), nn.Linear(30, 4))
    optimizer = SignMomentum([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02, "weight_decay": 0.1}])
    engine, wrapped, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": args.stage}})
    losses, rates = [], []
    generator = torch.Generator().manual_seed(120 + engine.global_rank)
    for step in range(10):
        if step == 5:
            for group in wrapped.param_groups:
                group["lr"] *= 0.5
                group["momentum"] = 0.8
        x = torch.randn(4, 6, generator=generator)
        loss = nn.functional.cross_entropy(engine(x), x[:, :4].argmax(1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        rates += [group["lr"] for group in wrapped.param_groups] + engine.get_lr()
    report(losses=losses, rates=rates)


if __name__ == "__main__":
    main()
