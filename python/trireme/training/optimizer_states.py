"""States of a program's optimizer, as torch's state_dict() has them: whole tensors, by position of a parameter.

They are the library's, or where the optimizer steps itself (`client`) those of its copy over parts of parameters. Each
function is given `is_own`, which tells whether a parameter is one of the engine here.
"""
import itertools

import torch

from .._native import core
from ..errors import ShapeError, StateError, UnsupportedError

_OF_TORCH = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)  # those with counts of steps
_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks",
          "_optimizer_load_state_dict_post_hooks")


def check(call, client, optimizer, fix):
    """Raises UnsupportedError, with what to do instead: `optimizer` keeps states in other places than its `state`, or
    has hooks that would see none."""
    if client is not None and (beside := client.stores_beside()):
        raise UnsupportedError(f"{call}: {type(optimizer).__name__} keeps states in `{beside[0]}`, beside its own `state`, where torch's state_dict() has none; {fix}")
    if any(vars(optimizer).get(name) for name in _HOOKS):
        raise UnsupportedError(f"{call}: hooks of state_dict() and load_state_dict() of {type(optimizer).__name__} are not called here; call them yourself")


def of(optimizer, is_own, has_all, client):
    """{position of a parameter: its states}; with `has_all` also of those that no step has changed. Collective."""
    everything = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    own = {index: parameter for index, parameter in enumerate(everything) if is_own(parameter)}
    if client is not None:
        stepped = {index: p for index, p in own.items() if p.requires_grad and client.forms(p) and (has_all or core.step_count(p))}
        return {index: of_client(client, parameter) for index, parameter in stepped.items()}
    has_all = has_all or has_from_start(optimizer)
    shown = {index: parameter for index, parameter in own.items() if _is_shown(optimizer, parameter, has_all)}
    return {index: _of_parameter(optimizer, parameter) for index, parameter in shown.items()}


def of_client(client, parameter):
    """The state of an optimizer that steps itself: numbers, such as NAdam's mu_product, as it keeps them; zeros before
    the first step."""
    own, count, values = client.state(parameter), core.step_count(parameter), {}
    for name, form in client.forms(parameter).items():
        if name == "step" or count == 0:
            values[name] = form.like(count, torch.zeros(parameter.shape))
            continue
        part = own.get(name)
        whole = core.whole_of_parts(parameter, torch.empty(0) if part is None else part).to(torch.float32 if part is None else part.dtype)
        if not whole.isnan().all():  # else the optimizer has not made it yet
            values[name] = whole if form.is_whole else form.like(whole.flatten()[0].item(), whole)
    return values


def _has_step(optimizer):
    """Whether the state of a parameter has its count of steps."""
    return isinstance(optimizer, _OF_TORCH) or getattr(optimizer, "counts_steps", False)


def has_from_start(optimizer):
    """Whether torch's has states before the first step, of frozen parameters, too."""
    return isinstance(optimizer, torch.optim.Adagrad)


def _is_shown(optimizer, parameter, has_all):
    if not parameter.requires_grad:
        return has_from_start(optimizer)
    return core.optimizer_state_names(parameter) and (has_all or core.step_count(parameter))


def _parameters(optimizer, is_own):
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if is_own(parameter)]


def _of_parameter(optimizer, parameter):
    if not parameter.requires_grad:
        return {"step": torch.zeros(()), "sum": torch.zeros(parameter.shape)}
    values = {"step": torch.tensor(float(core.step_count(parameter)))} if _has_step(optimizer) else {}
    return values | {name: core.safe_get_full_optimizer_state(parameter, name) for name in core.optimizer_state_names(parameter)}


def names(optimizer, is_own, client):
    """{parameter: {name of a state: None}}."""
    if client is not None:
        return {parameter: dict.fromkeys(client.forms(parameter)) for parameter in _parameters(optimizer, is_own) if parameter.requires_grad}
    step = ["step"] if _has_step(optimizer) else []
    return {parameter: dict.fromkeys([*step, *core.optimizer_state_names(parameter)]) for parameter in _parameters(optimizer, is_own) if parameter.requires_grad}


def load(optimizer, state_dict, is_own, client, compare):
    """The states of state_dict() in the place of what there is. Collective.

    `state_dict`    plain tensors
    `compare`       called with {what it is: a tensor that is loaded}, before anything changes: raises where ranks that
                    share states have different ones

    Raises  StateError, ShapeError: they do not fit; no state has changed then.
    """
    ids = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    everything = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    saved = {id_: parameter for id_, parameter in zip(ids, everything)}
    if strangers := set(state_dict["state"]) - set(saved):
        raise StateError(f"optimizer.load_state_dict(): states of {sorted(map(str, strangers))[:3]}, which are in no group of the file; give it a whole state_dict()")
    values = {parameter: dict(state_dict["state"].get(id_) or {}) for id_, parameter in saved.items()
              if parameter.requires_grad and is_own(parameter)}
    expected = names(optimizer, is_own, client)
    for parameter, one in values.items():
        _check_fits(optimizer, parameter, one, set(expected[parameter]), {} if client is None else client.forms(parameter))
    compare({f"state[{index}]['{name}']": value for index, one in enumerate(values.values()) for name, value in one.items()})
    if client is not None:
        return _load_client(client, values)
    with torch.no_grad():
        for parameter, one in values.items():
            for name in core.optimizer_state_names(parameter):
                value = one.get(name)
                core.safe_set_full_optimizer_state(parameter, torch.zeros(parameter.shape) if value is None else value, name)
    core.set_step_counts(list(values), [_count(one) for one in values.values()])


def _load_client(client, values):
    counts = [_count(one) for one in values.values()]
    with torch.no_grad():
        for (parameter, one), count in zip(values.items(), counts):
            if count == 0:  # as before the first step, whatever zeros stand for
                continue
            whole = {name: value if isinstance(value, torch.Tensor) and value.shape == parameter.shape else torch.full(parameter.shape, float(value))
                     for name, value in one.items() if value is not None}
            client.set_state(parameter, {name: count if name == "step" else core.own_part(parameter, value) for name, value in whole.items()})
    # This makes the library know of states, and drops those of parameters that no step has changed
    core.set_step_counts(list(values), counts)


def _count(values):
    """The count of steps; for SGD, whose states have none, whether there was a step."""
    return round(float(values["step"])) if "step" in values else int(bool(values))


def _check_fits(optimizer, parameter, values, expected, forms):
    if not values:
        return
    # An optimizer that steps itself makes some of them late
    if set(values) != expected and not (forms and set(values) < expected):
        raise StateError(f"optimizer.load_state_dict(): states {sorted(map(str, values))} of a parameter of shape {list(parameter.shape)}, where "
                         f"{type(optimizer).__name__} with these hyperparameters has {sorted(expected)}; load what was saved of such an optimizer")
    for name, value in values.items():
        is_number = name == "step" or (name in forms and not forms[name].is_whole and torch.as_tensor(value).numel() == 1)
        if not is_number and value is not None and (not isinstance(value, torch.Tensor) or value.shape != parameter.shape):
            found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ShapeError(f"optimizer.load_state_dict(): state '{name}' has the shape {found}, and its parameter {list(parameter.shape)}: load whole "
                             "states, such as state_dict() here and a full state dict of PyTorch are")
