"""A program's optimizer over other tensors than its parameters: copies of it, and what these keep outside of torch's
`state`.

Optimizers differ in where they keep things: in `state`, in their param_groups, in attributes, in an optimizer that they
wrap. A copy has optimizers and containers of its own in the same places, and other tensors in place of the parameters.
"""
import contextlib
import copy
import types

import torch
from torch.optim import optimizer as torchs

from ..errors import UnsupportedError

# Attributes of an object that schedulers or this package replace; a copy has its class's.
REPLACED = ("step", "zero_grad", "state_dict", "load_state_dict", "train", "eval", "steps_engine")
# Lists of the program's functions, which a trial does not call; an optimizer that steps the engine calls them itself
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def is_optimizer(value):
    """Whether `value` is an optimizer object, of torch or by its parameter groups, rather than a class or a
    function."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    return not isinstance(value, (type, types.FunctionType, types.MethodType)) and hasattr(value, "param_groups") and hasattr(value, "step")


def is_number(value):
    """One number, as a tensor without dims or as Python has it."""
    return value.dim() == 0 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))


def is_plain(value):
    """Numbers, texts and tensors of one element, in plain containers or alone: what a checkpoint's values can hold."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not isinstance(value, torch.nn.Parameter)
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and is_plain(one) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def set_momentum(group, momentum, beta2):
    """A schedule's momentum into a parameter group; one that has none stays without."""
    if "betas" in group:
        group["betas"] = (momentum, beta2, *group["betas"][2:])
    elif group.get("momentum"):
        group["momentum"] = momentum


def fill(holder, key, number):
    """holder[key] = number; a tensor that stands there stays the same tensor."""
    if isinstance(holder.get(key), torch.Tensor):
        with torch.no_grad():
            holder[key].fill_(number)
    else:
        holder[key] = number


def _beginning(parameter, value):
    """make(tensor) that gives `value` for another tensor in the place of `parameter`; None: it cannot be told."""
    if value.numel() == 0:
        return torch.zeros_like
    first = value.flatten()[0]
    if bool((value == first).all()):
        number = first.item()
        return lambda tensor: torch.full_like(tensor, number)
    if value.shape == parameter.shape and torch.equal(value, parameter.detach().to(value.dtype)):
        return lambda tensor: tensor.detach().clone()
    return None


class Beginnings:
    """The states that an optimizer has of `parameters` before training. Made once, while the parameters are whole.

    Those that its constructor made, the same number at each element or the parameter itself, can be made again for a
    part of the parameter; others are those of an optimizer that has stepped already.
    """

    def __init__(self, client, parameters):
        self._makers, self._entries = {}, {}  # by id; whether an entry is as the constructor made it
        self._kept = []
        self._look(client, parameters, set())

    has_stepped = property(lambda self: not all(self._entries.values()), doc="Whether some state is not the constructor's.")

    def _look(self, value, parameters, seen):
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, dict):
            for key, inner in value.items():
                if isinstance(key, torch.Tensor) and key in parameters:
                    self._enter(key, inner)
                else:
                    self._look(inner, parameters, seen)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                self._look(inner, parameters, seen)
        elif is_optimizer(value):
            self._look(vars(value), parameters, seen)

    def _enter(self, parameter, entry):
        # All tensors of a parameter without dims have none either, so only the count of steps is known to be a number.
        values = entry.items() if isinstance(entry, dict) else [(None, entry)]
        whole = [value for key, value in values
                 if isinstance(value, torch.Tensor) and (value.dim() > 0 or (parameter.dim() == 0 and key != "step"))]
        self._makers.update((id(value), _beginning(parameter, value)) for value in whole)
        step = entry.get("step", 0) if isinstance(entry, dict) else 0
        has_stepped = is_number(step) and float(step) != 0
        self._entries[id(entry)] = not has_stepped and all(self._makers[id(value)] is not None for value in whole)
        self._kept.append(entry)  # an id is one object's for as long as that lives

    def of(self, entry, place):
        """The form of `entry`, the state of one parameter, for `place`; None: it is not the constructor's."""
        if not self._entries.get(id(entry), False):
            return None
        if isinstance(entry, dict):
            return {key: self._value_of(value, place) for key, value in entry.items()}
        return self._value_of(entry, place)

    def _value_of(self, value, place):
        maker = self._makers.get(id(value))
        if maker is not None:
            return maker(place)
        # A tensor that copy.copy() made would share its memory
        return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


@contextlib.contextmanager
def without_global_hooks():
    """While it lasts, steps call no hooks of all optimizers: a program's are for its own steps."""
    found = torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks  # pylint: disable=protected-access
    torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks = {}, {}  # pylint: disable=protected-access
    try:
        yield
    finally:
        torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks = found  # pylint: disable=protected-access


class Copy:
    """`client` with the tensors of `places` (by parameter) for its parameters.

    Parameters whose place is empty, because other ranks update them, leave the parameter groups: a step() need not look
    for a gradient that is None. `is_trial`: a copy that is thrown away, so that nothing in it may be shared with the
    client.
    """

    def __init__(self, client, places, beginnings, is_trial=False):
        self.places, self.optimizers = places, []  # (path, the program's, its copy), the outermost first
        self._begun = []  # (dict, place, the constructor's entry)
        self._beginnings, self._is_trial, self._memo, self._kept = beginnings, is_trial, {}, []
        self.own = self._of(client, "")
        for _, _, optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [place for place in group["params"] if place.numel() > 0]

    def _of(self, value, path):
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if is_optimizer(value):
            return self._of_optimizer(value, path)
        if isinstance(value, dict):
            return self._of_dict(value, path)
        if isinstance(value, (list, set)):
            made = self._remember(value, type(value)() if type(value) in (list, set) else copy.copy(value))
            made.clear()
            items = [self._of(one, f"{path}.{index}") for index, one in enumerate(value)]
            made.extend(items) if isinstance(made, list) else made.update(items)  # pylint: disable=expression-not-assigned
            return made
        if isinstance(value, tuple):
            items = [self._of(one, f"{path}.{index}") for index, one in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, types.MethodType) and id(value.__self__) in self._memo:
            return types.MethodType(value.__func__, self._memo[id(value.__self__)])
        return self._of_other(value, path)

    def _remember(self, value, made):
        self._memo[id(value)] = made
        self._kept.append(value)  # an id is one object's for as long as that lives
        return made

    def _of_tensor(self, tensor):
        if tensor in self.places:
            return self.places[tensor]
        return self._remember(tensor, tensor.detach().clone()) if self._is_trial else tensor

    def _of_optimizer(self, value, path):
        made = self._remember(value, object.__new__(type(value)))
        self.optimizers.append((path, value, made))
        for name, inner in vars(value).items():
            if name in _HOOKS and (self._is_trial or getattr(value, "steps_engine", False)):
                made.__dict__[name] = type(inner)()
            elif name not in REPLACED:
                made.__dict__[name] = self._of(inner, f"{path}.{name}" if path else name)
        return made

    def _of_dict(self, value, path):
        made = self._remember(value, copy.copy(value))
        made.clear()
        for key, inner in value.items():
            if isinstance(key, torch.Tensor) and key in self.places:
                self._begun.append((made, self.places[key], inner))
                self._begin(*self._begun[-1])
            else:
                made[self._of(key, path)] = self._of(inner, f"{path}.{key}" if path else str(key))
        return made

    def _begin(self, store, place, entry):
        begun = self._beginnings.of(entry, place)
        if begun is not None:
            store[place] = begun

    def begin_again(self, place):
        """The states of `place` as the constructor made them."""
        for store, begun_place, entry in self._begun:
            if begun_place is place:
                self._begin(store, place, entry)

    def _of_other(self, value, path):
        if isinstance(value, torch.Generator):
            return self._remember(value, value.clone_state()) if self._is_trial else value
        if not isinstance(value, (type, types.FunctionType, types.ModuleType)) and _holds(value, self.places, set()):
            raise UnsupportedError(f"its attribute `{path}` ({type(value).__name__}) holds parameters of the model; keep them in param_groups, where "
                                   "they can be replaced by this rank's parts of them")
        if self._is_trial and hasattr(value, "__dict__") and not callable(value):
            try:
                return self._remember(value, copy.deepcopy(value))
            except Exception:  # pylint: disable=broad-except
                pass  # what cannot be copied is shared
        return value


def _holds(value, parameters, seen):
    """Whether an object that is no optimizer leads to one of the parameters."""
    if id(value) in seen or len(seen) > 10000:
        return False
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value in parameters
    if isinstance(value, torch.nn.Module):
        return any(p in parameters for p in value.parameters())
    if isinstance(value, dict):
        return any(_holds(one, parameters, seen) for pair in value.items() for one in pair)
    if isinstance(value, (list, tuple, set)):
        return any(_holds(one, parameters, seen) for one in value)
    if isinstance(value, (type, types.FunctionType, types.ModuleType)) or not hasattr(value, "__dict__"):
        return False
    return any(_holds(one, parameters, seen) for one in vars(value).values())
