"""Who advances the learning rate: the engine's own schedule, or a scheduler of the program's."""
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


def make_client_schedule(scheduler, optimizer):
    """A scheduler object as it is, or what a callable makes of the optimizer."""
    if scheduler is None or hasattr(scheduler, "step"):
        return scheduler
    if callable(scheduler):
        return scheduler(optimizer)
    raise ConfigError(f"lr_scheduler: {type(scheduler).__name__} is neither a scheduler nor a callable that makes one of the optimizer")
