"""Gradient accumulation with clipping; the norm before clipping is printed at each boundary."""
import argparse

import deepspeed
import torch
from torch import nn

from reporting import report


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4, "gradient_clipping": 0.1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 500}})
    losses, norms, returned, boundaries = [], [], [], []
    generator = torch.Generator().manual_seed(70 + engine.global_rank)
    for _ in range(16):
        x = torch.randn(3, 12, generator=generator)
        loss = nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
        scaled = engine.backward(loss)
        boundaries.append(int(engine.is_gradient_accumulation_boundary()))
        engine.step()
        losses.append(loss.item())
        returned.append(float(scaled))
        if boundaries[-1] and args.stage:
            norms.append(float(engine.get_global_grad_norm()))
    report(losses=losses, norms=norms, returned=returned, boundaries=boundaries,
           counts=[engine.train_batch_size(), engine.global_samples, engine.micro_steps, engine.skipped_steps])


if __name__ == "__main__":
    main()
