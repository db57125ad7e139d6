"""The section `flops_profiler` as an object."""
from ..missing import names_of

__getattr__ = names_of(__name__)

_DEFAULTS = {"enabled": False, "recompute_fwd_factor": 0.0, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True,
             "output_file": None}


class DeepSpeedFlopsProfilerConfig:  # pylint: disable=too-few-public-methods
    """Attributes are the section's keys, with their defaults where the configuration has none."""

    def __init__(self, param_dict):
        given = param_dict.get("flops_profiler") or {}
        for key, default in _DEFAULTS.items():
            setattr(self, key, given.get(key, default))
