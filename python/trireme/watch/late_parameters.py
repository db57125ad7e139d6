"""Tells of parameters that a model gets after initialize(): nobody trains them, and ranks do not share them."""
import weakref

from torch.nn.modules import module as modules

from .. import parameters, ranks
from ..log import logger
from ..patches import Added, Patches

_engines = weakref.WeakKeyDictionary()  # by module of a model, weakly


def watch(engine):
    """From here on the modules of the engine's model are looked after."""
    PATCHES.apply()
    for module in engine.module.modules():
        _engines[module] = weakref.ref(engine)


def _is_watched(module):
    engine = _engines[module]() if module in _engines else None
    return engine is not None and not engine.is_spent


def _tell(module, name, parameter):
    if parameter is not None and _is_watched(module) and not parameters.is_numbered(parameter):
        logger.warning("%s got the parameter '%s' after initialize(): it is neither trained nor the same on all ranks; give models "
                       "their final form before", type(module).__name__, name)


def _look_into(module, name, child):
    if child is not None and _is_watched(module):
        for inner, parameter in child.named_parameters():
            _tell(module, f"{name}.{inner}", parameter)


PATCHES = Patches(__name__, "an engine is made", [
    Added("torch.nn.modules.module", "_global_parameter_registration_hooks", "tells of a parameter that an engine's model gets too late",
          lambda _: modules.register_module_parameter_registration_hook(_tell).remove),
    Added("torch.nn.modules.module", "_global_module_registration_hooks", "tells of a module with parameters that it gets too late",
          lambda _: modules.register_module_module_registration_hook(_look_into).remove),
], ranks.living)
