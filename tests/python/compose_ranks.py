"""Trains with each feature of Python programs under each setting, and with each pair of features, on the ranks that run
this: compose_test.py starts it.

Prints a line of JSON: "settings", {feature: {setting: verdict}}; "pairs", {feature: {other feature: verdict}};
"compared", how many runs; "largest", the largest difference of a gradient in fp32. A verdict is "yes", "refused: TEXT",
or "flaw: TEXT" where it is another training. A feature whose package is not installed has null. Arguments name
features: each of them alone at ZeRO 3.
"""
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import sys
import typing

import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.utils.checkpoint import checkpoint
from trireme.errors import Error

STEPS, ACCUMULATION, RATE, CLIP = 2, 2, 2e-3, 0.5
# An AdamW whose first moment is the clipped gradient
ADAMW = {"lr": RATE, "weight_decay": 1e-2, "betas": (0.0, 0.95), "eps": 1e-3}
ROUNDING = 1e-5  # of fp32 sums in another order
SIXTEEN_BITS = 6e-2
CROSSED_AT = "ZeRO 3"


@dataclasses.dataclass
class Setting:
    """A configuration's part. Gradients, norms, losses and weights differ from plain PyTorch's by `tolerance`."""
    config: dict
    tolerance: float = ROUNDING


def _stage(number, **more):
    return {"zero_optimization": {"stage": number, **more}}


_ON_CPU = {"device": "cpu"}
SETTINGS = {
    "ZeRO 0": Setting(_stage(0)),
    "ZeRO 1": Setting(_stage(1)),
    "ZeRO 2": Setting(_stage(2)),
    "ZeRO 3": Setting(_stage(3)),
    "ZeRO 3, copy": Setting({**_stage(3), "trireme": {"gather": "copy"}}),
    "bf16": Setting({"bf16": {"enabled": True}}, SIXTEEN_BITS),
    "fp16": Setting({"fp16": {"enabled": True, "initial_scale_power": 8}}, SIXTEEN_BITS),
    "autocast": Setting({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, SIXTEEN_BITS),
    "offload": Setting(_stage(3, offload_optimizer=_ON_CPU, offload_param=_ON_CPU)),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden):
        """[batch, 16] -> [batch, 16]"""
        return hidden + self.down(nn.functional.gelu(self.up(hidden)))


class Net(nn.Module):
    """Two blocks; with `checkpoints`, backward computes them again, as in Hugging Face's models."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.checkpoints = False

    def forward(self, x):
        """[batch, 8] -> [batch, 1]"""
        hidden = self.first(x)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpoints else block(hidden)
        return self.last(hidden)


def compiled_by(backend):
    def compiled(net):
        net.blocks[0].compile(backend=backend)
        return net
    return compiled


class NotedNAdam(torch.optim.NAdam):
    """Keeps the gradients of the last step of the one that an engine steps, in the order of its parameters."""
    noted: typing.ClassVar = []

    def step(self, closure=None):
        NotedNAdam.noted[:] = [p.grad.clone() for group in self.param_groups for p in group["params"] if p.grad is not None]
        return super().step(closure)


def with_lora(net):
    import peft  # pylint: disable=import-outside-toplevel
    return peft.get_peft_model(net, peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=["up", "down"]))


class DistributedBeside:
    """Another model under DistributedDataParallel, and a process group of the program's own."""

    def __init__(self):
        self.group = dist.new_group()
        self.model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1), process_group=self.group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def between(self):
        self.optimizer.zero_grad()
        self.model(torch.full((2, 8), dist.get_rank() + 1.0)).sum().backward()
        self.optimizer.step()
        total = torch.ones(1)
        dist.all_reduce(total, group=self.group)
        assert total.item() == dist.get_world_size()


@dataclasses.dataclass
class Feature:
    """How a program with it differs from one without."""
    is_training: bool = False  # it is another training
    has_same_bits: bool = False  # as a run without
    net: typing.Callable = lambda net: net
    optimizer: typing.Callable | None = None  # makes the program's own of the parameters
    beside: typing.Callable | None = None
    accumulates_by_no_sync: bool = False
    scales: bool = False  # by torch.amp.GradScaler
    checkpoints: bool = False
    in_stages: bool = False  # of a pipeline, one on each rank, so that only rank 0's data are used
    package: str = "torch"


FEATURES = {
    "torch.utils.checkpoint": Feature(has_same_bits=True, checkpoints=True),
    "PEFT (LoRA)": Feature(is_training=True, net=with_lora, package="peft"),
    "torch.compile": Feature(net=compiled_by("aot_eager")),
    "client optimizer": Feature(is_training=True, optimizer=lambda parameters: NotedNAdam(parameters, lr=RATE, eps=1e-3)),
    "DDP, process groups beside": Feature(has_same_bits=True, beside=DistributedBeside),
    "no_sync": Feature(accumulates_by_no_sync=True),
    "torch.amp.GradScaler": Feature(scales=True),
    "PipelineModule": Feature(is_training=True, in_stages=True),
}
SLOW_FEATURES = {"torch.compile, inductor": Feature(net=compiled_by("inductor"))}


def together(*names):
    """The program that has all of these features; their nets are made in the order of FEATURES."""
    all_features = {**FEATURES, **SLOW_FEATURES}
    features = [all_features[name] for name in all_features if name in names]

    def net(made):
        for feature in features:
            made = feature.net(made)
        return made

    first = lambda attribute: next((value for feature in features if (value := getattr(feature, attribute))), None)
    return Feature(net=net, optimizer=first("optimizer"), beside=first("beside"), accumulates_by_no_sync=bool(first("accumulates_by_no_sync")),
                   scales=bool(first("scales")), checkpoints=bool(first("checkpoints")), in_stages=bool(first("in_stages")))


@dataclasses.dataclass
class Outcome:
    """The outcome of one run: rank 0's losses, the gradients and their norm of each step before clipping, and the
    trained weights."""
    losses: list
    weights: dict
    norms: list = dataclasses.field(default_factory=list)
    gradients: list = dataclasses.field(default_factory=list)

    def add_step(self, norm, gradients):
        self.norms.append(norm)
        self.gradients.append({name: gradient.detach().float().cpu().clone() for name, gradient in gradients.items()})


def make_net(feature):
    torch.manual_seed(0)
    net = Net()
    net.checkpoints = feature.checkpoints
    torch.manual_seed(1)
    return feature.net(net)


def batch(number, rank, size):
    """One micro-batch on one rank."""
    generator = torch.Generator().manual_seed(number * size + rank)
    x = torch.randn(2, 8, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x.to(next(model.parameters()).dtype)).float(), y)


def trainable(net):
    return [p for p in net.parameters() if p.requires_grad]


def named_trainable(net):
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def unclipped(gradient, norm):
    return gradient * max(1.0, (norm + 1e-6) / CLIP)


def in_plain_pytorch(feature, size):
    """One process with the data of all ranks."""
    size = 1 if feature.in_stages else size
    net = make_net(feature)
    outcome = Outcome([], {})
    make = feature.optimizer or (lambda parameters: torch.optim.AdamW(parameters, **ADAMW))
    optimizer = make(trainable(net))
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(step * ACCUMULATION, (step + 1) * ACCUMULATION):
            for rank in range(size):
                loss = loss_of(net, *batch(number, rank, size))
                (loss / (size * ACCUMULATION)).backward()
                outcome.losses += [loss.item()] if rank == 0 else []
        gradients = {name: p.grad.clone() for name, p in named_trainable(net).items()}
        outcome.add_step(nn.utils.clip_grad_norm_(trainable(net), CLIP).item(), gradients)
        optimizer.step()
    if feature.in_stages:  # which tell the mean of a step
        outcome.losses = [sum(outcome.losses[at:at + ACCUMULATION]) / ACCUMULATION for at in range(0, len(outcome.losses), ACCUMULATION)]
    outcome.weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    return outcome


def moment_of(parameter):
    return trireme.utils.safe_get_full_optimizer_state(parameter, "exp_avg")


def in_stages(feature, net, config, size):
    """The outcome of a PipelineEngine, with rank 0's data."""
    parts = [None, *(next(name for name, module in net.named_modules() if module is part) for part in (net.first, *net.blocks, net.last))]
    layers = [lambda x: x.to(net.first.weight.dtype), net.first, *net.blocks, net.last]
    loss_fn = lambda found, y: nn.functional.mse_loss(found.float(), y)
    module = trireme.PipelineModule(layers, num_stages=size, partition_method="uniform", loss_fn=loss_fn,
                                    activation_checkpoint_interval=int(feature.checkpoints))
    engine, *_ = trireme.initialize(model=module, optimizer=feature.optimizer, config=config)
    beside = feature.beside() if feature.beside else None
    data = (batch(number, 0, 1) for number in range(STEPS * ACCUMULATION))
    outcome = Outcome([], {})

    def of_all_stages(own):
        named = {f"{parts[int(name.partition('.')[0])]}.{name.partition('.')[2]}": value.float().tolist() for name, value in own.items()}
        return {name: torch.tensor(values) for text in engine.world.gather(json.dumps(named)) for name, values in json.loads(text).items()}

    for _ in range(STEPS):
        with engine.no_sync() if feature.accumulates_by_no_sync else contextlib.nullcontext():
            outcome.losses.append(engine.train_batch(data).item())
        if feature.scales:
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(torch.ones(()))
            scaler.step(engine.optimizer)
        if beside:
            beside.between()
        norm, own = engine.get_global_grad_norm(), named_trainable(module)
        if feature.optimizer is None:
            clipped = {name: moment_of(p) for name, p in own.items()}
        else:
            clipped = {name: g.view(p.shape) for (name, p), g in zip(own.items(), NotedNAdam.noted, strict=True)}
        outcome.add_step(norm, {name: unclipped(gradient, norm) for name, gradient in of_all_stages(clipped).items()})
    with trireme.zero.GatheredParameters(list(module.parameters())):
        outcome.weights = of_all_stages(dict(module.named_parameters()))
    engine.destroy()
    return outcome


def with_engine(feature, setting, rank, size):
    """The same through an engine."""
    net = make_net(feature)
    outcome = Outcome([], {})
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": ACCUMULATION, "gradient_clipping": CLIP,
              **SETTINGS[setting].config}
    if feature.optimizer is None:
        config["optimizer"] = {"type": "AdamW", "params": ADAMW}
    if feature.in_stages:
        return in_stages(feature, net, config, size)
    engine, *_ = trireme.initialize(model=net, optimizer=feature.optimizer and feature.optimizer(trainable(net)), config=config)
    beside = feature.beside() if feature.beside else None
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if feature.scales else None
    for number in range(STEPS * ACCUMULATION):
        last = (number + 1) % ACCUMULATION == 0
        with engine.no_sync() if feature.accumulates_by_no_sync and not last else contextlib.nullcontext():
            loss = loss_of(engine, *batch(number, rank, size))
            engine.backward(loss if scaler is None else scaler.scale(loss))
        outcome.losses.append(loss.item())
        if beside:
            beside.between()
        if scaler is not None and last:
            scaler.step(engine.optimizer)
            scaler.update()
        gradients = None
        if last and feature.optimizer is not None:
            gradients = {name: trireme.utils.safe_get_full_grad(p) for name, p in named_trainable(net).items()}
        if scaler is None:
            engine.step()
        if last:
            norm = engine.get_global_grad_norm()
            outcome.add_step(norm, gradients or {name: unclipped(moment_of(p), norm) for name, p in named_trainable(net).items()})
    with trireme.zero.GatheredParameters(list(net.parameters())):
        outcome.weights = {name: p.detach().float().clone() for name, p in net.named_parameters()}
    engine.destroy()
    return outcome


def distance(found, expected):
    """Relative to the norm of `expected`; a gradient of zeros, as LoRA's first, is one of zeros."""
    norm = expected.double().norm().item()
    far = (found.double() - expected.double()).norm().item()
    return far / norm if norm > 0 else far


def gradient_distance(found, expected):
    return max(distance(one[name], other[name]) for one, other in zip(found.gradients, expected.gradients, strict=True) for name in other)


def difference(found, expected, tolerance):
    """Why `found` is another training; None: it is the same."""
    for step, (one, other) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        if one.keys() != other.keys():
            return f"step {step} has gradients of other parameters: {sorted(one.keys() ^ other.keys())}"
        for name in other:
            if not distance(one[name], other[name]) <= tolerance:
                return f"step {step}: the gradient of {name} is another, by {distance(one[name], other[name])} of its norm"
        if not abs(found.norms[step] - expected.norms[step]) <= tolerance * expected.norms[step]:
            return f"step {step}: the norm is {found.norms[step]} and not {expected.norms[step]}"
    for index, (one, other) in enumerate(zip(found.losses, expected.losses, strict=True)):
        if not abs(one - other) <= tolerance * abs(other):
            return f"the loss of micro-batch {index} is {one} and not {other}"
    for name, other in expected.weights.items():
        one = found.weights[name]
        most = 0 if tolerance == 0 else STEPS * RATE if tolerance >= SIXTEEN_BITS else 10 * tolerance
        if (one - other).abs().max().item() > most:
            return f"{name} is another, by up to {(one - other).abs().max().item()}"
    return None


class Runs:
    """Runs with an engine, each made once. A run that is refused has the refusal's text in place of an outcome."""

    def __init__(self):
        trireme.init_distributed()
        self.rank, self.size = trireme.comm.world().rank, trireme.comm.world().size
        self.made, self.plain = {}, {}
        self.compared, self.largest = 0, 0.0

    def of(self, names, setting):
        """`names`: of its features."""
        if (names, setting) not in self.made:
            try:
                self.made[names, setting] = with_engine(together(*names), setting, self.rank, self.size)
            except Error as error:
                self.made[names, setting] = str(error)
        return self.made[names, setting]

    def in_plain_pytorch(self, names):
        """With those features that are another training."""
        names = tuple(name for name in names if name in FEATURES and FEATURES[name].is_training)
        if names not in self.plain:
            self.plain[names] = in_plain_pytorch(together(*names), self.size)
        return self.plain[names]

    def verdict(self, names, setting):
        """The verdict of rank 0 alone: a loss is one of its own."""
        found = self.of(names, setting)
        if isinstance(found, str):
            return f"refused: {found}"
        expected = self.in_plain_pytorch(names)
        flaw = difference(found, expected, SETTINGS[setting].tolerance)
        self.compared += 1
        if SETTINGS[setting].tolerance < SIXTEEN_BITS:
            self.largest = max(self.largest, gradient_distance(found, expected))
        others = tuple(name for name in names if not (name in FEATURES and FEATURES[name].has_same_bits))
        if flaw is None and others != names and not isinstance(self.made.get((others, setting), ""), str):
            flaw = difference(found, self.made[others, setting], 0)
        return f"flaw: {flaw}" if flaw else "yes"


def main():
    runs = Runs()
    chosen = tuple(sys.argv[1:])
    names = [name for name, feature in FEATURES.items() if importlib.util.find_spec(feature.package)]
    alone = [((name,), setting) for name in names for setting in SETTINGS] if not chosen else [((name,), CROSSED_AT) for name in chosen]
    pairs = [(pair, CROSSED_AT) for pair in itertools.combinations(names, 2)] if not chosen else []
    for setting in SETTINGS if not chosen else [CROSSED_AT]:
        runs.of((), setting)
    for combination in (*alone, *pairs):
        runs.of(*combination)
    if runs.rank == 0:
        settings = {name: None for name in FEATURES if not chosen}
        for (name,), setting in alone:
            settings[name] = {**(settings.get(name) or {}), setting: runs.verdict((name,), setting)}
        crossed = {}
        for (one, other), setting in pairs:
            crossed.setdefault(one, {})[other] = runs.verdict((one, other), setting)
        print(json.dumps({"settings": settings, "pairs": crossed, "compared": runs.compared, "largest": runs.largest}))


if __name__ == "__main__":
    main()
