"""Custom autograd functions: one with a backward of its own over a parameter, one that reverses gradients between two
heads."""
import argparse

import deepspeed
import torch
from torch import nn

from reporting import report


class ScaledSwish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * torch.sigmoid(scale * x)

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        gate = torch.sigmoid(scale * x)
        slope = gate * (1 - gate)
        return gradient * (gate + x * slope * scale), (gradient * x * x * slope).sum(0)


class ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.weight * gradient, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 20)
        self.scale = nn.Parameter(torch.full((20,), 1.5))
        self.task = nn.Linear(20, 2)
        self.domain = nn.Linear(20, 2)

    def forward(self, x):
        features = ScaledSwish.apply(self.body(x), self.scale)
        return self.task(features), self.domain(ReverseGradient.apply(features, 0.3))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(21)
    model = Net()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": {"stage": args.stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.02, "torch_adam": True}}})
    losses, scales = [], []
    generator = torch.Generator().manual_seed(210 + engine.global_rank)
    for _ in range(10):
        x = torch.randn(4, 6, generator=generator)
        task, domain = engine(x)
        loss = nn.functional.cross_entropy(task, (x[:, 0] > 0).long()) + nn.functional.cross_entropy(domain, (x[:, 5] > 0).long())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with deepspeed.zero.GatheredParameters(model.scale, enabled=args.stage == 3):
        scales = model.scale.detach().tolist()
    report(losses=losses, scales=scales)


if __name__ == "__main__":
    main()
