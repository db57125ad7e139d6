"""One model trained again and again with new engines, as a notebook's cell does, and fp32 gradients changed before each
step."""
import argparse

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from torch import nn

from reporting import report


def train(model, rate, stage):
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": rate}}, "zero_allow_untested_optimizer": True})
    losses = []
    generator = torch.Generator().manual_seed(240 + engine.global_rank)
    for _ in range(4):
        x = torch.randn(4, 6, generator=generator)
        loss = nn.functional.mse_loss(engine(x), x.sin())
        engine.backward(loss)
        for parameter in model.parameters():
            safe_set_full_grad(parameter, safe_get_full_grad(parameter).clamp(-0.05, 0.05))
        engine.step()
        losses.append(loss.item())
    return engine, losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(24)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 6))
    losses, engine = [], None
    for rate in (0.5, 0.2, 0.1):
        engine, found = train(model, rate, args.stage)
        losses += found
    report(losses=losses, rates=engine.get_lr())


if __name__ == "__main__":
    main()
