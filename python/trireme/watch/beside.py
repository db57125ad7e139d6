"""Tells once of an optimizer that steps an engine's parameters beside the engine, or refuses it: it finds no gradients,
and changes nothing."""
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import parameters, ranks
from ..errors import StateError
from ..log import logger
from ..patches import Added, Patches

_told = False


def _tell(optimizer, _args, _kwargs):
    global _told  # pylint: disable=global-statement
    if getattr(optimizer, "steps_engine", False) or not (living := ranks.living()):
        return
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for engine in living:
        if engine.steps_otherwise and not set(stepped).isdisjoint(engine.module.parameters()):
            raise StateError(f"{type(optimizer).__name__}.step(): {engine.steps_otherwise}")
    if not _told and any(map(parameters.is_numbered, stepped)):
        _told = True
        logger.warning("%s.step() changes nothing: the engine takes the gradients of its parameters. Call engine.step(), and give the optimizer "
                       "to initialize(optimizer=…)", type(optimizer).__name__)


PATCHES = Patches(__name__, "an engine is made", [
    Added("torch.optim.optimizer", "_global_optimizer_pre_hooks", "tells of an optimizer that steps an engine's parameters beside the engine, or refuses it",
          lambda _: register_optimizer_step_pre_hook(_tell).remove),
], ranks.living)
