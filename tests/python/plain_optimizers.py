"""Lion, Lamb and Muon in plain PyTorch, by the formulas of docs/optim.md."""
import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(group["betas"][0] * moment + (1 - group["betas"][0]) * p.grad))
                moment.mul_(group["betas"][1]).add_(p.grad, alpha=1 - group["betas"][1])


def _moments(state, group, p):
    """Adam's, both corrected."""
    if not state:
        state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    state["step"] += 1
    state["exp_avg"].lerp_(p.grad, 1 - group["betas"][0])
    state["exp_avg_sq"].lerp_(p.grad.square(), 1 - group["betas"][1])
    return state["exp_avg"] / (1 - group["betas"][0] ** state["step"]), state["exp_avg_sq"] / (1 - group["betas"][1] ** state["step"])


class Lamb(Optimizer):
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                first, second = _moments(self.state[p], group, p)
                update = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * p
                sizes = p.norm(), update.norm()
                factor = (sizes[0] / sizes[1]).clamp(0.01, 10.0) if all(sizes) else 1.0
                p.sub_(group["lr"] * factor * update)


def _orthogonal(x):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (x.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.t() if tall else x
    for _ in range(5):
        square = x @ x.t()
        x = a * x + (b * square + c * square @ square) @ x
    return x.t() if tall else x


class Muon(Optimizer):
    """Muon of two groups: matrices, and what Adam updates."""

    def __init__(self, named, lr=1e-3, momentum=0.95, weight_decay=0.0, eps=1e-10):
        table = lambda name, p: p.dim() < 2 or any(part in name for part in ("embed", "lm_head", "wte", "wpe"))
        groups = [{"params": [p for name, p in named if table(name, p) == of_adam], "of_adam": of_adam} for of_adam in (False, True)]
        super().__init__([group for group in groups if group["params"]],
                         {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "betas": (0.9, 0.95), "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                if group["of_adam"]:
                    first, second = _moments(self.state[p], group, p)
                    p.sub_(group["lr"] * first / (second.sqrt() + group["eps"]))
                    continue
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                way = p.grad.lerp(momentum, group["momentum"])
                p.sub_(group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5 * _orthogonal(way))
