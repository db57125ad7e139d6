"""Messages of the library and of this package, through Python's logging."""
import atexit
import logging
import os

from ._native import core

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
