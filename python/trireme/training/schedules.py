"""The learning rate's advance: by the engine's own schedule, or by a scheduler of the program's."""
import inspect

import torch

from .._native import core
from ..errors import ConfigError

# Types of a configuration's `scheduler` section that the library computes.
OWN_TYPES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


class EngineSchedule:
    """The configuration's schedule, which the engine advances after each step that was applied."""

    def __init__(self, engine):  # pylint: disable=super-init-not-called
        self._engine = engine
        self._momentum = core.Schedule(engine.resolved_config["scheduler"], [0.0] * max(engine.core.group_count, 1))

    optimizer = property(lambda self: self._engine.optimizer)

    @property
    def last_batch_iteration(self):
        """The steps that were applied, less one."""
        return self._engine.core.global_steps - self._engine.core.skipped_steps - 1

    def step(self, *args, **kwargs):
        """Nothing: the engine's step() advances it."""

    def get_lr(self):
        """The rates of the next step, by parameter group."""
        return self._engine.optimizer.rates() if self._engine.optimizer is not None else [self._engine.core.get_lr()]

    get_last_lr = get_lr

    def get_mom(self):
        """(beta1, beta2) of the next step, by parameter group; None where the schedule leaves them alone."""
        applied = self.last_batch_iteration + 1
        momenta = [self._momentum.momentum(applied, group) for group in range(self._engine.core.group_count)]
        return None if None in momenta else [(momentum, self._momentum.cycle_beta2) for momentum in momenta]

    def state_dict(self):
        """Nothing of its own: it follows the count of steps, which checkpoints hold."""
        return {}

    def load_state_dict(self, state_dict):
        """Nothing."""


def of_torch(section, optimizer_groups):
    """A callable that makes the scheduler of torch.optim.lr_scheduler that a `scheduler` section names; None: it names
    none.

    Raises  ConfigError: torch refuses the params. Tried on an optimizer of its own, before anything has changed.
    """
    kind = section.get("type") if isinstance(section, dict) else None
    if not isinstance(kind, str) or kind in OWN_TYPES or not hasattr(torch.optim.lr_scheduler, kind):
        return None
    make, params = getattr(torch.optim.lr_scheduler, kind), dict(section.get("params") or {})
    if not isinstance(make, type) or not issubclass(make, torch.optim.lr_scheduler.LRScheduler):
        return None
    stand_ins = [{"params": [torch.zeros(1)], "lr": float(group.get("lr", 1.0))} for group in optimizer_groups] or [{"params": [torch.zeros(1)]}]
    try:
        make(torch.optim.SGD(stand_ins, lr=1.0, momentum=0.5), **params)
    except Exception as error:
        raise ConfigError(f"config: `scheduler.params` is {params!r:.200}, and torch.optim.lr_scheduler.{kind} says {type(error).__name__}: {error}; "
                          "correct them, or pass lr_scheduler= to initialize()") from error
    return lambda optimizer: make(optimizer, **params)


def check(scheduler, client):
    """Raises ConfigError: no scheduler and no callable, or a scheduler object that steers another optimizer than
    initialize() was given."""
    if scheduler is not None and not hasattr(scheduler, "step") and not callable(scheduler):
        raise ConfigError(f"lr_scheduler: {type(scheduler).__name__} is neither a scheduler nor a callable that makes one of the optimizer")
    steered = getattr(scheduler, "optimizer", None)
    if steered is None or (client is not None and getattr(steered, "param_groups", None) is client.param_groups):
        return
    raise ConfigError(f"lr_scheduler: this {type(scheduler).__name__} steers another optimizer than initialize() was given; make it of that one, or "
                      "pass a callable that makes it of the optimizer")


def check_callable(scheduler, groups):
    """Tries a callable on an AdamW of its own with groups like these, before anything has changed: the engine's
    optimizer is there only when the model is the engine's.

    Raises  what the callable raises.
    """
    if scheduler is None or hasattr(scheduler, "step"):
        return
    stand_ins = [{"lr": 1.0, **group, "params": [torch.zeros(1)]} for group in groups] or [{"params": [torch.zeros(1)]}]
    scheduler(torch.optim.AdamW(stand_ins, lr=1.0))


def make_client_schedule(scheduler, optimizer):
    """A scheduler object as it is, or what a callable makes of the optimizer."""
    if scheduler is None:
        return None
    if hasattr(scheduler, "step"):
        return scheduler
    return scheduler(optimizer)


def arguments_of(scheduler):
    """Names of the arguments that its step() cannot do without, such as ReduceLROnPlateau's metrics."""
    if scheduler is None:
        return set()
    try:
        given = inspect.signature(scheduler.step).parameters.values()
    except (TypeError, ValueError):  # of a compiled class
        return set()
    return {p.name for p in given if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def check_arguments(scheduler, wanted, given):
    """Raises ConfigError, before a step that would not be followed by the schedule's."""
    for name in wanted - set(given or ()):
        raise ConfigError(f"{type(scheduler).__name__}.step() wants `{name}`: call engine.step(lr_kwargs={{\"{name}\": …}}), or step the scheduler "
                          "yourself and leave lr_scheduler= out of initialize()")
