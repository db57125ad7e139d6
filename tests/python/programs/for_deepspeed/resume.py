"""Saves in the middle, trains on, and then again from the checkpoint with a new engine: the losses are the same."""
import argparse

import deepspeed
import torch
from torch import nn

from reporting import report


def make(stage):
    torch.manual_seed(17)
    model = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3))
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 6, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.05, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 6}}})[0]


def train(engine, first, last):
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * engine.global_rank + step)
        x = torch.randn(6, 8, generator=generator)
        loss = nn.functional.cross_entropy(engine(x), x[:, :3].argmax(1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    engine = make(args.stage)
    losses = train(engine, 0, 5)
    engine.save_checkpoint(args.output_dir, client_state={"step": 5, "note": "in the middle"})
    losses += train(engine, 5, 8)
    engine = make(args.stage)
    path, client_state = engine.load_checkpoint(args.output_dir)
    assert path is not None and client_state["note"] == "in the middle"
    again = train(engine, client_state["step"], 8)
    report(losses=losses, again=again, rates=engine.get_lr(), steps=[engine.global_steps, engine.global_samples])


if __name__ == "__main__":
    main()
