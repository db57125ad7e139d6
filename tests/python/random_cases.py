"""Cases that random_training.py trains, drawn from a seed: their models, optimizers and losses."""
import dataclasses
import random

import torch
from zoo import models as zoo_models
from torch import nn
from torch.nn import functional

NATIVE = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam, "SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad}
STEPS_ITSELF = {"RMSprop": torch.optim.RMSprop, "RAdam": torch.optim.RAdam, "Adamax": torch.optim.Adamax,
                "Adadelta": torch.optim.Adadelta, "NAdam": torch.optim.NAdam, "AMSGrad": torch.optim.AdamW, "Damped": torch.optim.SGD}
# Models that take token ids, so that bf16 weights need no cast of the inputs, and have no routing, where a rounding
# chooses the way.
IN_BF16 = ("llama", "llama, tied", "gpt2", "t5", "bert", "lora", "checkpoint, reentrant", "checkpoint", "blocks",
           "blocks, checkpoint, reentrant")
# Compiling takes longer than all else together, and its caches grow with each model.
LEFT_OUT = ("blocks, compiled",)


@dataclasses.dataclass(frozen=True)
class Segment:
    """One engine's part of a case: it trains `steps` steps, and saves if another segment follows."""
    ranks: int
    stage: int
    gather: str
    accumulation: int
    steps: int
    scope: str  # "", "no_sync" or "coalesce": what is around the micro-batches of a window
    backward: str  # engine.backward(loss), "direct" loss.backward(), or that of engine.scale(loss)
    calls: str  # "engine" or "module": what the program calls
    destroys: bool  # at the end, or only lets the engine go
    more: dict  # of the configuration


@dataclasses.dataclass(frozen=True)
class Training:
    """A case: what is trained, how, and in which segments. `events` happen before the steps that they name."""
    index: int
    model: str
    shape: dict  # of a random MLP
    part: int  # a micro-batch is 1 / part of zoo_models.BATCH samples
    bf16: bool
    optimizer: str
    options: dict
    from_config: bool  # the optimizer is a section of the configuration
    two_groups: bool
    clip: float
    schedule: str
    segments: tuple
    events: dict
    may_refuse: bool = False  # initialize() may refuse the optimizer by name

    @property
    def steps(self):
        """The steps of all segments."""
        return sum(segment.steps for segment in self.segments)

    def describe(self):
        """In one line."""
        ways = "; ".join(f"{s.ranks} ranks, stage {s.stage} {s.gather}, {s.accumulation} x {s.steps} steps {s.scope} {s.backward} "
                         f"{s.calls} {s.more}" for s in self.segments)
        return (f"{self.model} {self.shape or ''} {'bf16' if self.bf16 else 'fp32'} {self.optimizer} {self.options} "
                f"{'of the configuration ' * self.from_config}{'two groups ' * self.two_groups}clip {self.clip} "
                f"{self.schedule} [{ways}] events {self.events}")


def _draw_shape(draw):
    # Few widths: torch keeps a compiled kernel for each shape that it has met, which would look like a leak.
    return {"widths": [draw.choice((1, 7, 33, 64)) for _ in range(draw.randint(1, 5))], "norm": draw.random() < 0.5,
            "bias": draw.random() < 0.7, "tied": draw.random() < 0.3, "frozen": draw.random() < 0.3,
            "branch": draw.choice(["", "", "by step", "by sample"]), "seed": draw.randrange(1000)}


def _draw_optimizer(draw):
    """(name, options, whether as a section of the configuration)."""
    if draw.random() < 0.35:
        name = draw.choice(list(STEPS_ITSELF))
        options = {"lr": 0.1 if name == "Adadelta" else draw.choice([1e-3, 3e-3])}
        if name == "RMSprop":
            options.update(momentum=draw.choice([0, 0.9]), centered=draw.random() < 0.3, eps=1e-4)
        elif name == "AMSGrad":
            options.update(amsgrad=True, eps=1e-4)
        elif name == "Damped":
            options.update(momentum=0.9, dampening=0.5, lr=0.02)
        else:
            options["eps"] = 1e-4
        return name, options, False
    name = draw.choice(list(NATIVE))
    options = {"lr": draw.choice([0.02, 0.1]) if name == "SGD" else draw.choice([1e-3, 5e-3]),
               "weight_decay": draw.choice([0.0, 0.0, 0.1])}
    if name == "SGD":
        options["momentum"] = draw.choice([0.0, 0.9])
    else:
        options["eps"] = draw.choice([1e-3, 1e-4])
    if name in ("Adam", "AdamW"):
        options["betas"] = draw.choice([[0.9, 0.999], [0.8, 0.95]])
    return name, options, draw.random() < 0.3


def _draw_segment(draw, steps, ranks):
    more = {"deterministic": True} if draw.random() < 0.15 else {}
    if draw.random() < 0.2:
        more["checkpoint"] = {"async_save": True}
    gather = draw.choice(["auto", "copy"])
    trireme = {"gather": gather}
    if draw.random() < 0.3:
        trireme["merge_below_bytes"] = draw.choice([0, 2048])
    if gather == "copy" and draw.random() < 0.3:
        trireme.update(live_bytes=1, prefetch_bytes=0, poison=True)
    more["trireme"] = trireme
    scope = "" if more.get("deterministic") else draw.choice(["", "", "no_sync", "coalesce"])
    return Segment(ranks=ranks, stage=draw.randrange(4), gather=gather, accumulation=draw.randint(1, 4), steps=steps, scope=scope,
                   backward=draw.choice(["engine", "engine", "direct", "scale"]), calls=draw.choice(["engine", "engine", "module"]),
                   destroys=draw.random() < 0.7, more=more)


def _draw_events(draw, segments):
    """{step: [event, ...]}; an event is a list that begins with its name."""
    events, first = {}, 0
    for segment in segments:
        for step in range(first, first + segment.steps):
            now = []
            if draw.random() < 0.15:
                now.append(["gathered edit", draw.randrange(100), draw.randrange(segment.ranks)])
            if draw.random() < 0.1:
                now.append(["write", draw.randrange(100)])
            if draw.random() < 0.1:
                now.append(["evaluate"])
            if draw.random() < 0.1:
                now.append(["lr", draw.choice([0.5, 0.9])])
            if draw.random() < 0.15 and segment.accumulation > 1 and not segment.scope and not segment.more.get("deterministic"):
                now.append(["zero_grad", draw.randrange(segment.accumulation - 1)])
            if now:
                events[step] = now
        first += segment.steps
    return events


def draw_training(seed, index, worlds):
    """Case `index` of `seed`, the same whichever others are drawn."""
    draw = random.Random(f"{seed}/{index}")
    names = [name for name in zoo_models.PROGRAMS if name not in LEFT_OUT]
    model = "mlp" if draw.random() < 0.5 else draw.choice(names)
    bf16 = draw.random() < 0.3 and (model == "mlp" or model in IN_BF16)
    optimizer, options, from_config = _draw_optimizer(draw)
    counts = [draw.randint(2, 4) for _ in range(draw.choice([1, 2, 2, 3]))]
    ranks = [draw.choice(worlds)] * len(counts) if draw.random() < 0.4 else [draw.choice(worlds) for _ in counts]
    segments = tuple(_draw_segment(draw, steps, size) for steps, size in zip(counts, ranks))
    schedule = draw.choice(["", "", "LambdaLR", "CosineAnnealingLR", "StepLR", "by a callable"])
    events = _draw_events(draw, segments)
    if schedule:  # it sets the rates itself
        events = {step: [event for event in now if event[0] != "lr"] for step, now in events.items()}
    shape = _draw_shape(draw) if model == "mlp" else {}
    return Training(index=index, model=model, shape=shape, part=draw.choice([2, 4]), bf16=bf16, optimizer=optimizer,
                    options=options, from_config=from_config, two_groups=draw.random() < 0.4,
                    clip=draw.choice([0.0, 0.1, 1.0]), schedule=schedule, segments=segments, events=events)


class Mlp(nn.Module):
    """Layers of odd widths with what a unit may hold: tied, frozen, scalar, unused and sometimes used parameters."""

    def __init__(self, shape, outputs=5):
        super().__init__()
        widths = [3 * 16 * 16, *shape["widths"]]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=shape["bias"]) for a, b in zip(widths, widths[1:]))
        # Normalised alone, a number is 0: the gradient of what made it is all rounding, which Adam and its kin blow up.
        self.norms = nn.ModuleList(nn.LayerNorm(b) if b > 1 else nn.Identity() for b in widths[1:]) if shape["norm"] else None
        self.square = nn.Linear(widths[-1], widths[-1])
        self.again = self.square if shape["tied"] else None
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.ones(3))
        self.branch = nn.Linear(widths[-1], widths[-1], bias=False) if shape["branch"] else None
        self.head = nn.Linear(widths[-1], outputs)
        if shape["frozen"]:
            self.layers[0].requires_grad_(False)

    def forward(self, pixels, branches):
        hidden = pixels.flatten(1)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden)
            hidden = torch.tanh(hidden if self.norms is None else self.norms[index](hidden))
        hidden = hidden + self.square(hidden) * self.gain
        if self.again is not None:
            hidden = torch.tanh(self.again(hidden))
        if branches:
            hidden = hidden + self.branch(hidden)
        return self.head(hidden)


def build(training, seed=7):
    """The model, in the dtype of plain PyTorch's run."""
    torch.manual_seed(seed)
    if training.model == "mlp":
        model = Mlp(training.shape).train()
    else:
        model = zoo_models.PROGRAMS[training.model].build().train()
    return model


def loss_of(training, model, step, micro):
    """The loss of micro-batch `micro` of a step; `model` is the module or an engine."""
    seed = step * 100 + micro
    if training.model != "mlp":
        return zoo_models.loss_of(training.model, model, seed, micro % training.part, training.part)
    generator = torch.Generator().manual_seed(seed)
    size = zoo_models.BATCH // training.part
    pixels, labels = torch.randn(size, 3, 16, 16, generator=generator), torch.randint(0, 5, (size,), generator=generator)
    # Under "copy" ranks use the same parameters in the same order, so a way must not depend on the sample.
    by_sample = training.shape["branch"] == "by sample" and all(s.gather != "copy" for s in training.segments)
    branches = bool(training.shape["branch"]) and (micro if by_sample else step) % 2 == 0
    logits = model(pixels.bfloat16() if training.bf16 else pixels, branches)
    return functional.cross_entropy(logits.float(), labels)


def parameter_groups(training, model):
    """Trainable parameters; with two groups those of one dim have no weight decay and half the learning rate."""
    parameters = zoo_models.trained(model)
    if not training.two_groups:
        return parameters
    matrices, others = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
    groups = [{"params": matrices}, {"params": others, "lr": training.options["lr"] / 2, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(training, parameters):
    """The torch.optim object."""
    kind = {**NATIVE, **STEPS_ITSELF}[training.optimizer]
    options = dict(training.options)
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    options.setdefault("weight_decay", 0.0)
    return kind(parameters, **options)


def scheduler_section(_training):
    """A configuration's; None: there is none."""
    return None


def make_schedule(training, optimizer):
    """A schedule of torch.optim.lr_scheduler; None where there is none."""
    rates = torch.optim.lr_scheduler
    if training.schedule in ("LambdaLR", "by a callable"):
        return rates.LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))
    if training.schedule == "CosineAnnealingLR":
        return rates.CosineAnnealingLR(optimizer, T_max=10)
    if training.schedule == "StepLR":
        return rates.StepLR(optimizer, step_size=2, gamma=0.5)
    return None
