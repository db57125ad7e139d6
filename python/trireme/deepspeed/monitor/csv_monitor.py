"""CSV files, which the library writes."""
import os

from ..missing import names_of
from .base import Monitor
from .tensorboard import FileMonitor

__getattr__ = names_of(__name__)


class csvMonitor(FileMonitor):  # pylint: disable=invalid-name
    """A CSV file for each name of an event in output_path/job_name. Raises IoError: the folder cannot be written."""

    section = "csv_monitor"

    @property
    def log_dir(self):
        """The folder."""
        return os.path.join(self.output_path, self.job_name)
