"""Who advances the learning rate: the engine's own schedule, or a scheduler of the program's."""
import inspect

from .errors import ConfigError


class EngineSchedule:
    """The configuration's schedule, which the engine advances after each step that was applied."""

    def __init__(self, engine):
        self._engine = engine

    def step(self, *args, **kwargs):
        """Nothing: the engine's step() advances it."""

    def get_lr(self):
        """Of the next step, by parameter group."""
        return [self._engine.core.get_lr(group) for group in range(self._engine.core.group_count)]

    get_last_lr = get_lr

    def state_dict(self):
        """Nothing of its own: it follows the count of steps, which checkpoints hold."""
        return {}

    def load_state_dict(self, state_dict):
        """Nothing."""


def check(scheduler, client):
    """Raises ConfigError: a scheduler object that steers another optimizer than the one that initialize() was given."""
    steered = getattr(scheduler, "optimizer", None)
    if steered is None or (client is not None and getattr(steered, "param_groups", None) is client.param_groups):
        return
    raise ConfigError(f"lr_scheduler: this {type(scheduler).__name__} steers another optimizer than initialize() was given; make it of that one, or "
                      "pass a callable that makes it of the optimizer")


def make_client_schedule(scheduler, optimizer):
    """A scheduler object as it is, or what a callable makes of the optimizer."""
    if scheduler is None:
        return None
    if hasattr(scheduler, "step"):
        return scheduler
    if callable(scheduler):
        return scheduler(optimizer)
    raise ConfigError(f"lr_scheduler: {type(scheduler).__name__} is neither a scheduler nor a callable that makes one of the optimizer")


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
