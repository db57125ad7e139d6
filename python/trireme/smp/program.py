"""The models and optimizers that a program has made of smp's names, and the step function that runs."""
import contextlib
import dataclasses
import gc
import threading
import weakref

import torch

from ..errors import StateError, UnsupportedError


class _Made:
    """Weak references, in the order in which the program has made them."""

    models, optimizers = [], []
    had_several = False  # models at a time
    waiting = weakref.WeakKeyDictionary()  # state dicts of optimizers, which wait for the homes of tensors


@dataclasses.dataclass(frozen=True)
class Running:
    """A step function that runs on a micro-batch."""

    name: str
    is_probe: bool = False  # it runs until it calls the model, whose tensors have no homes yet


class _Here(threading.local):
    running = None


_here = _Here()


def add_model(model):
    """`model` is one of the program's from here on."""
    _Made.models = [*(reference for reference in _Made.models if reference() is not None), weakref.ref(model)]
    _Made.had_several = _Made.had_several or len(models()) > 1


def agreed_models(world):
    """models(), which are the same on all ranks where these run the same program. Collective where there were
    several."""
    if _Made.had_several:
        fewest, most = torch.tensor([len(models())]), torch.tensor([len(models())])
        world.all_reduce(fewest, "min")
        world.all_reduce(most, "max")
        if not torch.equal(fewest, most):  # one that nothing refers to is collected on some ranks already
            gc.collect()
    return models()


def models():
    """The program's DistributedModels that step functions may use, the first one first; not those of model.cpu()."""
    return [model for model in _living() if not model.is_plain]


def model(call):
    """The first of models(). Raises StateError: there is none, for `call`."""
    if found := models():
        return found[0]
    for plain in _living():
        plain.engine(call)
    raise StateError(f"{call}: there is no smp.DistributedModel; make one of the model, and keep it")


def partitioned_or_none():
    """One of models() whose tensors have homes: what they know of tensors they know of all models'. None: there is
    none."""
    return next((found for found in models() if found.partitioned), None)


def model_of(optimizer):
    """The model that `optimizer` steps; None: there is none. Raises UnsupportedError: there are several."""
    found = _models_of(optimizer)
    if len(found) > 1:
        raise UnsupportedError(f"smp.DistributedOptimizer: one optimizer over parameters of {len(found)} models is not there yet; make one for each, or put the modules into "
                               "one model")
    return found[0] if found else None


def add_optimizer(optimizer):
    """`optimizer` is one of the program's from here on."""
    _Made.optimizers = [*(reference for reference in _Made.optimizers if reference() is not None), weakref.ref(optimizer)]


def optimizer_of(model):
    """The DistributedOptimizer that the program has made last for `model`; None: there is none."""
    known = [found for reference in _Made.optimizers if (found := reference()) is not None]
    if len(models()) > 1:
        known = [optimizer for optimizer in known if _models_of(optimizer) == [model]]
    return known[-1] if known else None


def _models_of(optimizer):
    known = models()
    if len(known) <= 1:
        return known
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [found for found in known if any(id(parameter) in own for parameter in found.parameters())]


def _living():
    return [found for reference in _Made.models if (found := reference()) is not None]


def wait_with_states(optimizer, state_dict):
    """`optimizer` gets these states when tensors get their homes."""
    _Made.waiting[optimizer] = state_dict


def waiting_states(optimizer):
    """The states that wait_with_states() was given last; None: none."""
    return _Made.waiting.get(optimizer)


def take_waiting_states(optimizer):
    """waiting_states(), which wait no longer."""
    return _Made.waiting.pop(optimizer, None)


def running():
    """The Running of this thread; None: outside of a step function."""
    return _here.running


@contextlib.contextmanager
def run_of(step):
    """While it lasts, the Running `step` runs on this thread."""
    before, _here.running = _here.running, step
    try:
        yield
    finally:
        _here.running = before
