"""DeepSpeed's names for what lies elsewhere in this package."""
from .. import checkpointing as activation_checkpointing, zero
from ..missing import names_of
from ..optimizer_kinds import DeepSpeedOptimizer, ZeROOptimizer
from . import config, engine, lr_schedules, sections, torch_autocast, utils

__getattr__ = names_of(__name__)
