"""The base of every monitor."""
import abc
import importlib.util

from ... import ranks
from ...errors import ConfigError, ShapeError
from ...log import logger


def writes_here():
    """Whether this rank writes events: rank 0 does, as does a program that has joined no others."""
    return not ranks.is_joined() or ranks.world().rank == 0


def plain(events):
    """[(name, value, x)] as (text, float, int) each. Raises ShapeError: another form."""
    result = []
    for event in events:
        try:
            name, value, x = event
            if not isinstance(name, str):
                raise TypeError
            result.append((name, float(value), int(x)))
        except (TypeError, ValueError, RuntimeError):
            raise ShapeError(f"write_events: an event is {event!r:.80}; expected (name, number, samples or steps so far)") from None
    return result


def require(package, section):
    """Raises ConfigError: `package`, through which the section's events go, is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"`{section}.enabled` = true needs the package {package}; pip install {package}, or set it to false")


class Monitor(abc.ABC):
    """A place for events, which rank 0 writes."""

    @abc.abstractmethod
    def __init__(self, monitor_config):
        self.monitor_config = monitor_config
        self.enabled = bool(monitor_config.enabled)

    @abc.abstractmethod
    def write_events(self, event_list):
        """Takes events (name, value, x): x is the number of samples, or of steps, so far."""


class PackageMonitor(Monitor):
    """A monitor that hands events to a package of Python, whose errors do not end the training."""

    section = ""
    _has_failed = False

    def write_events(self, event_list):
        if not self.enabled or not writes_here():
            return
        try:
            self._write(plain(event_list))
        except ShapeError:
            raise
        except Exception as error:  # pylint: disable=broad-exception-caught
            if not self._has_failed:
                self._has_failed = True
                logger.warning("%s: events are lost, and training goes on: %s: %s", self.section, type(error).__name__, error)

    @abc.abstractmethod
    def _write(self, events):
        """Those of plain()."""
