"""torch.autocast as the configuration's `torch_autocast` section switches it on; the engine does it, in its
forward()."""
import pydoc

import torch

from ... import ranks
from ..missing import names_of
from ..settings import DTYPES

__getattr__ = names_of(__name__)

LOWER_PRECISION_SAFE_MODULES = [torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d]


def _section(engine):
    return engine.resolved_config.get("torch_autocast") or {}


def init_autocast_params(engine, dtype, torch_autocast_lower_precision_safe_modules):
    """Accepted where it says what the engine's configuration says, which has done it already.

    Raises  NotImplementedError: another dtype, or autocast that the configuration does not switch on.
    """
    section = _section(engine)
    if not section.get("enabled") or DTYPES[section["dtype"]] is not dtype:
        raise NotImplementedError("init_autocast_params: set torch_autocast.enabled and .dtype in the configuration")


def is_autocast_initialized():
    """Whether an engine of this process has torch_autocast on."""
    return any(_section(engine).get("enabled") for engine in ranks.engines)


def get_default_autocast_lower_precision_modules():
    """The classes, dotted, whose parameters travel in the lower precision unless the configuration lists others."""
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in LOWER_PRECISION_SAFE_MODULES]


def _dtype_by_parameter():
    chosen = {}
    for engine in ranks.engines:
        section = _section(engine)
        if not section.get("enabled"):
            continue
        kinds = [pydoc.locate(name) for name in section["lower_precision_safe_modules"]]
        for module in engine.module.modules():
            if type(module) in kinds:
                chosen.update((id(p), DTYPES[section["dtype"]]) for p in module.parameters(recurse=False))
    return chosen


def has_comm_dtype(param):
    """Whether a parameter travels in the dtype of autocast rather than its own."""
    return id(param) in _dtype_by_parameter()


has_autocast_dtype = has_comm_dtype


def get_comm_dtype(param):
    """The dtype in which a parameter and its gradient travel."""
    return _dtype_by_parameter().get(id(param), param.dtype)


get_autocast_dtype = get_comm_dtype


def get_all_comm_dtypes(params):
    """Those of several parameters, a set."""
    chosen = _dtype_by_parameter()
    return {chosen.get(id(param), param.dtype) for param in params}
