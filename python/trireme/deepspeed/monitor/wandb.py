"""A run of Weights & Biases, by the package wandb."""
import importlib

from ..missing import names_of
from .base import Monitor, PackageMonitor, require, writes_here

__getattr__ = names_of(__name__)


class WandbMonitor(PackageMonitor):
    """Begins a run; `group`, `team` and `project` are wandb's group, entity and project. Raises ConfigError: there is
    no wandb."""

    section = "wandb"

    def __init__(self, monitor_config):
        super().__init__(monitor_config)
        self.group, self.team, self.project = monitor_config.group, monitor_config.team, monitor_config.project
        self._wandb = None
        if self.enabled and writes_here():
            require("wandb", self.section)
            self._wandb = importlib.import_module("wandb")
            self._wandb.init(project=self.project, group=self.group, entity=self.team)

    def log(self, data, step=None, commit=None):
        """wandb.log()."""
        if self._wandb is not None:
            self._wandb.log(data, step=step, commit=commit)

    def _write(self, events):
        for x in dict.fromkeys(x for *_, x in events):
            self._wandb.log({name: value for name, value, at in events if at == x}, step=x)
