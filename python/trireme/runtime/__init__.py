"""DeepSpeed's names for what lies elsewhere in this package."""
from .. import checkpointing as activation_checkpointing, zero
from ..missing import names_of
from . import config, engine, lr_schedules, sections, torch_autocast, utils

__getattr__ = names_of(__name__)


class DeepSpeedOptimizer:
    """The base of DeepSpeed's optimizer wrappers, for isinstance(); nothing here is one."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """The base of its ZeRO wrappers, likewise."""
