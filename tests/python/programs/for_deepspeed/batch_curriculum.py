"""The batch grows while training goes on: set_train_batch_size() changes the accumulation steps."""
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
    world_size = deepspeed.comm.get_world_size()
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))
    engine, _, _, scheduler = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_batch_size": 2 * world_size, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 16, "warmup_max_lr": 0.02, "warmup_num_steps": 3}},
        "zero_optimization": {"stage": args.stage}})
    losses, rates, sizes = [], [], []
    generator = torch.Generator().manual_seed(50 + engine.global_rank)
    for accumulation in (1, 2, 4):
        engine.set_train_batch_size(2 * accumulation * world_size)
        sizes += [engine.train_batch_size(), engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()]
        for _ in range(4 * engine.gradient_accumulation_steps()):
            x = torch.randn(2, 6, generator=generator)
            loss = nn.functional.mse_loss(engine(x), x[:, :3] * 2)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            rates.append(scheduler.get_last_lr()[0])
    report(losses=losses, rates=rates, sizes=sizes, counts=[engine.global_steps, engine.global_samples, engine.micro_steps])


if __name__ == "__main__":
    main()
