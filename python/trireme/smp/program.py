"""The model and the optimizer that a program has made of smp's names, and the step function that runs."""
import contextlib
import dataclasses
import gc
import threading
import weakref

from ..errors import StateError, UnsupportedError


def _nobody():
    return None


class _Made:
    """Weak references."""

    model = optimizer = _nobody
    waiting = weakref.WeakKeyDictionary()  # state dicts of optimizers, which wait for the homes of tensors


@dataclasses.dataclass(frozen=True)
class Running:
    """A step function that runs on a micro-batch."""

    name: str
    is_probe: bool = False  # it runs until it calls the model, whose tensors have no homes yet


class _Here(threading.local):
    running = None


_here = _Here()


def set_model(model):
    """`model` is the program's. Raises UnsupportedError: it has another one."""
    if model_or_none() is not None:
        gc.collect()  # modules refer to themselves
    if model_or_none() is not None:
        raise UnsupportedError("smp.DistributedModel: this program has one already, and several are not there yet; put the modules into one, or delete the first")
    _Made.model = weakref.ref(model)


def model_or_none():
    """The program's DistributedModel; None: there is none."""
    return _Made.model()


def model(call):
    """The program's DistributedModel. Raises StateError: there is none, for `call`."""
    found = model_or_none()
    if found is None:
        raise StateError(f"{call}: there is no smp.DistributedModel; make one of the model, and keep it")
    return found


def set_optimizer(optimizer):
    """`optimizer` is the program's, the last that it has made."""
    _Made.optimizer = weakref.ref(optimizer)


def optimizer_or_none():
    """The program's DistributedOptimizer; None: there is none."""
    return _Made.optimizer()


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
