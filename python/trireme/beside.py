"""Tells once of an optimizer that steps an engine's parameters beside the engine: it finds no gradients, and changes nothing."""
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import comm, zero
from .optimizers import EngineOptimizer
from .utils.logging import logger

_told = False
_handle = None


def watch():
    """From here on steps of torch's optimizers are looked at."""
    global _handle  # pylint: disable=global-statement
    if _handle is None:
        _handle = register_optimizer_step_pre_hook(_tell)


def _tell(optimizer, _args, _kwargs):
    global _told  # pylint: disable=global-statement
    if _told or isinstance(optimizer, EngineOptimizer) or not any(not engine.is_spent for engine in comm.engines):
        return
    if any(zero.is_numbered(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        _told = True
        logger.warning("%s.step() changes nothing: the engine takes the gradients of its parameters. Call engine.step(), and give the optimizer "
                       "to initialize(optimizer=…)", type(optimizer).__name__)

