"""Tells once of an optimizer that steps an engine's parameters beside the engine: it finds no gradients, and changes
nothing."""
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import parameters, ranks
from ..log import logger

_told = False
_handle = None


def watch():
    """From here on steps of torch's optimizers are looked at."""
    global _handle  # pylint: disable=global-statement
    if _handle is None:
        _handle = register_optimizer_step_pre_hook(_tell)


def _tell(optimizer, _args, _kwargs):
    global _told  # pylint: disable=global-statement
    if _told or getattr(optimizer, "steps_engine", False) or not any(not engine.is_spent for engine in ranks.engines):
        return
    if any(parameters.is_numbered(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        _told = True
        logger.warning("%s.step() changes nothing: the engine takes the gradients of its parameters. Call engine.step(), and give the optimizer "
                       "to initialize(optimizer=…)", type(optimizer).__name__)

