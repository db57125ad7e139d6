"""States of an optimizer that the library steps, as torch's state_dict() has them: whole tensors, the same on every rank."""
import itertools

import torch

from .._native import core
from ..errors import ShapeError, StateError, UnsupportedError
from .tensors import ShardedParameter

_HAS_STEP = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)  # torch's state of a parameter has its count of steps
_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks",
          "_optimizer_load_state_dict_post_hooks")
_FIX = "save them with the weights by trireme.fsdp.save_checkpoint(model, optimizer, folder), and load that by load_checkpoint()"


def check(call, engine, optimizer):
    """Raises UnsupportedError: `optimizer` steps itself, so that its states are its own, or has hooks that would see none."""
    if engine.client_steps is not None:
        raise UnsupportedError(f"{call}: {type(optimizer).__name__} steps itself here, on parts of parameters, and its states are not put together; {_FIX}")
    if any(vars(optimizer).get(name) for name in _HOOKS):
        raise UnsupportedError(f"{call}: hooks of state_dict() and load_state_dict() of {type(optimizer).__name__} are not called here; call them yourself")


def of(optimizer, has_all):
    """{position of a parameter: its states}; with `has_all` also of those that no step has changed. Collective."""
    has_all = has_all or _from_start(optimizer)
    everything = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    shown = {index: parameter for index, parameter in enumerate(everything) if isinstance(parameter, ShardedParameter) and _is_shown(optimizer, parameter, has_all)}
    return {index: _of_parameter(optimizer, parameter) for index, parameter in shown.items()}


def _from_start(optimizer):
    """Whether torch's has states before the first step, of frozen parameters, too."""
    return isinstance(optimizer, torch.optim.Adagrad)


def _is_shown(optimizer, parameter, has_all):
    if not parameter.requires_grad:
        return _from_start(optimizer)
    return core.optimizer_state_names(parameter) and (has_all or core.step_count(parameter))


def _parameters(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if isinstance(parameter, ShardedParameter)]


def _of_parameter(optimizer, parameter):
    if not parameter.requires_grad:
        return {"step": torch.zeros(()), "sum": torch.zeros(parameter.shape)}
    values = {"step": torch.tensor(float(core.step_count(parameter)))} if isinstance(optimizer, _HAS_STEP) else {}
    return values | {name: core.safe_get_full_optimizer_state(parameter, name) for name in core.optimizer_state_names(parameter)}


def names(optimizer):
    """{parameter: {name of a state: None}}."""
    step = ["step"] if isinstance(optimizer, _HAS_STEP) else []
    return {parameter: dict.fromkeys([*step, *core.optimizer_state_names(parameter)]) for parameter in _parameters(optimizer) if parameter.requires_grad}


def load(optimizer, state_dict):
    """The states of state_dict(), the same on every rank, in the place of what there is. Collective.

    Raises  StateError, ShapeError: they do not fit; no state has changed then.
    """
    ids = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    everything = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    saved = {id_: parameter for id_, parameter in zip(ids, everything)}
    if strangers := set(state_dict["state"]) - set(saved):
        raise StateError(f"optimizer.load_state_dict(): states of {sorted(map(str, strangers))[:3]}, which are in no group of the file; give it a whole state_dict()")
    values = {parameter: state_dict["state"].get(id_) or {} for id_, parameter in saved.items()
              if parameter.requires_grad and isinstance(parameter, ShardedParameter)}
    expected = names(optimizer)
    for parameter, one in values.items():
        _check_fits(optimizer, parameter, one, set(expected[parameter]))
    with torch.no_grad():
        for parameter, one in values.items():
            for name in core.optimizer_state_names(parameter):
                value = one.get(name)
                core.safe_set_full_optimizer_state(parameter, torch.zeros(parameter.shape) if value is None else value, name)
    core.set_step_counts(list(values), [_count(one) for one in values.values()])


def _count(values):
    """Of SGD, whose states have none, whether there was a step."""
    return round(float(values["step"])) if "step" in values else int(bool(values))


def _check_fits(optimizer, parameter, values, expected):
    if not values:
        return
    if set(values) != expected:
        raise StateError(f"optimizer.load_state_dict(): states {sorted(map(str, values))} of a parameter of shape {list(parameter.shape)}, where "
                         f"{type(optimizer).__name__} with these hyperparameters has {sorted(expected)}; load what was saved of such an optimizer")
    for name, value in values.items():
        if name != "step" and value is not None and (not isinstance(value, torch.Tensor) or value.shape != parameter.shape):
            found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ShapeError(f"optimizer.load_state_dict(): state '{name}' has the shape {found}, and its parameter {list(parameter.shape)}: load whole "
                             "states, such as state_dict() here and a full state dict of PyTorch are")
