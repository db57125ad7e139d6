"""A second initialize() of a module, without destroy(): the engine that it has ends, and the new one goes on with its
weights."""
import contextlib
import gc

import torch

from .. import ranks
from ..log import logger


def _of(model):
    """The living engines that train nothing but parameters of `model`, the oldest first. One without parameters, such
    as a pipeline's stage, is `model`'s where its module is a part of it."""
    parameters, modules = set(model.parameters()), set(model.modules())

    def is_models(engine):
        own = set(engine.module.parameters())
        return own <= parameters if own else engine.module in modules

    living = [engine for engine in list(ranks.engines) if not engine.is_spent and is_models(engine)]
    return sorted(living, key=lambda engine: engine.engine_number)


@contextlib.contextmanager
def thawed(model):
    """The new engine may train what an earlier one has frozen. Where initialize() is refused, it is frozen again."""
    frozen = [parameter for engine in _of(model) for parameter in engine.frozen_parameters]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    except BaseException:
        for parameter in frozen:
            parameter.requires_grad_(False)
        raise


def end(world, model):
    """Ends the earlier engines of `model`. Collective."""
    earlier = _of(model)
    fewest, most = torch.tensor([len(earlier)]), torch.tensor([len(earlier)])
    world.all_reduce(fewest, "min")
    world.all_reduce(most, "max")
    if not torch.equal(fewest, most):  # one that nothing refers to is collected on some ranks already
        gc.collect()
        earlier = _of(model)
    for engine in earlier:
        logger.warning("initialize: this module has an engine already, which ends here: it cannot be used any more. Call its destroy() before "
                       "initialize() to say so yourself")
        engine.frozen_parameters = []  # the new engine has said which of them it trains
        engine.destroy()
