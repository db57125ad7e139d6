"""LoRA: small trained matrices beside frozen ones. Shows the gradients of all parameters, and saves the trained ones
alone."""
import argparse
import os

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from torch import nn

from reporting import report


class LinearLayerLoRA(nn.Module):
    def __init__(self, linear, rank=2, scaling=2.0):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_right_weight = nn.Parameter(torch.randn(rank, linear.in_features) * 0.2)
        self.lora_left_weight = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.scaling = scaling
        self.weight.requires_grad = False
        self.bias.requires_grad = False

    def forward(self, x):
        lora = x @ self.lora_right_weight.t() @ self.lora_left_weight.t() * self.scaling
        return nn.functional.linear(x, self.weight, self.bias) + lora


def convert_linear_layer_to_lora(model):
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "head":
            model.set_submodule(name, LinearLayerLoRA(module))
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(3)
    model = nn.Sequential()
    for name, module in (("up", nn.Linear(8, 24)), ("act", nn.GELU()), ("down", nn.Linear(24, 8)), ("act2", nn.GELU()),
                         ("head", nn.Linear(8, 2))):
        model.add_module(name, module)
    model = convert_linear_layer_to_lora(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": args.stage}})
    losses, norms, frozen = [], [], 0
    generator = torch.Generator().manual_seed(engine.global_rank)
    for step in range(8):
        x = torch.randn(4, 8, generator=generator)
        loss = nn.functional.cross_entropy(engine(x), (x.sum(1) > 0).long())
        engine.backward(loss)
        for _, parameter in model.named_parameters():
            gradient = safe_get_full_grad(parameter)
            if gradient is None:
                frozen += 1
            elif step == 5:
                norms.append(gradient.norm().item())
        engine.step()
        losses.append(loss.item())
    masters = []
    for name, parameter in model.named_parameters():
        master = safe_get_full_fp32_param(parameter)
        moment = safe_get_full_optimizer_state(parameter, "exp_avg")
        assert (master is None) == (moment is None), name
        if master is not None:
            masters.append(master.abs().sum().item())
    engine.save_checkpoint(args.output_dir, tag="lora", exclude_frozen_parameters=True)
    deepspeed.comm.barrier()
    report(losses=losses, norms=norms, masters=masters if args.stage else [], frozen=[frozen],
           saved=[int(os.path.exists(os.path.join(args.output_dir, "latest")))])


if __name__ == "__main__":
    main()
