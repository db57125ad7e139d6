"""The meaning of an optimizer object, or its lack, for an engine: the library's own update, chosen by type and
hyperparameters."""
import functools
import inspect
import itertools

import torch

from .._native import core
from ..errors import ConfigError, StateError, UnsupportedError
from ..log import logger
from . import client_state
from .optimizer_copy import fill, set_momentum

# Hyperparameters of an optimizer's groups that the library's update does not have, with the value that it stands for.
# With another one the object itself steps.
_OWN_TYPES = ("adam", "adamw", "adagrad", "lamb", "lion", "muon", "sgd")  # that a configuration names, in any case
_OFF = {"amsgrad": False, "maximize": False, "differentiable": False, "dampening": 0, "lr_decay": 0,
        "initial_accumulator_value": 0, "bias_correction": True, "grad_averaging": True}
# Keys of a parameter group that no checkpoint's client state holds: tensors, names, and values that the library saves
# itself.
_NOT_SAVED = {"params", "param_names", "lr"}
_SHARED = core.GROUP_HYPERPARAMETERS
_DECOUPLED = "decoupled_weight_decay"  # of torch's Adam: by group there, one for all in the library


def _native_type(optimizer):
    """The `type` of the configuration's optimizer section that updates as this object does, and its own params."""
    own = getattr(optimizer, "trireme_type", None)  # of trireme.ops
    if own is not None:
        return own
    kind = type(optimizer)
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        return "Adam", {"adam_w_mode": bool(optimizer.param_groups[0].get(_DECOUPLED, kind is torch.optim.AdamW))}
    if kind is torch.optim.SGD:
        return "SGD", {}
    if kind is torch.optim.Adagrad:
        return "Adagrad", {}
    return None


def _is_covered(optimizer):
    """Whether the library's update has all that the groups ask for."""
    groups = optimizer.param_groups
    decoupled = {bool(group[_DECOUPLED]) for group in groups if _DECOUPLED in group}
    return len(decoupled) < 2 and all(group.get(name, off) in (off, None) for group in groups for name, off in _OFF.items())


def section_of(optimizer):
    """The configuration's `optimizer` section for an optimizer object; None where the library has no such update, so
    that the object itself must step."""
    native = _native_type(optimizer)
    if native is None or not _is_covered(optimizer):
        return None
    kind, params = native
    trained = [group for group in optimizer.param_groups if _is_trained(group)] or optimizer.param_groups
    return {"type": kind, "params": {**params, **_own(trained[0])}}


def _is_trained(group):
    return any(p.requires_grad for p in group["params"])


def _groups_trained(groups, over_stages):
    """Whether any stage trains a parameter of each group. Raises ConfigError: stages with different numbers of
    groups."""
    flags = over_stages([_is_trained(group) for group in groups])
    if len({len(each) for each in flags}) > 1:
        raise ConfigError(f"the stages of the pipeline have {', '.join(str(len(each)) for each in flags)} parameter groups; give every stage as "
                          "many, in one order, and leave those empty that have no parameter on a stage")
    return [any(of_group) for of_group in zip(*flags)]


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


def group_parameters(model, model_parameters, over_stages):
    """Parameter groups (dicts with "params" and hyperparameters of their own), without those that are empty or frozen
    on every stage.

    over_stages  collects a value of each stage, as Engine.over_stages().
    Raises  ConfigError: a tensor that is not a parameter of the model, or stands twice (an AssertionError in
            DeepSpeed).
    """
    names = _named(model)
    groups = _as_groups(model_parameters)
    if groups is None:
        groups = [{"params": list(names)}]
    if not any(over_stages(any(group["params"] for group in groups))):
        if model_parameters is None:
            raise ConfigError("initialize: the model has no parameter, so there is nothing to train; give it one")
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
    return [group for group, is_trained in zip(groups, _groups_trained(groups, over_stages)) if is_trained]


def managed_groups(groups, unmanaged, over_stages):
    """Groups without the parameters that an engine does not train, and without those that have no other on any
    stage."""
    groups = [{**group, "params": [p for p in group["params"] if p not in unmanaged]} for group in groups]
    are_managed = zip(*over_stages([bool(group["params"]) for group in groups]))
    return [group for group, of_stages in zip(groups, are_managed) if any(of_stages)]


def _own(group, index=0):
    return {key: _checked(f"param_groups[{index}]", key, group[key]) for key in _SHARED if key in group}


def native_groups(model, groups, section, over_stages):
    """(the optimizer section with group 0's hyperparameters, groups 1 and up), as the library wants them: of all
    stages, and what no group names is in group 0. What a group does not say is the section's."""
    if not isinstance(section, dict) or not isinstance(section.get("params") or {}, dict):
        return section, []  # refused by name where it is read
    names, params = _named(model), dict(section.get("params") or {})
    shared = {key: value for key, value in params.items() if key in _SHARED}
    named = zip(*over_stages([[names[p] for p in group["params"]] for group in groups[1:]]))
    others = [{"names": list(dict.fromkeys(itertools.chain(*of_stages))), **shared, **_own(group, index)}
              for index, (group, of_stages) in enumerate(zip(groups[1:], named), 1)]
    return {**section, "params": {**params, **(_own(groups[0]) if groups else {})}}, others


def _checked(where, key, value):
    """A hyperparameter that a program wrote, as numbers. Raises ConfigError."""
    try:
        if _SHARED[key] == "flag":
            return bool(value)
        if _SHARED[key] == "number":
            return float(value)
        first, second = value
        return float(first), float(second)
    except (TypeError, ValueError):
        expected = "two numbers" if _SHARED[key] == "numbers" else "a number"
        raise ConfigError(f"{where}['{key}'] is {value!r}; expected {expected}") from None


def _momentum_of(group):
    """(beta1, beta2), or (momentum, 0)."""
    if "betas" in group:
        return tuple(float(beta) for beta in group["betas"])
    return float(group.get("momentum") or 0.0), 0.0


# torch's own is wrapped for its compiler, which it would import: more than a second on every rank.
_add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class EngineOptimizer(torch.optim.Optimizer):
    """The optimizer that initialize() returns: its param_groups steer the engine, which holds masters and states.

    `param_groups` are those of the optimizer that initialize() was given, the same list: learning rates and other
    hyperparameters that a program or a torch scheduler writes there are those of the next step. Attributes that this
    class does not have are looked up in the program's optimizer.

    A step does not wait for a device. Where it can be skipped there, `param_groups` of this object ask for the learning
    rates that follow; the program's own optimizer has those of a step or two before until somebody does.
    """

    steps_engine = True  # for those who look at every optimizer

    def __init__(self, engine, groups, client=None):
        self._engine, self._client, self._groups, self._is_behind = engine, None, [], False
        self._steps_itself = engine.client_steps is not None
        native = engine.core.hyperparameters(0)
        super().__init__([dict(group) for group in groups], dict(client.defaults) if hasattr(client, "defaults") else native)
        self._client = client
        if client is None:
            for index, group in enumerate(self.param_groups):
                group.update(engine.core.hyperparameters(index))
        groups = self._present_groups()
        counts = itertools.count()
        # The engine's group of each of the program's; a frozen one has none.
        managed = [{"params": [p for p in group["params"] if p not in engine.unmanaged]} for group in groups] if engine.unmanaged else groups
        self._numbers = [next(counts) if self._steps_itself or is_trained else None for is_trained in _groups_trained(managed, engine.over_stages)]
        self._fixed = [_fixed_options(group) for group in groups]
        self._last = [None] * len(groups)
        self._frozen = [p for group in groups for p in group["params"] if not p.requires_grad]
        for name in ("train", "eval"):  # schedule-free optimizers move the weights there
            if self._steps_itself and callable(getattr(client, name, None)):
                setattr(client, name, functools.partial(self._call, name))

    @property
    def param_groups(self):
        """The program's, as they are now: its load_state_dict() makes a new list. Waits for a device that decides over
        steps."""
        if self._is_behind:
            self._is_behind = False
            self._take(self._engine.core.hyperparameters, but_for=self._changed())
        return self._present_groups()

    def _present_groups(self):
        return self._groups if self._client is None else self._client.param_groups

    @param_groups.setter
    def param_groups(self, groups):
        """Where there is no optimizer of the program's."""
        self._groups = groups

    def __getattr__(self, name):
        client = self.__dict__.get("_client")
        if client is None:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(client, name)

    def __reduce_ex__(self, protocol):
        raise StateError("an engine's optimizer cannot be pickled or copied; its hyperparameters are in state_dict(), and the engine's save_checkpoint() "
                         "saves its states")

    def _call(self, name):
        with self._engine.client_steps.calling(name):
            self._engine.core.step_without_gradients()

    def changes(self):
        """(the engine's number of a group, its hyperparameters) where the program has changed some since the last step.
        Raises ConfigError: what cannot change any more."""
        if self._engine.is_spent:
            return []  # the call that follows says so
        groups, changes = self._present_groups(), []
        if len(groups) != len(self._numbers):
            self._refuse_new_group()
        self._tell_of_thawed()
        for index, group in enumerate(groups):
            if self._numbers[index] is None:
                continue
            if not self._steps_itself:
                self._refuse_other_options(index, group)
            now = self._values(index, group)
            if now != self._last[index]:
                changes.append((self._numbers[index], now))
                self._last[index] = now
        return changes

    def push(self):
        """Gives the engine changes() before a step."""
        for number, values in self.changes():
            self._engine.core.set_hyperparameters(number, values)

    def _values(self, index, group):
        keys = ("lr",) if self._steps_itself else _SHARED
        return {key: _checked(f"param_groups[{index}]", key, group[key]) for key in keys if key in group}

    def _refuse_new_group(self):
        raise ConfigError(f"optimizer.add_param_group: there are {len(self._present_groups())} parameter groups now, and {len(self._numbers)} at {self._engine.layout_call}, "
                          f"which laid out memory for those; give it all groups, or {self._engine.remake}")

    def _refuse_other_options(self, index, group):
        for key, value in _fixed_options(group).items():
            if value != self._fixed[index].get(key, value):
                raise ConfigError(f"param_groups[{index}]['{key}'] is {value!r} now, and was {self._fixed[index][key]!r} at {self._engine.layout_call}, "
                                  f"which chose the library's update by it; set it before {self._engine.layout_call}")

    def _tell_of_thawed(self):
        thawed = [p for p in self._frozen if p.requires_grad]
        if thawed:
            self._frozen = [p for p in self._frozen if not p.requires_grad]
            logger.warning("%d parameters of the optimizer that were frozen at %s require gradients now: they are not trained. Let them require gradients at %s "
                           "and freeze them after it, or %s", len(thawed), self._engine.layout_call, self._engine.layout_call, self._engine.remake)

    def pull(self, is_behind=False):
        """Takes the engine's learning rates and momenta over, after its own schedule has advanced; with `is_behind`
        those that the host knows without waiting, and param_groups will ask for the rest."""
        self._is_behind = is_behind
        self._take(self._engine.core.known_hyperparameters if is_behind else self._engine.core.hyperparameters)

    def _changed(self):
        """(index of a group, key) that the program has written since the engine's values were taken over."""
        return {(index, key) for index, group in enumerate(self._present_groups()) for key, value in self._values(index, group).items()
                if self._last[index] is not None and value != self._last[index].get(key, value)}

    def _take(self, hyperparameters, but_for=()):
        momenta = self._engine.scheduled_momenta() if self._steps_itself else None
        for index, group in enumerate(self._present_groups()):
            number = self._numbers[index]
            if number is None:
                continue
            for key, value in hyperparameters(number).items():
                if key in group and (index, key) not in but_for and _checked(f"param_groups[{index}]", key, group[key]) != value:
                    fill(group, key, value)
            if momenta is not None:
                set_momentum(group, *momenta[index])
            last = self._last[index] or {}
            self._last[index] = {key: last[key] if (index, key) in but_for else value for key, value in self._values(index, group).items()}

    def group_values(self):
        """The values of groups beside parameters and learning rates, for a checkpoint; values that only code can make
        are left out."""
        return [{key: value for key, value in group.items() if key not in _NOT_SAVED and client_state.is_plain(value)}
                for group in self.param_groups]

    def set_group_values(self, groups):
        """Takes group_values() of as many groups over."""
        if len(groups) != len(self.param_groups):
            return
        for index, saved in enumerate(groups):
            for key, value in saved.items():
                fill(self.param_groups[index], key, value)
            self._last[index] = None

    def rates(self):
        """Learning rates of the next step, by the program's groups; the engine has taken them over."""
        self.push()
        return [float(group.get("lr", 0.0)) for group in self.param_groups]

    def momenta(self):
        """(beta1, beta2) or (momentum, 0) of the next step, likewise."""
        return [self._engine.core.get_mom(number) if number is not None and not self._steps_itself else _momentum_of(group)
                for number, group in zip(self._numbers, self.param_groups)]

    def mark_stepped(self):
        """The weights changed: torch's schedulers look for it, on the optimizer that they were made with."""
        steered = getattr(self._engine.client_lr_scheduler, "optimizer", None)
        for optimizer in (self, self._client, steered):
            if optimizer is not None:
                optimizer._opt_called = True  # pylint: disable=protected-access

    def step(self, closure=None):
        """The engine's step()."""
        if closure is not None:
            raise UnsupportedError("optimizer.step(closure): a closure is not there for sharded training; call backward() first")
        self._engine.step()

    @property
    def _step_supports_amp_scaling(self):
        """Read by torch.amp.GradScaler.step(). Raises UnsupportedError: it would look for gradients, which the engine
        has taken."""
        raise UnsupportedError("torch.amp.GradScaler: the engine takes the gradients, so that a scaler finds none to unscale; leave it out, since "
                               "fp16 and torch_autocast with \"dtype\": \"float16\" scale the loss themselves")

    def zero_grad(self, set_to_none=True):
        """Drops the window's gradients. Collective."""
        self._engine.zero_grad()

    def add_param_group(self, param_group):
        """Raises ConfigError: memory was laid out by initialize()."""
        if "_numbers" in self.__dict__:
            raise ConfigError(f"optimizer.add_param_group: {self._engine.layout_call} has laid out memory for the groups of then; give it all groups, or "
                              f"{self._engine.remake}")
        _add_param_group(self, param_group)

    def state_dict(self):
        """Hyperparameters alone: masters and states are saved by engine.save_checkpoint()."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"state": {}, "param_groups": groups}

    def load_state_dict(self, state_dict):
        """Takes the hyperparameters of state_dict() over."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})


def _fixed_options(group):
    """The options that the library's update cannot change after initialize()."""
    return {key: bool(group[key]) if key == _DECOUPLED else group[key] for key in (*_OFF, _DECOUPLED) if key in group}


def of_torch(section):
    """A callable that makes the optimizer of torch.optim that an `optimizer` section names; None: it names none, or one
    that the library has itself.

    The callable raises ConfigError: torch refuses the params.
    """
    kind = section.get("type") if isinstance(section, dict) else None
    if not isinstance(kind, str) or kind.lower() in _OWN_TYPES:
        return None
    make, params = getattr(torch.optim, kind, None), dict(section.get("params") or {})
    if not isinstance(make, type) or not issubclass(make, torch.optim.Optimizer):
        return None

    def made(groups):
        try:
            return make(groups, **params)
        except Exception as error:
            raise ConfigError(f"config: `optimizer.params` is {params!r:.200}, and torch.optim.{kind} says {type(error).__name__}: {error}; "
                              "correct them, or pass optimizer= to initialize()") from error

    return made


def made_by(make, groups):
    """The result of a callable for parameters, or for groups where these have hyperparameters of their own."""
    if any(set(group) > {"params"} for group in groups):
        return make(groups)
    return make([parameter for group in groups for parameter in group["params"]])
