"""DeepSpeed's names for what lies elsewhere in this package."""
from .. import checkpointing as activation_checkpointing, zero
from . import config, engine, lr_schedules, torch_autocast, utils


class DeepSpeedOptimizer:
    """The base of DeepSpeed's optimizer wrappers, for isinstance(); nothing here is one."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """The base of its ZeRO wrappers, likewise."""
