"""Trains and evaluates in turns. Batch normalisation behaves differently in both."""
import argparse

import deepspeed
import torch
from torch import nn

from reporting import report


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(x + self.norm(self.conv(x)))


def batch_of(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 8, 8, generator=generator)
    return x, (x.mean((1, 2, 3)) > 0).long()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(18)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.0), nn.Linear(8, 2))
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": {"stage": args.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}})
    losses, evaluated, correct, means = [], [], [], []
    for epoch in range(3):
        engine.train()
        for step in range(4):
            x, y = batch_of(100 * epoch + 10 * step + engine.global_rank)
            loss = nn.functional.cross_entropy(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.eval()
        with torch.no_grad():
            x, y = batch_of(5000 + engine.global_rank)
            logits = engine(x)
            evaluated.append(nn.functional.cross_entropy(logits, y).item())
            correct.append((logits.argmax(1) == y).float().mean().item())
        mean = torch.tensor(losses[-4:]).mean()
        deepspeed.comm.all_reduce(mean)
        means.append(mean.item() / deepspeed.comm.get_world_size())
    report(losses=losses, evaluated=evaluated, correct=correct, means=means)


if __name__ == "__main__":
    main()
