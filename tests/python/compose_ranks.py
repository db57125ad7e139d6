"""Trains with each feature of Python programs under each setting, on the ranks that run this: compose_test.py starts it.

Prints a line of JSON, {feature: {setting: verdict}}: "yes", "refused: TEXT", or "flaw: TEXT" where it is another training. A
feature whose package is not installed has null.
"""
import contextlib
import dataclasses
import importlib.util
import json
import typing

import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.utils.checkpoint import checkpoint
from trireme.errors import Error

STEPS, ACCUMULATION, RATE, CLIP = 3, 2, 2e-3, 0.5
ROUNDING = 1e-5  # of fp32 sums in another order
SIXTEEN_BITS = 2e-2


@dataclasses.dataclass
class Setting:
    """A configuration's part. Relative to ZeRO 0 in fp32, losses and weights differ by `tolerance`; 0: not at all."""
    config: dict
    tolerance: float


def _stage(number, **more):
    return {"zero_optimization": {"stage": number, **more}}


_ON_CPU = {"device": "cpu"}
SETTINGS = {
    "ZeRO 0": Setting(_stage(0), 0),
    "ZeRO 1": Setting(_stage(1), 0),
    "ZeRO 2": Setting(_stage(2), ROUNDING),
    "ZeRO 3": Setting(_stage(3), ROUNDING),
    "ZeRO 3, copy": Setting({**_stage(3), "trireme": {"gather": "copy"}}, ROUNDING),
    "bf16": Setting({"bf16": {"enabled": True}}, SIXTEEN_BITS),
    "fp16": Setting({"fp16": {"enabled": True, "initial_scale_power": 8}}, SIXTEEN_BITS),
    "autocast": Setting({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, SIXTEEN_BITS),
    "offload": Setting(_stage(3, offload_optimizer=_ON_CPU, offload_param=_ON_CPU), ROUNDING),
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


def compiled(net):
    for block in net.blocks:
        block.compile(backend="aot_eager")
    return net


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
    """How a program with it differs. `tolerance`: of its losses and weights against a run without; None: another training."""
    tolerance: float | None = 0
    net: typing.Callable = lambda net: net
    optimizer: typing.Callable | None = None  # makes the program's own of the parameters
    beside: typing.Callable | None = None
    accumulates_by_no_sync: bool = False
    scales: bool = False  # by torch.amp.GradScaler
    in_stages: bool = False  # of a pipeline, one on each rank, so that only rank 0's data are used
    package: str = "torch"


FEATURES = {
    "torch.compile": Feature(tolerance=ROUNDING, net=compiled),
    "PEFT (LoRA)": Feature(tolerance=None, net=with_lora, package="peft"),
    "client optimizer": Feature(tolerance=None, optimizer=lambda parameters: torch.optim.NAdam(parameters, lr=RATE)),
    "DDP, process groups beside": Feature(beside=DistributedBeside),
    "no_sync": Feature(tolerance=ROUNDING, accumulates_by_no_sync=True),
    "torch.amp.GradScaler": Feature(scales=True),
    "PipelineModule": Feature(tolerance=None, in_stages=True),
    "torch.utils.checkpoint": Feature(net=lambda net: setattr(net, "checkpoints", True) or net),
}


@dataclasses.dataclass
class Outcome:
    """Of one run: rank 0's losses, and the trained weights."""
    losses: list
    weights: dict


def make_net(feature):
    torch.manual_seed(0)
    net = Net()
    torch.manual_seed(1)
    return feature.net(net)


def batch(number, rank, size):
    """Of one micro-batch on one rank."""
    generator = torch.Generator().manual_seed(number * size + rank)
    x = torch.randn(2, 8, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x.to(next(model.parameters()).dtype)).float(), y)


def trainable(net):
    return [p for p in net.parameters() if p.requires_grad]


def in_plain_pytorch(feature, size):
    """One process with the data of all ranks."""
    size = 1 if feature.in_stages else size
    net, losses = make_net(feature), []
    make = feature.optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=RATE))
    optimizer = make(trainable(net))
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(step * ACCUMULATION, (step + 1) * ACCUMULATION):
            for rank in range(size):
                loss = loss_of(net, *batch(number, rank, size))
                (loss / (size * ACCUMULATION)).backward()
                losses += [loss.item()] if rank == 0 else []
        nn.utils.clip_grad_norm_(trainable(net), CLIP)
        optimizer.step()
    if feature.in_stages:  # which tell the mean of a step
        losses = [sum(losses[at:at + ACCUMULATION]) / ACCUMULATION for at in range(0, len(losses), ACCUMULATION)]
    return Outcome(losses, {name: p.detach().clone() for name, p in net.named_parameters()})


def in_stages(net, config, size):
    """Of a PipelineEngine, with rank 0's data."""
    names = ["", "first", "blocks.0", "blocks.1", "last"]
    layers = [lambda x: x.to(net.first.weight.dtype), net.first, *net.blocks, net.last]
    loss_fn = lambda found, y: nn.functional.mse_loss(found.float(), y)
    module = trireme.PipelineModule(layers, num_stages=size, partition_method="uniform", loss_fn=loss_fn)
    engine, *_ = trireme.initialize(model=module, config=config)
    data = (batch(number, 0, 1) for number in range(STEPS * ACCUMULATION))
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    with trireme.zero.GatheredParameters(list(module.parameters())):
        own = {f"{names[int(name.partition('.')[0])]}.{name.partition('.')[2]}": p.float().tolist() for name, p in module.named_parameters()}
    weights = {name: torch.tensor(values) for text in engine.world.gather(json.dumps(own)) for name, values in json.loads(text).items()}
    engine.destroy()
    return Outcome(losses, weights)


def with_engine(feature, setting, rank, size):
    """The same through an engine."""
    net, losses = make_net(feature), []
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": ACCUMULATION, "gradient_clipping": CLIP,
              **SETTINGS[setting].config}
    if feature.optimizer is None:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 1e-2}}
    if feature.in_stages:
        return in_stages(net, config, size)
    engine, *_ = trireme.initialize(model=net, optimizer=feature.optimizer and feature.optimizer(trainable(net)), config=config)
    beside = feature.beside() if feature.beside else None
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if feature.scales else None
    for number in range(STEPS * ACCUMULATION):
        last = (number + 1) % ACCUMULATION == 0
        with engine.no_sync() if feature.accumulates_by_no_sync and not last else contextlib.nullcontext():
            loss = loss_of(engine, *batch(number, rank, size))
            engine.backward(loss if scaler is None else scaler.scale(loss))
        losses.append(loss.item())
        if beside:
            beside.between()
        if scaler is None:
            engine.step()
        elif last:
            scaler.step(engine.optimizer)
            scaler.update()
    with trireme.zero.GatheredParameters(list(net.parameters())):
        weights = {name: p.detach().float().clone() for name, p in net.named_parameters()}
    engine.destroy()
    return Outcome(losses, weights)


def difference(found, expected, tolerance):
    """Why `found` is another training; None: it is the same. Adam may turn the sign of an update whose gradient is near zero."""
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
        self.made = {}

    def of(self, feature, setting):
        """`feature` by name; None: without one."""
        if (feature, setting) not in self.made:
            try:
                self.made[feature, setting] = with_engine(FEATURES[feature] if feature else Feature(), setting, self.rank, self.size)
            except Error as error:
                self.made[feature, setting] = str(error)
        return self.made[feature, setting]

    def verdict(self, feature, setting):
        """Of rank 0 alone: a loss is one of its own."""
        found = self.of(feature, setting)
        if isinstance(found, str):
            return f"refused: {found}"
        tolerance = FEATURES[feature].tolerance
        if setting == "ZeRO 0":
            expected, allowed = in_plain_pytorch(FEATURES[feature], self.size), ROUNDING
        elif tolerance is None:
            expected, allowed = self.of(feature, "ZeRO 0"), SETTINGS[setting].tolerance
        else:
            expected, allowed = self.of(None, setting), tolerance and max(tolerance, SETTINGS[setting].tolerance)
        flaw = difference(found, expected, allowed)
        if flaw is None and tolerance is None and found.losses == self.of(None, setting).losses:
            flaw = "it makes no difference"
        return f"flaw: {flaw}" if flaw else "yes"


def main():
    runs = Runs()
    names = [name for name, feature in FEATURES.items() if importlib.util.find_spec(feature.package)]
    for setting in SETTINGS:
        for feature in (None, *names):
            runs.of(feature, setting)
    if runs.rank == 0:
        print(json.dumps({feature: {setting: runs.verdict(feature, setting) for setting in SETTINGS} if feature in names else None
                          for feature in FEATURES}))


if __name__ == "__main__":
    main()
