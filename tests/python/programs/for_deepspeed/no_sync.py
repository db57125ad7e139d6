"""The micro-batches of a window but the last one without communication; gradients of this rank are read inside of the
scope."""
import argparse
import contextlib

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from torch import nn

from reporting import report

ACCUMULATION = 3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(7, 20), nn.GELU(), nn.Linear(20, 2))
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": ACCUMULATION, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}, "zero_optimization": {"stage": args.stage}})
    losses, gradients = [], []
    generator = torch.Generator().manual_seed(90 + engine.global_rank)
    for _ in range(5):
        for micro in range(ACCUMULATION):
            last = micro == ACCUMULATION - 1
            with contextlib.nullcontext() if last else engine.no_sync():
                x = torch.randn(2, 7, generator=generator)
                loss = nn.functional.cross_entropy(engine(x), (x[:, 0] > 0).long())
                engine.backward(loss)
                gradients += [safe_get_full_grad(parameter).norm().item() for parameter in model.parameters()]
            engine.step()
            losses.append(loss.item())
    report(losses=losses, gradients=gradients)


if __name__ == "__main__":
    main()
