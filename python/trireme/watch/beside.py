"""Tells once of an optimizer that steps an engine's parameters beside the engine: it finds no gradients, and changes
nothing."""
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import parameters, ranks
from ..log import logger
from ..patches import Added, Patches

_told = False


def _tell(optimizer, _args, _kwargs):
    global _told  # pylint: disable=global-statement
    if _told or getattr(optimizer, "steps_engine", False) or not any(not engine.is_spent for engine in ranks.engines):
        return
    if any(parameters.is_numbered(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        _told = True
        logger.warning("%s.step() changes nothing: the engine takes the gradients of its parameters. Call engine.step(), and give the optimizer "
                       "to initialize(optimizer=…)", type(optimizer).__name__)


PATCHES = Patches(__name__, "an engine is made", [
    Added("torch.optim.optimizer", "_global_optimizer_pre_hooks", "tells of an optimizer that steps an engine's parameters beside the engine",
          lambda _: register_optimizer_step_pre_hook(_tell).remove),
], ranks.living)
