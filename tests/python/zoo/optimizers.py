"""Optimizers of torch and as programs write them: they wrap others, keep what they need in odd places, or cannot be
sharded. And Lion, Lamb and Muon in plain PyTorch, by the formulas of docs/optim.md."""
import torch
from torch.optim import Optimizer
import zoo
from zoo import parts


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


# By name: (what makes it of parameter groups and options, options to draw from, whether initialize() may refuse it by
# name).
_EPS = [1e-3, 1e-4]
KINDS = {
    "SGD": (torch.optim.SGD, {"lr": [0.02, 0.1], "momentum": [0.0, 0.9], "dampening": [0, 0, 0.5], "weight_decay": [0.0, 0.1], "maximize": [False, False, True],
                              "foreach": [None, True]}, False),
    "SGD, nesterov": (torch.optim.SGD, {"lr": [0.02, 0.05], "momentum": [0.5, 0.9], "nesterov": [True]}, False),
    "Adam": (torch.optim.Adam, {"lr": [1e-3, 5e-3], "betas": [(0.9, 0.999), (0.5, 0.7)], "eps": _EPS, "weight_decay": [0.0, 0.1],
                                "amsgrad": [False, True], "maximize": [False, False, True], "decoupled_weight_decay": [False, True]}, False),
    "AdamW": (torch.optim.AdamW, {"lr": [1e-3, 5e-3], "betas": [(0.9, 0.999), (0.5, 0.7)], "eps": _EPS, "weight_decay": [0.0, 0.1],
                                  "amsgrad": [False, True], "foreach": [None, True]}, False),
    "Adagrad": (torch.optim.Adagrad, {"lr": [1e-2], "lr_decay": [0, 0.1], "initial_accumulator_value": [0, 0.5], "eps": _EPS}, False),
    "RMSprop": (torch.optim.RMSprop, {"lr": [1e-3, 3e-3], "momentum": [0, 0.9], "centered": [False, True], "eps": _EPS, "weight_decay": [0, 0.1]}, False),
    "RAdam": (torch.optim.RAdam, {"lr": [3e-3], "eps": _EPS, "weight_decay": [0, 0.1], "decoupled_weight_decay": [False, True]}, False),
    "NAdam": (torch.optim.NAdam, {"lr": [3e-3], "eps": _EPS, "momentum_decay": [4e-3, 0.1]}, False),
    "Adamax": (torch.optim.Adamax, {"lr": [3e-3], "eps": _EPS, "betas": [(0.5, 0.7), (0.9, 0.99)]}, False),
    "Adadelta": (torch.optim.Adadelta, {"lr": [0.1], "rho": [0.8, 0.9], "eps": _EPS}, False),
    "ASGD": (torch.optim.ASGD, {"lr": [0.02], "t0": [2, 100], "lambd": [1e-4, 1e-2]}, False),
    "Rprop": (torch.optim.Rprop, {"lr": [1e-4]}, False),
    "Lookahead": (lambda groups, **options: Lookahead(torch.optim.SGD(groups, momentum=0.9, **options)), {"lr": [0.02, 0.05]}, False),
    "EarlyLookahead": (lambda groups, **options: EarlyLookahead(torch.optim.RMSprop(groups, eps=1e-3, **options), every=3), {"lr": [3e-3]}, False),
    "Lookahead twice": (lambda groups, **options: EarlyLookahead(Lookahead(torch.optim.AdamW(groups, eps=1e-3, **options))), {"lr": [3e-3]}, False),
    "ScheduleFree": (ScheduleFree, {"lr": [0.02, 0.05], "beta": [0.8, 0.9]}, False),
    "Counting": (Counting, {"lr": [0.02, 0.05], "beta": [0.5, 0.9]}, False),
    "ThreeBetas": (ThreeBetas, {"lr": [0.02], "betas": [(0.9, 0.8, 0.7), (0.5, 0.6, 0.7)]}, False),
    "Marked": (Marked, {"lr": [0.02]}, False),
    "Normed": (Normed, {"lr": [0.02]}, True),
    "Distance": (Distance, {"lr": [0.5]}, True),
    "ByDims": (ByDims, {"lr": [0.02]}, True),
    "Indirect": (Indirect, {"lr": [0.02]}, True),
    "Listed": (lambda groups, **options: Listed(torch.optim.SGD(groups, **options)), {"lr": [0.02]}, True),
    "Wanting": (Wanting, {"lr": [0.02]}, True),
    "Idle": (Idle, {"lr": [0.02]}, True),
    "Adafactor": (torch.optim.Adafactor, {"lr": [0.01]}, True),
    "LBFGS": (lambda groups, **options: torch.optim.LBFGS([p for g in groups for p in g["params"]], **options), {"lr": [0.1]}, True),
}

PROGRAMS = zoo.Collection("optimizers", parts.tokens, parts.next_token, sorted_by_words=False)


def _add(name, make, options):
    PROGRAMS.add(f"optimizer {name}", lambda: parts.Lm(layers=1), optimizer=None, optimizer_of=lambda trained: make([{"params": trained}], **options),
                 initialize=lambda own: {"optimizer": make([{"params": list(own.parameters())}], **options)})


for _name, (_make, _drawn, _) in KINDS.items():
    _add(_name, _make, {key: values[0] for key, values in _drawn.items()})
