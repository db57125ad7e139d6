"""Programs that combine two or three features, drawn from a seed: the model, its parallel axis, ZeRO stage, precision,
optimizer, schedule, recomputation, tiles, accumulation, clipping, where its states are, and what it does between
steps."""
import dataclasses
import random

from zoo import features as models

STEPS = 3
# The events that stand in a program by themselves, and those that end one engine and begin another.
EVENTS = ("evaluate", "lr", "gathered read", "gathered write", "rewind", "rewind without frozen")
RESUMES = ("resume", "resume at another stage")
# As a configuration's section and its like in plain PyTorch: its options.
OPTIMIZERS = {
    "AdamW": {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-3, "betas": [0.9, 0.95]},
    "Adam": {"lr": 3e-3, "weight_decay": 0.01, "eps": 1e-3, "betas": [0.9, 0.95]},
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "Adagrad": {"lr": 5e-3, "eps": 1e-3},
    "Lion": {"lr": 5e-4, "betas": [0.9, 0.99], "weight_decay": 0.1},
    "Lamb": {"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.1},
    "Muon": {"lr": 5e-3, "momentum": 0.9, "eps": 1e-3},
}
CLIENTS = {"AdamW": {**OPTIMIZERS["AdamW"]}, "SGD": {**OPTIMIZERS["SGD"], "nesterov": True}, "RMSprop": {"lr": 1e-3, "eps": 1e-2, "momentum": 0.5},
           "NAdam": {"lr": 3e-3, "eps": 1e-3}, "Adamax": {"lr": 3e-3, "eps": 1e-3}}
# Gradients of a step that a pipeline tells are the optimizer's moments, which these options make the gradients.
IN_STAGES = {"AdamW": {"betas": [0.0, 0.95]}, "Adam": {"betas": [0.0, 0.95], "weight_decay": 0.0}, "Lamb": {"betas": [0.0, 0.95]}, "Lion": {"betas": [0.9, 0.0]},
             "SGD": {"weight_decay": 0.0}}
SCHEDULES = ("LambdaLR", "section WarmupLR", "section StepLR", "section CosineAnnealingLR")


@dataclasses.dataclass(frozen=True)
class Program:
    """The features of one program. A field that has its default is a feature that it has not."""
    index: int
    ranks: int = 2
    names: str = "DeepSpeed"  # or "FSDP"
    model: str = "mlp"
    stage: int = 0
    gather: str = "auto"
    axis: str = ""  # "pipeline", "ulysses", "ring", "tensor", "tensor tokens", "MiCS", "hpZ"
    precision: str = "fp32"  # "bf16", "fp16", "low" (bf16 throughout), "autocast"
    optimizer: str = "AdamW"
    is_client: bool = False  # an object of torch.optim's rather than the configuration's section
    schedule: str = ""
    recompute: str = ""  # "full", "selective", "checkpoint"
    tiles: str = ""  # "mlp_tokens", "loss_tokens"
    accumulation: int = 1
    clip: float = 0.0
    home: str = ""  # "states", "weights" on disk
    under_init: bool = False
    event: str = ""

    @property
    def parts(self):
        """The ranks that share samples."""
        return min(self.ranks, 2) if self.axis in ("pipeline", "ulysses", "ring", "tensor", "tensor tokens") else 1

    @property
    def data_ranks(self):
        return self.ranks // self.parts

    @property
    def micro_batches(self):
        """Their number, of a rank and a step."""
        return 2 * self.parts if self.axis == "pipeline" else self.accumulation

    @property
    def options(self):
        """Options of the optimizer."""
        return {**(CLIENTS if self.is_client else OPTIMIZERS)[self.optimizer], **(IN_STAGES[self.optimizer] if self.axis == "pipeline" else {})}

    def describe(self):
        """In one line, what is not the default."""
        values = (f"{field.name} {getattr(self, field.name)}" for field in dataclasses.fields(self)
                  if field.name in ("model", "stage", "ranks") or (field.name != "index" and getattr(self, field.name) != field.default))
        return ", ".join(values)


def _draw_features(draw):
    """Two or three of them, in the order in which they narrow each other."""
    names = ["axis", "axis", "precision", "precision", "optimizer", "optimizer", "schedule", "recompute", "tiles", "accumulation", "clip", "home",
             "under_init", "event", "event"]
    draw.shuffle(names)
    return list(dict.fromkeys(names))[:draw.choice((2, 3, 3))]


def _axes(ranks):
    return ("pipeline", "ulysses", "ring", "tensor", "tensor tokens") + (("MiCS", "hpZ") if ranks == 4 else ())


def draw_program(seed, index):
    """Program `index` of `seed`, the same whichever others are drawn."""
    draw = random.Random(f"features/{seed}/{index}")
    if draw.random() < 0.12:
        return _draw_of_fsdp(draw, index)
    features = _draw_features(draw)
    ranks = 4 if "axis" in features and draw.random() < 0.3 else 2
    axis = draw.choice(_axes(ranks)) if "axis" in features else ""
    stage = {"hpZ": 3, "MiCS": draw.choice((1, 2, 3))}.get(axis, draw.choice((0, 1, 2, 3, 3)))
    names = models.OWN if axis == "pipeline" else models.MODELS if not axis or axis in ("MiCS", "hpZ") else models.MODELS[1:]
    # whose states a pipeline does not tell
    is_client = "optimizer" in features and draw.random() < 0.4 and axis != "pipeline"
    kinds = [name for name in (CLIENTS if is_client else OPTIMIZERS) if axis != "pipeline" or name in IN_STAGES]
    program = Program(
        index=index, ranks=ranks, model=draw.choice(names), stage=stage, axis=axis, gather=draw.choice(("auto", "copy")) if stage == 3 else "auto",
        precision=draw.choice(("bf16", "fp16", "low", "autocast")) if "precision" in features else "fp32", is_client=is_client,
        optimizer=draw.choice(kinds) if "optimizer" in features else draw.choice(("AdamW", "SGD")),
        schedule=draw.choice(SCHEDULES) if "schedule" in features else "",
        recompute=draw.choice(("full", "selective", "checkpoint")) if "recompute" in features else "",
        tiles=draw.choice(("mlp_tokens", "loss_tokens")) if "tiles" in features else "",
        accumulation=draw.choice((2, 3)) if "accumulation" in features else 1, clip=draw.choice((0.1, 1.0)) if "clip" in features else 0.0,
        home=draw.choice(("states", "weights") if stage == 3 else ("states",)) if "home" in features else "", under_init="under_init" in features,
        event=draw.choice(EVENTS + RESUMES) if "event" in features else "")
    return _sensible(program)


def _sensible(program):
    """Without what is no program: rounding that chooses an expert, a step of the rates beside a schedule."""
    changes = {}
    if program.precision != "fp32" and program.model not in models.IN_16_BITS:
        changes["model"] = "decoder"
    if program.event == "lr" and program.schedule:
        changes["event"] = "evaluate"
    if program.axis == "pipeline" and program.event == "gathered write":  # of one stage's parameter by its own ranks
        changes["event"] = "gathered read"
    if program.axis == "pipeline" and program.recompute == "full":  # which a PipelineModule says by its own option
        changes["recompute"] = "checkpoint"
    if program.axis == "pipeline" and program.precision == "autocast":
        changes["precision"] = "bf16"
    # Momentum in bf16: its differences are rounding.
    if program.axis == "pipeline" and program.precision == "low" and program.optimizer == "SGD":
        changes["optimizer"] = "AdamW"
    if program.optimizer == "Muon" and program.schedule.startswith("section"):
        changes["schedule"] = "LambdaLR"
    return dataclasses.replace(program, **changes)


def _draw_of_fsdp(draw, index):
    ranks = draw.choice((2, 2, 4))
    axis = "MiCS" if ranks == 4 else ""
    features = _draw_features(draw)
    program = Program(
        index=index, ranks=ranks, names="FSDP", model=draw.choice(models.MODELS), axis=axis, stage=3 if axis else draw.choice((2, 3, 3)), is_client=True,
        precision=draw.choice(("bf16", "low")) if "precision" in features else "fp32",
        optimizer=draw.choice(list(CLIENTS)) if "optimizer" in features else "AdamW", schedule="LambdaLR" if "schedule" in features else "",
        recompute="checkpoint" if "recompute" in features else "", accumulation=draw.choice((2, 3)) if "accumulation" in features else 1,
        clip=draw.choice((0.1, 1.0)) if "clip" in features else 0.0, event=draw.choice(("evaluate", "lr", "rewind", "resume")) if "event" in features else "")
    return _sensible(program)
