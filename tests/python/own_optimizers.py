"""Optimizers as programs write them, for tests: they wrap others, keep what they need in odd places, or cannot be
sharded."""
import torch
from torch.optim import Optimizer


class Lookahead(Optimizer):
    """Around another optimizer, whose groups it shares; slow weights are made late."""

    def __init__(self, optimizer, every=3, alpha=0.5):
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer, self.every, self.alpha = optimizer, every, alpha
        self.param_groups = optimizer.param_groups
        self.state = {}
        self.fast_state = optimizer.state
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        """The wrapped one's, and every few steps halfway back to the slow weights."""
        for group in self.param_groups:
            for p in group["params"]:
                self.state.setdefault(p, {}).setdefault("slow", p.detach().clone())
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            group["counter"] += 1
            if group["counter"] >= self.every:
                group["counter"] = 0
                for p in group["params"]:
                    slow = self.state[p]["slow"]
                    slow.add_(p - slow, alpha=self.alpha)
                    p.copy_(slow)
        return loss


class EarlyLookahead(Lookahead):
    """With the slow weights of its constructor, in a dict of its own."""

    def __init__(self, optimizer, every=2, alpha=0.5):
        super().__init__(optimizer, every, alpha)
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}
        self.looks = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.looks += 1
        if self.looks % self.every == 0:
            for p, slow in self.slow.items():
                if p.grad is not None:
                    slow.add_(p - slow, alpha=self.alpha)
                    p.copy_(slow)
        return loss


class ScheduleFree(Optimizer):
    """SGD with iterates averaged as schedule-free optimizers do: groups count in `k` and `weight_sum`; eval() gives the
    average."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "weight_sum": 0.0, "train_mode": True})

    @torch.no_grad()
    def eval(self):
        """Weights become the average."""
        for group in self.param_groups:
            if group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])
                group["train_mode"] = False

    @torch.no_grad()
    def train(self):
        """And back."""
        for group in self.param_groups:
            if not group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["beta"])
                group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure=None):
        """One step of z, and of the weights between it and the average."""
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() before step()")
            weight = (group["k"] + 1) ** 0.5
            group["weight_sum"] += weight
            share = weight / group["weight_sum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, share)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


class Distance(Optimizer):
    """As Prodigy: the learning rate grows with `d`, a number that the whole group makes."""

    def __init__(self, params, lr=0.5, d=1e-2):
        super().__init__(params, {"lr": lr, "d": d})

    @torch.no_grad()
    def step(self, closure=None):
        """Estimates how far it is, then goes."""
        for group in self.param_groups:
            far, size = 0.0, 1e-8
            for p in group["params"]:
                if p.grad is None:
                    continue
                begin = self.state[p].setdefault("begin", p.detach().clone())
                far += (p.grad * (begin - p)).sum().item()
                size += p.grad.abs().sum().item()
            group["d"] = max(group["d"], far / size)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * group["d"])


class Counting(Optimizer):
    """Its count stands in an attribute, its average in a dict of its own, and a warm-up follows the count."""

    def __init__(self, params, lr=0.1, beta=0.8):
        super().__init__(params, {"lr": lr, "beta": beta})
        self.t, self.average = 0, {}

    @torch.no_grad()
    def step(self, closure=None):
        """Momentum with a warm-up of 4 steps."""
        self.t += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.average.setdefault(p, torch.zeros_like(p))
                    average.lerp_(p.grad, 1 - group["beta"])
                    p.sub_(average, alpha=group["lr"] * min(1.0, self.t / 4))


class ThreeBetas(Optimizer):
    """As Adan and AdEMAMix: three betas, no eps needed; numbers of a parameter as tensors of shape [1]."""

    def __init__(self, params, lr=0.05, betas=(0.9, 0.8, 0.7), eps=0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        """The sum of three averages."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update({f"m{i}": torch.zeros_like(p) for i in range(3)}, power=torch.ones(1), step=0)
                state["step"] += 1
                state["power"] *= group["betas"][0]
                for i, beta in enumerate(group["betas"]):
                    state[f"m{i}"].lerp_(p.grad, 1 - beta)
                    p.sub_(state[f"m{i}"] / (1 - state["power"].item() + group["eps"]), alpha=group["lr"] / 3)


class Normed(Optimizer):
    """Gradients by their norm, parameter by parameter: right on whole parameters alone."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        """Steps of unit length, parameter by parameter."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + 1e-6), alpha=group["lr"])


class ByDims(Optimizer):
    """Decays matrices alone, by the number of their dims."""

    def __init__(self, params, lr=0.05, decay=0.1):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        """SGD."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if p.dim() > 1:
                        p.mul_(1 - group["lr"] * group["decay"])
                    p.sub_(p.grad, alpha=group["lr"])


class Marked(Optimizer):
    """Reads a mark that the program has put on parameters."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        """SGD, of marked parameters at twice the rate."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * (2 if getattr(p, "is_fast", False) else 1))


class HeldElsewhere:
    """A list of parameters that is no optimizer's."""

    def __init__(self, parameters):
        self.parameters = list(parameters)


class Indirect(Optimizer):
    """Moves what a helper of its holds, not what stands in param_groups."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.held = HeldElsewhere(p for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def step(self, closure=None):
        """SGD."""
        for p in self.held.parameters:
            if p.grad is not None:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


class Listed(Lookahead):
    """Slow weights in a list, beside the groups."""

    def __init__(self, optimizer, every=3, alpha=0.5):
        super().__init__(optimizer, every, alpha)
        self.slow_weights = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]


class Wanting(Optimizer):
    """Asks for a closure, but only in step() itself."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        """As SAM."""
        assert closure is not None, "Wanting needs a closure"


class Idle(Optimizer):
    """Moves nothing."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        """Nothing."""
