"""A model that is made in shards, with weights that a scope of GatheredParameters initialises and one that two modules
share."""
import argparse

import deepspeed
import torch
from torch import nn

from reporting import report


class Tower(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.enter = nn.Linear(6, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x) * self.scale
        return nn.functional.linear(x, self.enter.weight.t())  # of another module's parameter


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0,
              "optimizer": {"type": "Adam", "params": {"lr": 0.005, "torch_adam": True}},
              "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 100, "stage3_prefetch_bucket_size": 1000,
                                    "stage3_max_live_parameters": 2000, "stage3_max_reuse_distance": 2000}}
    deepspeed.init_distributed(dist_backend="gloo")
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=args.stage == 3):
        model = Tower(24, 3)
    deepspeed.zero.register_external_parameter(model, model.enter.weight)
    sums = []
    for index, (_, parameter) in enumerate(model.named_parameters()):
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0, enabled=args.stage == 3):
            generator = torch.Generator().manual_seed(index)
            if parameter.dim() > 1:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            else:
                parameter.data.copy_(torch.rand(parameter.shape, generator=generator) * 0.2 + 0.4)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=args.stage == 3):
        sums = [parameter.sum().item() for parameter in model.parameters()]
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    generator = torch.Generator().manual_seed(95 + engine.global_rank)
    for _ in range(8):
        x = torch.randn(4, 6, generator=generator)
        loss = nn.functional.mse_loss(engine(x), x.roll(1, 1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with deepspeed.zero.GatheredParameters(model.scale, enabled=args.stage == 3):
        scale = model.scale.detach().tolist()
    report(losses=losses, sums=sums, scale=scale)


if __name__ == "__main__":
    main()
