"""A teacher without an optimizer, which only evaluates, and a student that learns from it: two engines, one of them not
trained."""
import argparse

import deepspeed
import torch
from torch import nn
from torch.nn import functional as F

from reporting import report


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(5)
    teacher = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 5))
    student = nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 5))
    teacher_engine, *_ = deepspeed.initialize(model=teacher, config={"train_micro_batch_size_per_gpu": 6})
    student_engine, *_ = deepspeed.initialize(model=student, model_parameters=student.parameters(), config={
        "train_micro_batch_size_per_gpu": 6, "gradient_clipping": 1.0, "zero_optimization": {"stage": args.stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.02, "torch_adam": True}}})
    teacher_engine.eval()
    student_engine.train()
    losses = []
    generator = torch.Generator().manual_seed(60 + student_engine.global_rank)
    for _ in range(10):
        x = torch.randn(6, 10, generator=generator)
        with torch.no_grad():
            target = F.softmax(teacher_engine(x) / 2.0, dim=-1)
        loss = F.kl_div(F.log_softmax(student_engine(x) / 2.0, dim=-1), target, reduction="batchmean") * 4.0
        student_engine.backward(loss)
        student_engine.step()
        losses.append(loss.item())
    report(losses=losses, training=[teacher_engine.module.training, student_engine.module.training])


if __name__ == "__main__":
    main()
