"""The log of collectives: DeepSpeed's comms_logger.

It counts what Trireme's groups do, which is what engines call, and the program's own calls of the functions here.
"""
import datetime
import functools
import inspect
import json
import time

import torch
import torch.distributed as dist

from ..._native import core
from ...errors import ConfigError
from ...ranks import world
from ..utils.logging import logger, warning_once

# torch.distributed's functions that are counted, under DeepSpeed's names: (the argument that has the bytes, the factor
# of the group's size that makes them those of the whole tensor).
_COUNTED = {"all_reduce": (0, False), "reduce": (0, False), "broadcast": (0, False), "send": (0, False), "recv": (0, False), "gather": (0, True),
            "scatter": (0, True), "all_gather": (1, True), "all_gather_into_tensor": (0, False), "all_to_all_single": (0, False),
            "reduce_scatter": (0, True), "reduce_scatter_tensor": (1, False), "barrier": (None, False)}
_OPTIONS = {"enabled": False, "verbose": False, "prof_all": True, "debug": False, "prof_ops": []}


def _rank():
    return dist.get_rank() if dist.is_initialized() else 0


def configure(deepspeed_config=None, enabled=None, prof_all=None, prof_ops=None, verbose=None, debug=None):
    """Switches the log on or off, by the section `comms_logger` of a DeepSpeedConfig, and by what is given beside it.

    Raises  ConfigError: `prof_ops` is no list of names of operations; the configuration is not changed.
    """
    # pylint: disable=too-many-arguments
    options = dict(_OPTIONS)
    if deepspeed_config is not None and deepspeed_config.comms_config.comms_logger_enabled:
        options |= deepspeed_config.comms_config.comms_logger.model_dump()
    given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    options |= {name: value for name, value in given.items() if value is not None}
    if isinstance(options["prof_ops"], str) or not all(isinstance(name, str) for name in options["prof_ops"]):
        raise ConfigError(f"comm.configure: prof_ops={options['prof_ops']!r}; give a list of operations, such as [\"all_reduce\"]")
    flags = {name: bool(options[name]) for name in ("enabled", "verbose", "prof_all", "debug")}
    core.configure_comms_log(_rank(), prof_ops=list(options["prof_ops"]), **flags)


def _bytes_of(value):
    tensors = value if isinstance(value, (list, tuple)) else [value]
    return max((tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, torch.Tensor)), default=0)


def counted(name):
    """torch.distributed's function of this name, which tells the log of its calls; None: it is not counted."""
    function = getattr(dist, name, None) if name in _COUNTED else None
    if function is None:
        return None
    place, is_part = _COUNTED[name]
    parameters = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, prof=False, log_name=name, debug=None, **kwargs):  # pylint: disable=unused-argument
        # DeepSpeed's arguments: `debug` names the caller there.
        if prof:
            warning_once("comm: prof=True counts no call by itself: prof_ops of comms_logger or of comm.configure() names operations, prof_all means all")
        given = parameters.bind(*args, **kwargs).arguments if core.has_listeners() else None
        if given is None or given.get("async_op"):
            return function(*args, **kwargs)
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        seconds = time.perf_counter() - begin
        ranks = dist.get_world_size(given.get("group"))
        size = 0 if place is None else _bytes_of([*given.values()][place]) * (ranks if is_part else 1)
        core.tell_collective(_rank(), (name, log_name), size, ranks, seconds)
        return result

    return call


def _summary(rows):
    return {operation: {size: {"count": count, "ranks": ranks, "total_latency_ms": seconds * 1e3, "avg_latency_ms": seconds / count * 1e3,
                               "tput_avg_gbps": rate, "busbw_avg_gbps": bus_rate}
                        for name, size, ranks, count, seconds, _, rate, bus_rate in rows if name == operation}
            for operation in dict.fromkeys(row[0] for row in rows)}


def _stragglers(rows):
    """By operation and size: how much longer this rank's calls took than the rank's that took least.

    Collective; the log counts nothing of it, by its caller's name.
    """
    own = {json.dumps([name, size, ranks]): seconds for name, size, ranks, _, seconds, *_ in rows}
    of_ranks = [json.loads(text) for text in world().gather(json.dumps(own), caller="log_summary")]
    lines = {}
    for name, size, ranks, count, seconds, *_ in rows:
        least = min(of_rank.get(json.dumps([name, size, ranks]), seconds) for of_rank in of_ranks)
        lines.setdefault(name, {})[size] = {"count": count, "total_latency_ms": least * 1e3, "straggler_ms": (seconds - least) * 1e3}
    return lines


def log_summary(show_straggler=False, return_dict=False):
    """Rank 0 logs a table of all calls: counts, latencies and bandwidths by operation and size.

    A latency is from the call's begin on this rank to its end, so with the time until the other ranks came. With
    show_straggler all ranks call it, and the log also has what each line's fastest rank took. With return_dict returns
    {"summary", "straggler_analysis", "metadata"} as well.
    """
    rank = _rank()
    rows = core.comms_log_rows(rank)
    stragglers = _stragglers(rows) if show_straggler else None
    if rank == 0 and not rows:
        warning_once("comm.log_summary: nothing was counted; set comms_logger.enabled=true in the configuration, or call "
                     "comm.configure(enabled=True)")
    elif rank == 0:
        logger.info("%s", core.comms_log_table(rank))
        for operation, sizes in (stragglers or {}).items():
            for size, line in sizes.items():
                logger.info("%s of %d bytes: %.2f ms on the fastest rank, %.2f ms more on rank 0", operation, size, line["total_latency_ms"],
                            line["straggler_ms"])
    if not return_dict:
        return None
    about = {"world_size": dist.get_world_size() if dist.is_initialized() else 1, "rank": rank,
             "timestamp": datetime.datetime.now().isoformat()}
    return {"summary": _summary(rows), "straggler_analysis": stragglers, "metadata": about}


def has_comm_data():
    """Whether a call was counted."""
    return bool(core.comms_log_rows(_rank()))


def get_comm_operation_count():
    """Calls that were counted."""
    return sum(row[3] for row in core.comms_log_rows(_rank()))


def get_logged_comm_ops():
    """Names of the operations that were counted."""
    return list(dict.fromkeys(row[0] for row in core.comms_log_rows(_rank())))


def reset_log():
    """Forgets all calls."""
    core.clear_comms_log(_rank())
