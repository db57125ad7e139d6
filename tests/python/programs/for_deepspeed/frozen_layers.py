"""A frozen body under a trained head, whose parameters are given together; then a second phase trains all with an
engine of its own."""
import argparse

import deepspeed
import torch
from torch import nn

from reporting import report


def train(model, rate, stage):
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config={
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": rate, "torch_adam": True}}})
    losses = []
    generator = torch.Generator().manual_seed(190 + engine.global_rank)
    for _ in range(5):
        x = torch.randn(4, 8, generator=generator)
        loss = nn.functional.mse_loss(engine(x), x.cumsum(1)[:, :2])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(19)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 2))
    for parameter in model[:3].parameters():
        parameter.requires_grad = False
    losses = train(model, 0.02, args.stage)
    before = [parameter.detach().clone() for parameter in model[:3].parameters()]
    for parameter in model.parameters():
        parameter.requires_grad = True
    losses += train(model, 0.005, args.stage)
    moved = [int(not torch.equal(old, new)) for old, new in zip(before, model[:3].parameters())]
    report(losses=losses, moved=moved)


if __name__ == "__main__":
    main()
