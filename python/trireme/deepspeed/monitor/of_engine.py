"""The monitors of an engine, and what they are told."""
import json

from ... import errors
from .config import get_monitor_config
from .monitor import MonitorMaster


def open_for(engine):
    """Gives the engine `monitor`, a MonitorMaster, its `monitor_config`, and `summary_events`, the last step's.
    Collective where one is switched on.

    Raises, on every rank, what rank 0 does: ConfigError, IoError.
    """
    engine.summary_events = []
    engine.monitor_config = get_monitor_config(engine.config)
    engine.monitor = _open_together(engine.world, engine.monitor_config)


def tell_of_step(engine):
    """Tells them of the step that has ended: its loss, the learning rate of the next one, and the loss scale in
    fp16."""
    if engine.world.rank == 0:
        engine.summary_events = engine.core.take_step_events(engine.get_lr()[0])
        engine.monitor.write_events(engine.summary_events)


def _open_together(world, monitor_config):
    if not monitor_config.enabled:
        return MonitorMaster(monitor_config)
    master = raised = None
    try:
        master = MonitorMaster(monitor_config)
    except Exception as error:  # pylint: disable=broad-exception-caught
        raised = error
    told = next(filter(None, map(json.loads, world.gather(json.dumps(_told(raised))))), None)
    if told is not None:
        raise getattr(errors, told[0])(told[1]) from raised
    return master


def _told(error):
    """[class, text] of an error, for the other ranks."""
    if error is None:
        return None
    if isinstance(error, (errors.ConfigError, errors.IoError)):
        return [type(error).__name__, str(error)]
    return ["ConfigError", f"monitors of the configuration: {type(error).__name__}: {error}; mend it, or set `enabled` of `wandb` and `comet` to false"]
