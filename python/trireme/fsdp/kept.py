"""Parameters that a program keeps (ignored_params, ignored_modules) in an optimizer of sharded ones: plain tensors of
each rank, stepped as torch does."""
import collections
import itertools

import torch

from ..errors import UnsupportedError
from ..training.optimizers import section_of
from . import registry
from .tensors import ShardedParameter

_OWN = ("step", "zero_grad", "state_dict", "load_state_dict")  # what a sharded optimizer has in place of its class's


def parameters(optimizer):
    """Those of `optimizer` that are not sharded."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if not isinstance(parameter, ShardedParameter)]


def _states_of(optimizer):
    """{parameter: its states}; at first those that the optimizer was made with, as Adagrad is."""
    attachment = registry.attachment(optimizer)
    if attachment.kept_states is None:
        made_with = {parameter: dict(optimizer.state[parameter]) for parameter in parameters(optimizer) if parameter in optimizer.state}
        attachment.kept_states = collections.defaultdict(dict, made_with)
    return attachment.kept_states


def _rest_of(optimizer, **changes):
    """An optimizer of the same class over these parameters alone, with today's hyperparameters, and `changes` of
    them."""
    rest = object.__new__(type(optimizer))
    rest.__dict__.update({name: value for name, value in vars(optimizer).items() if name not in _OWN})
    rest.param_groups = [{**group, **changes, "params": [p for p in group["params"] if not isinstance(p, ShardedParameter)]} for group in optimizer.param_groups]
    rest.param_groups = [group for group in rest.param_groups if group["params"]]
    rest.state = _states_of(optimizer)
    return rest


def _step_of(optimizer):
    """Its class's step() without hooks, which the caller has called."""
    made = type(optimizer).step
    return made.__wrapped__ if hasattr(made, "hooked") else made


def require_steppable(optimizer):
    """Raises UnsupportedError: `optimizer` has parameters of both kinds, and the library has no update for those that
    are sharded."""
    if parameters(optimizer) and section_of(optimizer) is None:
        raise UnsupportedError(f"optimizer: {type(optimizer).__name__} steps itself here, on parts of sharded parameters, and has ignored ones beside them; give the ignored "
                               "parameters an optimizer of their own, or use Adam, AdamW, SGD or Adagrad")


def step(optimizer):
    """A step of these parameters by their gradients, which are this rank's own."""
    _step_of(optimizer)(_rest_of(optimizer))


def begin(optimizer):
    """States of zeros for those that have none, as torch.distributed.checkpoint wants them."""
    now = _states_of(optimizer)
    without = {parameter for parameter in parameters(optimizer) if parameter.requires_grad and not now[parameter]}
    gradients = {parameter: parameter.grad for parameter in parameters(optimizer)}
    for parameter in gradients:
        parameter.grad = torch.zeros_like(parameter) if parameter in without else None
    _step_of(optimizer)(_rest_of(optimizer, lr=0.0))
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    for value in itertools.chain.from_iterable(now[parameter].values() for parameter in without):
        if isinstance(value, torch.Tensor):
            value.zero_()


def _numbered(optimizer):
    """[(position among the optimizer's parameters, parameter)] of these."""
    everything = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return [(index, parameter) for index, parameter in enumerate(everything) if not isinstance(parameter, ShardedParameter)]


def states_of(optimizer):
    """{position among the optimizer's parameters: states} of those that have some, as torch's state_dict() has them."""
    now = _states_of(optimizer)
    return {index: dict(now[parameter]) for index, parameter in _numbered(optimizer) if now.get(parameter)}


def names(optimizer):
    """{parameter: {name of a state: None}}."""
    return {parameter: dict.fromkeys(states) for parameter, states in _states_of(optimizer).items() if states}


def values(optimizer):
    """{parameter: states} of those that have some, the states themselves."""
    return {parameter: found for parameter, found in _states_of(optimizer).items() if found}


def load(optimizer, state_dict):
    """The states of state_dict() in the place of what there is."""
    ids = list(itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
    now = _states_of(optimizer)
    now.clear()
    for index, parameter in _numbered(optimizer):
        if saved := state_dict["state"].get(ids[index]):
            now[parameter] = {name: _like(parameter, name, value) for name, value in saved.items()}


def _like(parameter, name, value):
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if name == "step" else value.to(parameter.device, parameter.dtype, copy=True)
