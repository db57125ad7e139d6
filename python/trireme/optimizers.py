"""What an optimizer object, or its lack, means for an engine: the library's own update, chosen by type and hyperparameters."""
import inspect

import torch

from . import client_state
from .errors import ConfigError, UnsupportedError

# Hyperparameters of a torch.optim class that the library's update does not have, with the value that switches them off. With
# another one the object itself steps.
_OFF = {"amsgrad": False, "maximize": False, "differentiable": False, "dampening": 0, "lr_decay": 0,
        "initial_accumulator_value": 0}
# Of a parameter group: tensors, names, and what the library saves itself.
_NOT_SAVED = {"params", "param_names", "lr"}
_SHARED = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")


def _native_type(optimizer):
    """The `type` of the configuration's optimizer section that updates as this object does, and its own params."""
    own = getattr(optimizer, "trireme_type", None)  # of trireme.ops
    if own is not None:
        return own
    kind = type(optimizer)
    if kind is torch.optim.AdamW:
        return "AdamW", {}
    if kind is torch.optim.Adam:
        decoupled = optimizer.defaults.get("decoupled_weight_decay", False)
        return "Adam", {"adam_w_mode": bool(decoupled)}
    if kind is torch.optim.SGD:
        return "SGD", {}
    if kind is torch.optim.Adagrad:
        return "Adagrad", {}
    return None


def _is_covered(optimizer):
    return all(group.get(name, off) in (off, None) for group in optimizer.param_groups for name, off in _OFF.items())


def section_of(optimizer):
    """The configuration's `optimizer` section for an optimizer object; None where the library has no such update, so that the
    object itself must step."""
    native = _native_type(optimizer)
    if native is None or not _is_covered(optimizer):
        return None
    kind, params = native[0], dict(native[1])
    first = optimizer.param_groups[0]
    for name in _SHARED:
        if name in first:
            value = first[name]
            params[name] = [float(x) for x in value] if name == "betas" else (value if name == "nesterov" else float(value))
    return {"type": kind, "params": params}


def _named(model):
    names = {}
    for name, parameter in model.named_parameters():
        names.setdefault(parameter, name)
    return names


def _as_groups(parameters):
    if parameters is None:
        return None
    if isinstance(parameters, torch.Tensor):
        raise ConfigError("model_parameters is a single tensor; pass an iterable of tensors or of dicts (parameter groups)")
    if isinstance(parameters, dict) and "params" not in parameters:
        parameters = parameters.values()
    parameters = [parameters] if isinstance(parameters, dict) else list(parameters)
    if parameters and isinstance(parameters[0], tuple):  # named_parameters()
        parameters = [parameter for _, parameter in parameters]
    if not parameters or not isinstance(parameters[0], dict):
        return [{"params": parameters}]
    groups = []
    for index, group in enumerate(parameters):
        if "params" not in group:
            raise ConfigError(f"parameter group {index} has no \"params\", only {sorted(group)}; name the tensors that it is about")
        tensors = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        groups.append({**group, "params": [p[1] if isinstance(p, tuple) else p for p in tensors]})
    return groups


def group_parameters(model, model_parameters):
    """Parameter groups (dicts with "params" and hyperparameters of their own), without those that are empty or frozen.

    Raises  ConfigError: a tensor that is not a parameter of the model, or stands twice (an AssertionError in DeepSpeed).
    """
    names = _named(model)
    groups = _as_groups(model_parameters)
    if groups is None:
        groups = [{"params": list(names)}]
    if not any(group["params"] for group in groups):
        raise ConfigError("model_parameters holds no parameter: is it a generator that was used up? Pass list(model.parameters())")
    seen = set()
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise ConfigError(f"parameter group {index}: a tensor of shape {tuple(parameter.shape)} is no parameter of the model; make "
                                  "the groups of model.parameters(), after the model has its final form")
            if parameter in seen:
                raise ConfigError(f"parameter group {index}: '{names[parameter]}' is in two groups; leave it in one")
            seen.add(parameter)
    groups = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]
    return [group for group in groups if group["params"]]


def _own(group):
    return {key: group[key] for key in _SHARED if key in group and key != "nesterov"}


def native_groups(model, groups, section):
    """(the optimizer section with group 0's hyperparameters, groups 1 and up), as the library wants them: what no group names is in
    group 0. What a group does not say is the section's."""
    if not isinstance(section, dict) or not isinstance(section.get("params") or {}, dict):
        return section, []  # refused by name where it is read
    names, params = _named(model), dict(section.get("params") or {})
    others = [{"names": [names[p] for p in group["params"]], **_own(params), **_own(group)} for group in groups[1:]]
    return {**section, "params": {**params, **(_own(groups[0]) if groups else {})}}, others


def _checked(index, key, value):
    """A hyperparameter that a program wrote, as numbers. Raises ConfigError."""
    try:
        if key != "betas":
            return float(value)
        first, second = value
        return float(first), float(second)
    except (TypeError, ValueError):
        expected = "two numbers" if key == "betas" else "a number"
        raise ConfigError(f"param_groups[{index}]['{key}'] is {value!r}; expected {expected}") from None


class ZeroOptimizer(torch.optim.Optimizer):
    """What initialize() returns as the optimizer: its param_groups steer the engine, which holds masters and states.

    `param_groups` are those of the optimizer that initialize() was given, the same list: learning rates and other
    hyperparameters that a program or a torch scheduler writes there are those of the next step.
    """

    def __init__(self, engine, groups, client=None):
        native = engine.core.hyperparameters(0)
        super().__init__([dict(group) for group in groups], {"lr": native["lr"]})
        self._engine = engine
        self._client = client
        if client is not None:
            self.param_groups = client.param_groups
        else:
            for index, group in enumerate(self.param_groups):
                group.update(engine.core.hyperparameters(index))
        self._last = [None] * len(self.param_groups)

    def push(self):
        """Gives the engine the hyperparameters that changed since the last step."""
        if self._engine.is_spent:
            return  # the call that follows says so
        for index, group in enumerate(self.param_groups):
            now = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "momentum") if key in group}
            if now != self._last[index]:
                now = {key: _checked(index, key, value) for key, value in now.items()}
                self._engine.core.set_hyperparameters(index, now)
                self._last[index] = now

    def pull(self):
        """Takes the engine's learning rates and momenta over, after its own schedule has advanced."""
        for index, group in enumerate(self.param_groups):
            native = self._engine.core.hyperparameters(index)
            group.update({key: value for key, value in native.items() if key in group})
            self._last[index] = None

    def group_values(self):
        """What the groups hold beside parameters and learning rates, for a checkpoint; values that only code can make are left out."""
        return [{key: value for key, value in group.items() if key not in _NOT_SAVED and client_state.is_plain(value)}
                for group in self.param_groups]

    def set_group_values(self, groups):
        """Takes group_values() of as many groups over."""
        if len(groups) != len(self.param_groups):
            return
        for index, saved in enumerate(groups):
            self.param_groups[index].update(saved)
            self._last[index] = None

    def mark_stepped(self):
        """The weights changed: torch's schedulers look for it, on the optimizer that they were made with."""
        for optimizer in {self, self._client or self}:
            optimizer._opt_called = True  # pylint: disable=protected-access

    def step(self, closure=None):
        """The engine's step()."""
        if closure is not None:
            raise UnsupportedError("optimizer.step(closure): a closure is not there for sharded training; call backward() first")
        self._engine.step()

    def zero_grad(self, set_to_none=True):
        """Drops the window's gradients. Collective."""
        self._engine.zero_grad()

    def backward(self, loss, retain_graph=False):
        """The engine's backward()."""
        self._engine.backward(loss, retain_graph=retain_graph)

    def state_dict(self):
        """Hyperparameters alone: masters and states are saved by engine.save_checkpoint()."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"state": {}, "param_groups": groups}

    def load_state_dict(self, state_dict):
        """Takes the hyperparameters of state_dict() over."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)

    @property
    def overflow(self):
        """Whether the last step was skipped because a gradient was not finite."""
        return self._engine.global_steps > 0 and not self._engine.was_step_applied()

    @property
    def loss_scale(self):
        """By what losses are multiplied."""
        return self._engine.core.loss_scale

    cur_scale = loss_scale

    @property
    def optimizer(self):
        """The optimizer that initialize() was given, or this one."""
        return self._client or self


def made_by(make, groups):
    """What a callable makes of parameters, or of groups where these have hyperparameters of their own."""
    if any(set(group) > {"params"} for group in groups):
        return make(groups)
    return make([parameter for group in groups for parameter in group["params"]])


def is_optimizer(value):
    """Whether `value` is an optimizer object rather than a callable that makes one."""
    return isinstance(value, torch.optim.Optimizer) or (hasattr(value, "param_groups") and not inspect.isfunction(value))
