"""The program itself decides when a window ends: every step() updates, after as many micro-batches as there were."""
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
    torch.manual_seed(25)
    model = nn.Sequential(nn.Linear(6, 16), nn.ELU(), nn.Linear(16, 1))
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "managed_gradient_accumulation": False,
        "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 3}},
        "zero_optimization": {"stage": args.stage}})
    losses, rates = [], []
    generator = torch.Generator().manual_seed(250 + engine.global_rank)
    for micro_batches in (2, 2, 1, 3, 2):
        for _ in range(micro_batches):
            x = torch.randn(2, 6, generator=generator)
            loss = nn.functional.mse_loss(engine(x), x.amax(1, keepdim=True))
            engine.backward(loss)
            losses.append(loss.item())
        engine.step()
        rates += engine.get_lr()
    report(losses=losses, rates=rates, steps=[engine.global_steps])


if __name__ == "__main__":
    main()
