"""States of a program's optimizer, as torch's state_dict() has them: whole tensors, the same on every rank.

They are the library's, or where the optimizer steps itself (`client`) those of its copy over parts of parameters.
"""
import itertools

import torch

from .. import agreement, ranks
from .._native import core
from ..errors import ShapeError, StateError, UnsupportedError
from .tensors import ShardedParameter
from .values import Source, Value, plain

# Optimizers of torch whose state of a parameter has its count of steps
_HAS_STEP = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks",
          "_optimizer_load_state_dict_post_hooks")
_FIX = "save them with the weights by trireme.fsdp.save_checkpoint(model, optimizer, folder), and load that by load_checkpoint()"


def check(call, client, optimizer):
    """Raises UnsupportedError: `optimizer` keeps states in other places than its `state`, or has hooks that would see
    none."""
    if client is not None and (beside := client.stores_beside()):
        raise UnsupportedError(f"{call}: {type(optimizer).__name__} keeps states in `{beside[0]}`, beside its own `state`, where torch's state_dict() has none; {_FIX}")
    if any(vars(optimizer).get(name) for name in _HOOKS):
        raise UnsupportedError(f"{call}: hooks of state_dict() and load_state_dict() of {type(optimizer).__name__} are not called here; call them yourself")


def of(optimizer, has_all, client):
    """{position of a parameter: its states}; with `has_all` also of those that no step has changed. Collective."""
    everything = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    sharded = {index: parameter for index, parameter in enumerate(everything) if isinstance(parameter, ShardedParameter)}
    if client is not None:
        stepped = {index: p for index, p in sharded.items() if p.requires_grad and client.forms(p) and (has_all or core.step_count(p))}
        return {index: _of_client(client, parameter) for index, parameter in stepped.items()}
    has_all = has_all or _from_start(optimizer)
    shown = {index: parameter for index, parameter in sharded.items() if _is_shown(optimizer, parameter, has_all)}
    return {index: _of_parameter(optimizer, parameter) for index, parameter in shown.items()}


def _of_client(client, parameter):
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


def names(optimizer, client):
    """{parameter: {name of a state: None}}."""
    if client is not None:
        return {parameter: dict.fromkeys(client.forms(parameter)) for parameter in _parameters(optimizer) if parameter.requires_grad}
    step = ["step"] if isinstance(optimizer, _HAS_STEP) else []
    return {parameter: dict.fromkeys([*step, *core.optimizer_state_names(parameter)]) for parameter in _parameters(optimizer) if parameter.requires_grad}


class _State(Source):
    """A state of a parameter as a program sees it in `optimizer.state`."""

    def __init__(self, optimizer, parameter, name, client):
        is_number = name == "step"
        super().__init__(() if is_number else parameter.shape, torch.float32, torch.device("cpu") if is_number else parameter.device)
        self._optimizer, self._parameter, self._name, self._client = optimizer, parameter, name, client

    def version(self):
        return None

    def gather(self):
        if self._name == "step":
            return torch.tensor(float(core.step_count(self._parameter)))
        if self._client is not None:
            return torch.as_tensor(_of_client(self._client, self._parameter)[self._name], dtype=self.dtype)
        return core.safe_get_full_optimizer_state(self._parameter, self._name)

    def scatter(self, whole):
        agreement.check_tensor(ranks.world(), f"a write to optimizer.state[…]['{self._name}']", whole)
        if self._client is not None:
            raise UnsupportedError(f"optimizer.state[…]['{self._name}'] of {type(self._optimizer).__name__}, which steps itself: give optimizer.load_state_dict() other "
                                   "states than those of optimizer.state_dict()")
        if self._name == "step":
            core.set_step_counts([self._parameter], [round(whole.item())])
        else:
            core.safe_set_full_optimizer_state(self._parameter, whole, self._name)


def shown(optimizer, has_all, client):
    """{parameter: {name: state}} as `optimizer.state` has them: of those that a step has changed; with `has_all` of
    all. Local."""
    has_all = has_all or _from_start(optimizer)
    found = {parameter: one for parameter, one in names(optimizer, client).items() if one and (has_all or core.step_count(parameter))}
    return {parameter: {name: _form(optimizer, parameter, name, client) for name in one} for parameter, one in found.items()}


def _form(optimizer, parameter, name, client):
    if client is not None and name != "step" and not client.forms(parameter)[name].is_whole:
        return _of_client(client, parameter).get(name)  # a number, such as NAdam's mu_product
    return Value(_State(optimizer, parameter, name, client))


def load(optimizer, state_dict, client):
    """The states of state_dict(), the same on every rank, in the place of what there is. Collective.

    Raises  StateError, ShapeError: they do not fit, or differ by rank; no state has changed then.
    """
    ids = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    everything = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    saved = {id_: parameter for id_, parameter in zip(ids, everything)}
    if strangers := set(state_dict["state"]) - set(saved):
        raise StateError(f"optimizer.load_state_dict(): states of {sorted(map(str, strangers))[:3]}, which are in no group of the file; give it a whole state_dict()")
    values = {parameter: {name: plain(value) for name, value in (state_dict["state"].get(id_) or {}).items()} for id_, parameter in saved.items()
              if parameter.requires_grad and isinstance(parameter, ShardedParameter)}
    expected = names(optimizer, client)
    for parameter, one in values.items():
        _check_fits(optimizer, parameter, one, set(expected[parameter]), {} if client is None else client.forms(parameter))
    agreement.check_tensors(ranks.world(), "optimizer.load_state_dict()",
                            {f"state[{index}]['{name}']": value for index, one in enumerate(values.values()) for name, value in one.items()})
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
