"""Every learning-rate schedule of the configuration, each with an engine of its own."""
import argparse

import deepspeed
import torch
from torch import nn

from reporting import report

SCHEDULES = {
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 4, "lr_range_test_staircase": True},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.02, "cycle_first_step_size": 4, "cycle_second_step_size": 3, "decay_step_size": 2,
                 "decay_lr_rate": 0.1, "cycle_momentum": False},
    "WarmupLR": {"warmup_min_lr": 0.0005, "warmup_max_lr": 0.01, "warmup_num_steps": 5},
    "WarmupDecayLR": {"total_num_steps": 9, "warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"},
    "WarmupCosineLR": {"total_num_steps": 9, "warmup_num_steps": 4, "cos_min_ratio": 0.01, "warmup_type": "linear"},
}


def train(kind, params, stage):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": kind, "params": params}, "zero_optimization": {"stage": stage}})
    losses, rates = [], []
    generator = torch.Generator().manual_seed(80 + engine.global_rank)
    for _ in range(10):
        x = torch.randn(4, 5, generator=generator)
        loss = nn.functional.mse_loss(engine(x), x.prod(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        rates += [optimizer.param_groups[0]["lr"], engine.get_lr()[0], scheduler.get_last_lr()[0]]
    engine.destroy()
    return losses, rates


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    losses, rates = [], []
    for kind, params in SCHEDULES.items():
        found = train(kind, params, args.stage)
        losses += found[0]
        rates += found[1]
    report(losses=losses, rates=rates)


if __name__ == "__main__":
    main()
