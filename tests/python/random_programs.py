"""Programs with optimizers, schedulers, parameter groups and buffers of their own, drawn from a seed: cases of
random_training.py as random_cases.py draws them, on a small model in fp32."""
import random

import random_cases
import torch
from zoo import models as zoo_models, optimizers
from random_cases import Training, loss_of as loss_of_case
from trireme.runtime import lr_schedules

_SECTIONS = {
    "WarmupLR": {"warmup_min_lr": 1e-4, "warmup_max_lr": 5e-3, "warmup_num_steps": 4, "warmup_type": "linear"},
    "WarmupCosineLR": {"total_num_steps": 10, "warmup_num_steps": 3},
    "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3, "cycle_second_step_size": 0},
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "CosineAnnealingLR": {"T_max": 8},
    "OneCycleLR": {"max_lr": 0.01, "total_steps": 20},
}
_SCHEDULES = ["", "", "LambdaLR", "CosineAnnealingLR", "StepLR", "by a callable", "OneCycleLR", "our WarmupLR", *(f"section {kind}" for kind in _SECTIONS)]


class Buffered(random_cases.Mlp):
    """With buffers that follow the step: one is written in place, one replaced, one first made in forward. The loss
    depends on them."""

    def __init__(self, shape):
        super().__init__(shape)
        self.replaces, self.at = shape["replaces"], -1
        self.register_buffer("in_place", torch.zeros(()))
        if self.replaces:
            self.register_buffer("replaced", torch.zeros(3))

    def forward(self, pixels, branches, step):  # pylint: disable=arguments-differ
        if torch.is_grad_enabled() and step != self.at:
            self.at = step
            self.in_place.mul_(0.5).add_(0.1 * (step % 3))
            if self.replaces:
                self.replaced = self.replaced * 0.5 + 0.1 * (step % 4)
        scale = 1 + self.in_place + (self.replaced.sum() if self.replaces else 0)
        return super().forward(pixels, branches) * scale


def draw_training(seed, index, worlds):
    """Program `index` of `seed`, the same whichever others are drawn."""
    draw = random.Random(f"program/{seed}/{index}")
    refuses = draw.random() < 0.15
    name = draw.choice([name for name, (_, _, may_refuse) in optimizers.KINDS.items() if may_refuse == refuses])
    options = {key: draw.choice(values) for key, values in optimizers.KINDS[name][1].items()}
    if name == "SGD" and not options["momentum"]:
        options["dampening"] = 0
    counts = [draw.randint(3, 5) for _ in range(1 if refuses else draw.choice([1, 2, 2, 3]))]
    segments = tuple(random_cases._draw_segment(draw, steps, draw.choice(worlds)) for steps in counts)  # pylint: disable=protected-access
    schedule = draw.choice(_SCHEDULES)
    has_momentum = "betas" in options or options.get("momentum") or name.startswith(("Lookahead", "RAdam", "NAdam"))
    if schedule.endswith("OneCycleLR") and not (has_momentum and len(options.get("betas", (0, 0))) == 2):
        schedule = "StepLR"  # torch's wants a momentum to cycle
    shape = {**random_cases._draw_shape(draw), "replaces": draw.random() < 0.5}  # pylint: disable=protected-access
    shape["frozen"] = False
    groups = draw.choice(["one", "two", "frozen", "options"])
    return Training(index=index, model="mlp", shape={**shape, "groups": groups, "tensor_lr": draw.random() < 0.2 and name in ("RMSprop", "SGD, nesterov")},
                    part=draw.choice([2, 4]), bf16=False, optimizer=name, options=options, from_config=False, two_groups=True,
                    clip=draw.choice([0.0, 0.1, 1.0]), schedule=schedule, segments=segments, events=_draw_events(draw, segments, schedule, name),
                    may_refuse=refuses)


def _draw_events(draw, segments, schedule, name):
    events, first = {}, 0
    for segment in segments:
        for step in range(first, first + segment.steps):
            now = []
            if draw.random() < 0.15:
                now.append(["freeze", draw.randrange(100)])
            if draw.random() < 0.15:
                now.append(["thaw"])
            if draw.random() < 0.1:
                now.append(["evaluate"])
            if draw.random() < 0.1 and not schedule:
                now.append(["lr", draw.choice([0.5, 0.9])])
            if draw.random() < 0.15:
                now.append(["option", "weight_decay", draw.choice([0.0, 0.05])])
            if draw.random() < 0.1 and name == "SGD, nesterov":
                now.append(["option", "nesterov", draw.random() < 0.5])
            if now:
                events[step] = now
        first += segment.steps
    return events


def build(training, seed=7):
    """The model, with the marks that `Marked` reads."""
    torch.manual_seed(seed)
    model = Buffered(training.shape).train()
    for parameter in model.square.parameters():
        parameter.is_fast = True
    if training.shape["groups"] == "frozen":
        model.layers[0].requires_grad_(False)
    return model


def loss_of(training, model, step, micro):
    """The loss of micro-batch `micro` of a step."""
    return loss_of_case(training, lambda pixels, branches: model(pixels, branches, step), step, micro)


def parameter_groups(training, model):
    """As the program gives them to its optimizer: a frozen group stands first."""
    way, trained = training.shape["groups"], zoo_models.trained(model)
    half = len(trained) // 2
    groups = [{"params": trained}] if way == "one" else [{"params": trained[:half]}, {"params": trained[half:], "lr": training.options["lr"] / 2}]
    if way == "frozen":
        groups.insert(0, {"params": list(model.layers[0].parameters())})
    if way == "options":
        more = {"SGD": {"nesterov": True, "momentum": 0.5, "dampening": 0}, "SGD, nesterov": {"nesterov": False}, "Adam": {"decoupled_weight_decay": True},
                "AdamW": {"amsgrad": True}, "RMSprop": {"momentum": 0.5}, "RAdam": {"betas": (0.5, 0.9)}}
        groups[-1].update(more.get(training.optimizer, {}))
    return groups


def make_optimizer(training, groups):
    """An optimizer of parameters or groups."""
    options = dict(training.options)
    if training.shape["tensor_lr"]:
        options["lr"] = torch.tensor(options["lr"])
        groups = [{**group, "lr": torch.tensor(group["lr"])} if "lr" in group else group for group in groups]
    return optimizers.KINDS[training.optimizer][0](groups, **options)


def scheduler_section(training):
    """For the configuration; None: there is none."""
    kind = training.schedule.removeprefix("section ")
    return {"type": kind, "params": _SECTIONS[kind]} if training.schedule.startswith("section ") else None


def make_schedule(training, optimizer):
    """The schedule of plain PyTorch, and a program's lr_scheduler where that is no section."""
    section = scheduler_section(training)
    if section is not None:
        of = lr_schedules if section["type"] in lr_schedules.VALID_LR_SCHEDULES else torch.optim.lr_scheduler
        return getattr(of, section["type"])(optimizer, **section["params"])
    if training.schedule == "our WarmupLR":
        return lr_schedules.WarmupLR(optimizer, **_SECTIONS["WarmupLR"])
    if training.schedule == "OneCycleLR":
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, **_SECTIONS["OneCycleLR"])
    return random_cases.make_schedule(training, optimizer)
