"""An optimizer that the library has no update for: it steps itself, on this rank's parts of the parameters."""
import inspect
from collections import defaultdict

import torch

from .errors import UnsupportedError

# What cannot step flat parts of parameters, by the name of a class or of one that it is derived from, and why.
_NEEDS_MORE = {"LBFGS": "calls back for the loss", "SparseAdam": "wants sparse gradients", "Muon": "wants whole matrices",
               "Adafactor": "wants the rows and columns of whole matrices", "Shampoo": "wants whole matrices", "SOAP": "wants whole matrices"}


class PartOptimizer:
    """The program's optimizer, with its parameters replaced by the parts of them that this rank updates (flat, fp32).

    The library calls it; learning rates and other hyperparameters are those of the program's own param_groups.
    """

    def __init__(self, client, group_of, parameter_of, parts, names):
        self._client = client
        self._parts = parts
        self._members = [[i for i, name in enumerate(names) if group_of[name] == g] for g in range(len(client.param_groups))]
        # As a copy, which works for every class whatever its constructor takes; a scheduler's wrapper of step() stays behind.
        self._own = object.__new__(type(client))
        self._own.__dict__ = {key: value for key, value in client.__dict__.items() if key != "step"}
        self._own.state = defaultdict(dict)
        for part, name in zip(parts, names):  # what the constructor made of parameters (Adagrad's does), of parts
            begun = client.state.get(parameter_of[name]) or {}
            if is_fresh(begun):
                self._own.state[part].update((key, _of_part(value, part)) for key, value in begun.items())
        self._own.param_groups = [{**group, "params": [parts[i] for i in members]}
                                  for group, members in zip(client.param_groups, self._members)]

    def groups(self):
        """(indices of parts, learning rate) of each parameter group."""
        return [(members, float(group["lr"])) for group, members in zip(self._own.param_groups, self._members)]

    def step(self, rates):
        """One step with the parts' .grad. Returns the indices of the parts that have a state."""
        for group, given, lr in zip(self._own.param_groups, self._client.param_groups, rates):
            group.update({key: value for key, value in given.items() if key != "params"})
            group["lr"] = lr
        self._own.step()
        return [i for i, part in enumerate(self._parts) if self._own.state.get(part)]

    def state(self, part):
        """What it keeps of a part: tensors, and the count of steps as an int. One number, such as NAdam's mu_product, stands at
        each element, so that it is found by whoever owns a piece of the parameter later."""
        own = self._parts[part]
        state = self._own.state.get(own, {})
        return {key: int(value) if key == "step" else torch.full_like(own, float(value)) if _is_number(value) else value
                for key, value in state.items() if value is not None}

    def set_state(self, part, values):
        """Takes a state over, each value in the form that it has here."""
        state = self._own.state[self._parts[part]]
        for key, value in values.items():
            now = state.get(key)
            if _is_number(now):
                number = value.flatten()[0].item() if isinstance(value, torch.Tensor) else value
                value = torch.full_like(now, number) if isinstance(now, torch.Tensor) else type(now)(number)
            state[key] = value

    def drop_state(self, part):
        """As if the part had never been stepped."""
        self._own.state.pop(self._parts[part], None)


def _is_number(value):
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float)) and not isinstance(value, bool)


def is_fresh(state):
    """Whether a parameter's state, if it has one, is as its optimizer's constructor made it: the same at each element."""
    if not state:
        return True
    whole = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0]
    return float(state.get("step", 1)) == 0 and all(bool((value == value.flatten()[0]).all()) for value in whole if value.numel())


def _of_part(value, part):
    if not isinstance(value, torch.Tensor):
        return value
    return torch.full_like(part, value.flatten()[0].item()) if value.dim() > 0 else value.clone()


def check(client):
    """Raises UnsupportedError: an optimizer that cannot work on flat parts of parameters."""
    reasons = [_NEEDS_MORE[kind.__name__] for kind in type(client).__mro__ if kind.__name__ in _NEEDS_MORE]
    closure = inspect.signature(client.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        reasons.append("calls back for the loss")
    if reasons:
        raise UnsupportedError(f"optimizer: {type(client).__name__} {reasons[0]}, and here it would step this rank's flat parts of the parameters; use "
                               "one that updates element by element, such as AdamW, or the configuration's optimizer section (Muon, Lamb)")


def maker(model, client):
    """make(parts, names) for the library."""
    name_of = {}
    for name, parameter in model.named_parameters():
        name_of.setdefault(parameter, name)
    trained = [(g, p) for g, group in enumerate(client.param_groups) for p in group["params"] if p.requires_grad]
    group_of, parameter_of = {name_of[p]: g for g, p in trained}, {name_of[p]: p for _, p in trained}
    return lambda parts, names: PartOptimizer(client, group_of, parameter_of, parts, names)
