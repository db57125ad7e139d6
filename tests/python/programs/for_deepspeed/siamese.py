"""One engine called several times in one graph."""
import argparse

import deepspeed
import torch
from torch import nn

from reporting import report


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(23)
    model = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 6))
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}, "zero_optimization": {"stage": args.stage}})
    losses = []
    generator = torch.Generator().manual_seed(230 + engine.global_rank)
    for _ in range(10):
        anchor = torch.randn(4, 9, generator=generator)
        near, far = anchor + 0.1 * torch.randn(4, 9, generator=generator), torch.randn(4, 9, generator=generator)
        loss = nn.functional.triplet_margin_loss(engine(anchor), engine(near), engine(far))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    report(losses=losses, steps=[engine.global_steps, engine.micro_steps], rates=[group["lr"] for group in optimizer.param_groups])


if __name__ == "__main__":
    main()
