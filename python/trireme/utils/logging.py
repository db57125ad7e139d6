"""Messages of the library and of this package, through Python's logging."""
import atexit
import logging
import os

from .._native import core
from ..missing import names_of

__getattr__ = names_of(__name__)

_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)


def _make_logger():
    made = logging.getLogger("trireme")
    if not made.handlers:
        handler = logging.StreamHandler()  # stderr
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [trireme] %(message)s", "%Y-%m-%d %H:%M:%S"))
        made.addHandler(handler)
        made.setLevel(os.environ.get("TRIREME_LOG_LEVEL", "INFO").upper())
        made.propagate = False
    return made


logger = _make_logger()
core.set_log_sink(lambda level, message: logger.log(_LEVELS[level], message))
atexit.register(core.set_log_sink, None)


def log_dist(message, ranks=None, level=logging.INFO):
    """Logs on the given ranks alone; all of them with None or [-1]."""
    rank = int(os.environ.get("RANK", "0"))
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def print_rank_0(message, debug=False, force=False):  # pylint: disable=unused-argument
    """Prints on rank 0 alone."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(message, flush=True)


def set_log_level_from_string(log_level_str, custom_logger=None):
    """Of "debug", "info", "warning", "error" or "critical". Raises ValueError: another."""
    level = logging.getLevelName(str(log_level_str).upper())
    if not isinstance(level, int):
        raise ValueError(f"{log_level_str} is not a valid log level")
    (custom_logger or logger).setLevel(level)


_seen = set()


def warning_once(message):
    """Warns, but not twice of the same."""
    if message not in _seen:
        _seen.add(message)
        logger.warning(message)


def log_dist_once(message, ranks=None, level=logging.INFO):
    """log_dist(), but not twice of the same."""
    if (message, level) not in _seen:
        _seen.add((message, level))
        log_dist(message, ranks, level)


logger.warning_once = warning_once
