"""TensorBoard's event files, which the library writes."""
from ..._native import core
from ..missing import names_of
from .base import Monitor, plain, writes_here

__getattr__ = names_of(__name__)


class FileMonitor(Monitor):
    """Files in output_path/job_name."""

    section = ""

    def __init__(self, monitor_config):
        super().__init__(monitor_config)
        self.output_path, self.job_name = monitor_config.output_path, monitor_config.job_name
        self._files = core.FileMonitor(self.section, self.output_path, self.job_name) if self.enabled and writes_here() else None

    def write_events(self, event_list):
        if self._files is not None:
            self._files.write(plain(event_list))


class TensorBoardMonitor(FileMonitor):
    """An event file for TensorBoard in output_path/job_name. Raises IoError: it cannot be made."""

    section = "tensorboard"

    def write_events(self, event_list, flush=True):  # pylint: disable=unused-argument
        """Every event is with the system when this returns."""
        super().write_events(event_list)

    def flush(self):
        """Nothing: write_events() has done it."""

    @property
    def summary_writer(self):
        """Has add_scalar() and flush(), for programs that add events by it. None: off, or another rank."""
        return self if self._files is not None else None

    def add_scalar(self, tag, scalar_value, global_step=0):
        """One event."""
        self.write_events([(tag, scalar_value, global_step)])
