"""A loss whose backward() is called on the tensor itself, through two engines at once."""
import argparse

import deepspeed
import torch
from torch import nn

from reporting import report


def engine_of(model, rate, stage):
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "torch_adam": True}}})[0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(26)
    encoder = engine_of(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4)), 0.01, args.stage)
    decoder = engine_of(nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 12)), 0.02, args.stage)
    losses, norms = [], []
    generator = torch.Generator().manual_seed(260 + encoder.global_rank)
    for _ in range(8):
        x = torch.randn(4, 12, generator=generator)
        code = encoder(x)
        loss = nn.functional.mse_loss(decoder(code), x) + 0.01 * code.pow(2).mean()
        loss.backward()
        encoder.step()
        decoder.step()
        losses.append(loss.item())
        norms += [float(encoder.get_global_grad_norm()), float(decoder.get_global_grad_norm())]
    report(losses=losses, norms=norms)


if __name__ == "__main__":
    main()
