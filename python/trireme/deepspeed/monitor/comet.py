"""An experiment of Comet, by the package comet_ml."""
import importlib

from ..missing import names_of
from .base import Monitor, PackageMonitor, require, writes_here

__getattr__ = names_of(__name__)

_STARTS_WITH = ("api_key", "workspace", "project", "experiment_key", "mode", "online")


class EventsLogScheduler:
    """Says of each name when its next value is due."""

    def __init__(self, samples_log_interval):
        self._interval = samples_log_interval
        self._last = {}

    def needs_logging(self, name, current_sample):
        """Whether it is the first value of `name`, or `samples_log_interval` samples or more after the last one that
        was due."""
        is_due = name not in self._last or current_sample - self._last[name] >= self._interval
        if is_due:
            self._last[name] = current_sample
        return is_due


class CometMonitor(PackageMonitor):
    """Begins an experiment, or goes on with one. Raises ConfigError: there is no comet_ml."""

    section = "comet"

    def __init__(self, monitor_config):
        super().__init__(monitor_config)
        self.samples_log_interval = monitor_config.samples_log_interval
        self.experiment = None
        self._due = EventsLogScheduler(self.samples_log_interval)
        if self.enabled and writes_here():
            require("comet_ml", self.section)
            start = {key: getattr(monitor_config, key) for key in _STARTS_WITH}
            self.experiment = importlib.import_module("comet_ml").start(**start)
            if monitor_config.experiment_name is not None:
                self.experiment.set_name(monitor_config.experiment_name)

    def _write(self, events):
        for name, value, x in events:
            if self._due.needs_logging(name, x):
                self.experiment.log_metric(name, value, step=x)
