"""DeepSpeed's functions around the logger of this package."""
import logging

from ..._native import core
from ...log import logger
from ..missing import names_of

__getattr__ = names_of(__name__)

def log_dist(message, ranks=None, level=logging.INFO):
    """Logs on the given ranks alone; all of them with None or [-1]."""
    rank = int(core.environment("RANK") or 0)
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def print_rank_0(message, debug=False, force=False):  # pylint: disable=unused-argument
    """Prints on rank 0 alone."""
    if int(core.environment("RANK") or 0) == 0:
        print(message, flush=True)


def set_log_level_from_string(log_level_str, custom_logger=None):
    """Takes "debug", "info", "warning", "error" or "critical". Raises ValueError: another."""
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
