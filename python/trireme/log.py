"""Messages of the library and of this package, through Python's logging."""
import atexit
import logging

from ._native import core

_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)


def _make_logger():
    made = logging.getLogger("trireme")
    if not made.handlers:
        handler = logging.StreamHandler()  # stderr
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [trireme] %(message)s", "%Y-%m-%d %H:%M:%S"))
        made.addHandler(handler)
        made.setLevel((core.environment("TRIREME_LOG_LEVEL") or "INFO").upper())
        made.propagate = False
    return made


_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


def _is_rank_0():
    return next(filter(None, map(core.environment, _RANK_VARIABLES)), "0") == "0"


def _log(level, message):
    """Rank 0 informs for all, unless details are asked for; every rank warns."""
    if _LEVELS[level] != logging.INFO or _is_rank_0() or logger.isEnabledFor(logging.DEBUG):
        logger.log(_LEVELS[level], message)


logger = _make_logger()
core.set_log_sink(_log)
atexit.register(core.set_log_sink, None)
