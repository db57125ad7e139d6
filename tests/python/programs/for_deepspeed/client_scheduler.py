"""Callables that make an optimizer and a scheduler, and a scheduler object of torch beside them."""
import argparse

import deepspeed
import torch
from torch import nn

from reporting import report


def train(engine, scheduler, seed):
    losses, rates = [], []
    generator = torch.Generator().manual_seed(seed + engine.global_rank)
    for _ in range(8):
        x = torch.randn(4, 5, generator=generator)
        loss = nn.functional.smooth_l1_loss(engine(x), x[:, 1:3].exp())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        rates += [scheduler.get_last_lr()[0], engine.get_lr()[0]]
    return losses, rates


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": {"stage": args.stage}}
    model = model_of(13)
    engine, _, _, scheduler = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config, optimizer=lambda params: torch.optim.AdamW(params, lr=0.02),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4)))
    first = train(engine, scheduler, 130)
    model = model_of(14)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    engine, _, _, scheduler = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    second = train(engine, scheduler, 140)
    report(losses=first[0] + second[0], rates=first[1] + second[1])


if __name__ == "__main__":
    main()
