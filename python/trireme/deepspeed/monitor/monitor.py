"""The monitors of a configuration together."""
from ..missing import names_of
from .base import Monitor, plain, require, writes_here
from .comet import CometMonitor
from .csv_monitor import csvMonitor
from .tensorboard import TensorBoardMonitor
from .wandb import WandbMonitor

__getattr__ = names_of(__name__)

# Section: the attribute, the class, the package that it needs. Packages last: a run of theirs is to be seen only where
# files could be made.
_KINDS = {"tensorboard": ("tb_monitor", TensorBoardMonitor, None), "csv_monitor": ("csv_monitor", csvMonitor, None),
          "wandb": ("wandb_monitor", WandbMonitor, "wandb"), "comet": ("comet_monitor", CometMonitor, "comet_ml")}


class MonitorMaster(Monitor):
    """The monitors that a configuration (get_monitor_config()) switches on; rank 0 has them.

    Raises  ConfigError: a package is missing. IoError: a folder cannot be written. What a package raises itself.
    """

    def __init__(self, monitor_config):
        super().__init__(monitor_config)
        on = [section for section in _KINDS if getattr(monitor_config, section).enabled and writes_here()]
        for section in on:
            if _KINDS[section][2] is not None:
                require(_KINDS[section][2], section)
        for section, (attribute, kind, _) in _KINDS.items():
            setattr(self, attribute, kind(getattr(monitor_config, section)) if section in on else None)

    def write_events(self, event_list):
        if self.enabled and writes_here():
            events = plain(event_list)
            for attribute, *_ in _KINDS.values():
                if (monitor := getattr(self, attribute)) is not None:
                    monitor.write_events(events)
