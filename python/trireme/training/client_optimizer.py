"""An optimizer that the library has no update for: it steps itself, on this rank's parts of the parameters."""
import contextlib
import copy
import inspect
import random
import weakref
from collections import defaultdict

import torch

from ..errors import Error, UnsupportedError
from .optimizer_copy import REPLACED, Beginnings, Copy, fill, is_number, is_plain, without_global_hooks

# Optimizers that cannot step flat parts of parameters, by the name of a class or of one that it is derived from, and
# why.
_NEEDS_MORE = {"LBFGS": "calls back for the loss", "SparseAdam": "wants sparse gradients", "Muon": "wants whole matrices",
               "Adafactor": "wants the rows and columns of whole matrices", "Shampoo": "wants whole matrices", "SOAP": "wants whole matrices"}
_FIX = ("use one that updates element by element, such as AdamW, or the configuration's optimizer section (Muon, Lamb)")
_TRIAL_STEPS = 12  # so that Lookahead looks, RAdam rectifies, and what is made late is made
_STEP = "step"  # the state that a checkpoint keeps as a count of each parameter, not as a tensor


class ClientOptimizer:
    """The program's optimizer `client`, tried on small tensors; make(parts, names) is what the library steps.

    Raises  UnsupportedError: it cannot step flat parts of parameters, or keeps what a checkpoint could not hold; says
            why.
    """

    def __init__(self, client, model, is_sharded):
        self._client = client
        name_of = {}
        for name, parameter in model.named_parameters():
            name_of.setdefault(parameter, name)
        self._parameters = [p for group in client.param_groups for p in group["params"]]
        self._parameter_of = {name_of[p]: p for p in self._parameters if p in name_of}
        self._group_of = {name_of[p]: g for g, group in enumerate(client.param_groups) for p in group["params"] if p in name_of}
        self._beginnings = Beginnings(client, set(self._parameters))
        self._stepper, self._part_of = lambda: None, {}
        refuse_known(client)
        try:
            self._layout = _Trial(client, self._beginnings, is_sharded).layout
        except UnsupportedError as error:
            raise UnsupportedError(f"optimizer: {type(client).__name__} cannot step itself here, on flat parts of the parameters: {error}") from None

    def make(self, parts, names):
        """The PartOptimizer of this rank, for the library."""
        empty = {p: _like(p, torch.empty(0)) for p in self._parameters}
        owned = {self._parameter_of[name]: _like(self._parameter_of[name], part) for part, name in zip(parts, names)}
        self._part_of = {self._parameter_of[name]: part for part, name in enumerate(names)}
        made = Copy(self._client, {**empty, **owned}, self._beginnings)
        stepper = PartOptimizer(self._client, made, self._layout, parts, [self._group_of[name] for name in names])
        self._stepper = weakref.ref(stepper)
        return stepper

    @contextlib.contextmanager
    def calling(self, method=_STEP):
        """While it lasts, what the library steps calls `method` of the optimizer."""
        stepper = self._stepper()
        if stepper is None:  # the engine is spent, which its own call tells
            yield
            return
        stepper.method = method
        try:
            yield
        finally:
            stepper.method = None

    def stores_beside(self):
        """Where it keeps states, but for its own `state` by parameter and name: ["base_optimizer.state"]."""
        beside = [".".join(filter(None, where)) for where in self._layout.stores if where != ("", "state")]
        return beside + [name for forms in map(self._layout.of_group, set(self._group_of.values())) for name in forms if name == "state"]

    def forms(self, parameter):
        """{name of a state: its form} of a parameter, the same on every rank."""
        return self._layout.of_group(next(g for g, group in enumerate(self._client.param_groups) if any(p is parameter for p in group["params"])))

    def state(self, parameter):
        """{name: the elements of this rank, [n]} of a parameter; not-a-number where there is none yet. Empty where it
        has no part."""
        part = self._part_of.get(parameter)
        return {} if part is None else self._stepper().state(part)

    def set_state(self, parameter, values):
        """Takes a state() over."""
        part = self._part_of.get(parameter)
        if part is not None:
            self._stepper().set_state(part, values)

    def values(self):
        """The values in its param_groups and its counts in attributes, for a checkpoint."""
        return self._stepper().values()

    def load_values(self, values):
        """Takes values() of a checkpoint over."""
        self._stepper().load_values(values)


class PartOptimizer:
    """A copy of the program's optimizer over `parts`, this rank's parts of the parameters (flat; fp32, or bf16 in the
    mode `low`).

    The library calls it. A step takes the values that the program has written into param_groups and attributes; the
    program finds there the values that a step has written.
    """

    def __init__(self, client, made, layout, parts, group_of_part):
        self._client, self._parts, self._layout, self._group_of_part = client, parts, layout, group_of_part
        self._own, self._optimizers, self._begin_again = made.own, made.optimizers, made.begin_again
        self._begun = [copy.deepcopy(_attributes(own)) for _, _, own in self._optimizers]
        self.method = None  # what step() calls; None: the library only wants to know which states there are

    def groups(self):
        """(indices of parts, learning rate) of each parameter group."""
        count = len(self._own.param_groups)
        members = [[part for part, group in enumerate(self._group_of_part) if group == number] for number in range(count)]
        return [(parts, float(group.get("lr", 0.0))) for parts, group in zip(members, self._own.param_groups)]

    def step(self, rates):
        """One step with the parts' .grad. Returns the indices of the parts that have a state."""
        if self.method is None:
            return self._with_placeholders()
        self._take_over(to_own=True)
        for group, lr in zip(self._own.param_groups, rates):
            if "lr" in group:
                fill(group, "lr", lr)
        getattr(self._own, self.method)()
        self._take_over(to_own=False)
        return [i for i, part in enumerate(self._parts) if self._entries(part)]

    def _take_over(self, to_own):
        for _, theirs, own in self._optimizers:
            _take_values(*((theirs, own) if to_own else (own, theirs)))

    def _stores(self):
        """(where, dict by part) of each place in which states stand."""
        owns = {path: own for path, _, own in self._optimizers}
        for path, name in self._layout.stores:
            store = vars(owns[path]).get(name)
            if isinstance(store, dict):
                yield (path, name), store

    def _entries(self, part):
        """{name of a state: value}."""
        found = {}
        for where, store in self._stores():
            found.update((name, value) for name, value in _named_entries(where, store.get(part)) if value is not None)
        return found

    def _with_placeholders(self):
        for number, part in enumerate(self._parts):
            if not self._entries(part):
                for name, one in self._layout.of_group(self._group_of_part[number]).items():
                    self._write(part, name, one.like(0.0, part))
        return [i for i, part in enumerate(self._parts) if self._entries(part)]

    def _write(self, part, name, value):
        """One state; None takes it away."""
        (path, attribute), key = self._layout.place_of(name)
        store = next(vars(own) for at, _, own in self._optimizers if at == path).setdefault(attribute, defaultdict(dict))
        if key is not None:
            entry = {**store.get(part, {}), key: value}
            value = {name: one for name, one in entry.items() if one is not None} or None
        if value is None:
            store.pop(part, None)
        else:
            store[part] = value

    def state(self, part):
        """The state of a part: tensors, and the count of steps as an int.

        One number, such as NAdam's mu_product, stands at each element, so that any rank that later owns a piece of the
        parameter finds it. A state that the optimizer has not made yet is not-a-number.
        """
        own, found = self._parts[part], self._entries(self._parts[part])
        names = dict.fromkeys([*self._layout.of_group(self._group_of_part[part]), *found])
        values = {}
        for name in names:
            value = found.get(name)
            if name == _STEP:
                values[name] = int(value or 0)
            elif value is None:
                values[name] = torch.full_like(own, float("nan"), dtype=self._dtype_of(part, name))
            else:
                values[name] = value if _is_of(value, own) else torch.full_like(own, float(value), dtype=torch.float32)
        return values

    def _dtype_of(self, part, name):
        """The dtype of a state in a checkpoint: numbers are fp32 there, whatever the part is."""
        form = self._layout.of_group(self._group_of_part[part]).get(name)
        return self._parts[part].dtype if form is None or form.is_whole else torch.float32

    def set_state(self, part, values):
        """Takes a state over, each value in the form that it has here."""
        own, forms = self._parts[part], self._layout.of_group(self._group_of_part[part])
        for name, value in values.items():
            if name not in forms:
                if name != _STEP:
                    self._write(own, name, value)
            elif isinstance(value, torch.Tensor) and value.numel() and bool(value.isnan().all()):
                self._write(own, name, None)
            else:
                self._write(own, name, value if forms[name].is_whole else forms[name].like(_first(value), own))

    def drop_state(self, part):
        """As if the part had never been stepped."""
        for _, store in self._stores():
            store.pop(self._parts[part], None)
        self._begin_again(self._parts[part])

    def values(self):
        """See ClientOptimizer.values()."""
        self._take_over(to_own=True)
        found = []
        for (path, _, own), begun in zip(self._optimizers, self._begun):
            changed = {name: value for name, value in _attributes(own).items() if name not in begun or not _same(value, begun[name])}
            found.append({"path": path, "attributes": copy.deepcopy(changed), "state": copy.deepcopy(_shared_state(own)),
                          "groups": [copy.deepcopy(_values_of(group)) for group in own.param_groups]})
        return found

    def load_values(self, values):
        """See ClientOptimizer.load_values(). The learning rates are the schedule's, or loaded by the library."""
        self._take_over(to_own=True)
        saved = {one["path"]: one for one in values}
        for path, _, own in self._optimizers:
            if path not in saved or len(saved[path]["groups"]) != len(own.param_groups):
                continue
            _put(vars(own), saved[path]["attributes"])
            if saved[path]["state"]:
                vars(own)["state"].update(saved[path]["state"])
            for group, now in zip(own.param_groups, saved[path]["groups"]):
                _put(group, {key: value for key, value in now.items() if key != "lr"})
        self._take_over(to_own=False)


def _like(parameter, tensor):
    """`tensor` with the marks that a program has put on the parameter, such as `p.no_decay = True`."""
    for name, value in vars(parameter).items():
        if is_plain(value):
            setattr(tensor, name, value)
    return tensor


def _is_of(value, part):
    return isinstance(value, torch.Tensor) and value.shape == part.shape


def _first(value):
    return value.flatten()[0].item() if isinstance(value, torch.Tensor) else value


def _same(one, other):
    return repr(one) == repr(other)


def _attributes(optimizer):
    """Plain values that an optimizer has beside its groups and states."""
    hidden = ("param_groups", "defaults", "state", *REPLACED)
    return {name: value for name, value in vars(optimizer).items() if name not in hidden and is_plain(value) and value != {}}


def _shared_state(optimizer):
    """The entries of `state` that belong to no parameter."""
    state = vars(optimizer).get("state") or {}
    return {key: value for key, value in state.items() if isinstance(key, str) and is_plain(value)}


def _values_of(group):
    return {key: value for key, value in group.items() if key != "params" and is_plain(value)}


def _put(holder, values):
    """Into a dict; a tensor stays the same tensor."""
    for key, value in values.items():
        now = holder.get(key)
        if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
            if now is not value:
                with torch.no_grad():
                    now.copy_(value)
        elif now is not value:
            holder[key] = value


def _take_values(source, target):
    _put(vars(target), _attributes(source))
    for given, taken in zip(source.param_groups, target.param_groups):
        _put(taken, _values_of(given))


def _named_entries(where, entry):
    """[(name of a state, value)] of what a store holds for one parameter."""
    path, store = where
    place = ".".join(filter(None, (path, "" if store == "state" else store)))
    if entry is None:
        return []
    if not isinstance(entry, dict):
        return [(place or "state", entry)]
    return [(f"{place}:{key}" if place else str(key), value) for key, value in entry.items()]


class _Form:
    """The form of one state: as many elements as its part, or one number, of which `example` is one."""

    def __init__(self, example, part):
        self.is_whole = _is_of(example, part)
        self._example = example

    def like(self, number, part):
        """A state of this form with `number` in it."""
        if self.is_whole:
            return torch.full_like(part, number)
        if isinstance(self._example, torch.Tensor):
            return torch.full_like(self._example, number)
        return type(self._example)(number)


class _Layout:
    """Where an optimizer keeps its states, found by a trial: stores, and by group {name: _Form}."""

    def __init__(self, groups):
        self.stores = []  # (path of the optimizer, its attribute)
        self._places, self._groups = {}, [{} for _ in range(groups)]

    def of_group(self, group):
        """{name: _Form}."""
        return self._groups[group]

    def place_of(self, name):
        """((path, attribute), key within a parameter's entry or None)."""
        return self._places.get(name, (self.stores[0] if self.stores else ("", "state"), name))

    def add(self, where, group, part, entry):
        """Notes what stands in a store for a part."""
        if where not in self.stores:
            self.stores.append(where)
        keys = list(entry) if isinstance(entry, dict) else [None]
        for (name, value), key in zip(_named_entries(where, entry), keys):
            if value is None:
                continue
            if not _is_of(value, part) and not is_number(value) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
                kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
                raise UnsupportedError(f"its state `{name}` of a parameter of shape {list(part.shape)} is {kind}, which could be neither saved nor cut "
                                       "into shards; keep tensors of the parameter's shape, or numbers")
            self._places[name] = (where, key)
            self._groups[group].setdefault(name, _Form(value, part))


class _Trial:
    """A few steps of copies of an optimizer, on small tensors: whole ones, flat ones, and flat ones of two ranks.

    `layout` says which states it keeps.
    Raises  UnsupportedError: step() fails, moves nothing, or gives other values in one of these ways.
    """

    def __init__(self, client, beginnings, is_sharded):
        self._client, self._beginnings = client, beginnings
        self._generator = torch.Generator().manual_seed(0)
        self._chosen = list(dict.fromkeys(p for group in client.param_groups for p in _samples(group["params"])))
        self._begin = [self._draw(tuple(min(size, 3) for size in p.shape)) for p in self._chosen]
        # The gradients keep one direction, so that an optimizer that estimates its distance to the minimum sees it
        # grow.
        steady = [self._draw(tuple(begin.shape)) for begin in self._begin]
        self._gradients = [[one + 0.3 * self._draw(tuple(one.shape)) for one in steady] for _ in range(_TRIAL_STEPS)]
        self.layout = _Layout(len(client.param_groups))
        if not self._chosen:
            return
        whole = self._run([(lambda tensor: tensor)])
        self._check_moves(whole)
        self._compare(whole, self._run([torch.flatten], notes=True), "on flat tensors its steps differ from those on tensors of their own shapes")
        if is_sharded:
            halves = [lambda tensor: tensor.flatten()[:(tensor.numel() + 1) // 2], lambda tensor: tensor.flatten()[(tensor.numel() + 1) // 2:]]
            self._compare(whole, self._run(halves), "with the parameters divided over ranks (zero_optimization.stage 1 to 3, tensor_parallel) its steps differ from "
                          "those of one rank, so it looks at more than one element at a time; at stage 0 without tensor_parallel every rank has whole parameters")

    def _draw(self, shape):
        return torch.randn(shape, generator=self._generator)

    def _run(self, ranks, notes=False):
        """The stand-ins after the steps, flat, put together from all `ranks`."""
        results = []
        for cut in ranks:
            with _same_random_numbers():
                places = {p: _like(p, torch.empty(0)) for group in self._client.param_groups for p in group["params"]}
                places.update((p, _like(p, cut(begin).clone())) for p, begin in zip(self._chosen, self._begin))
                results.append(self._steps(places, cut, notes))
        return [torch.cat([part.flatten() for part in parts]) for parts in zip(*results)]

    def _steps(self, places, cut, notes):
        made = Copy(self._client, places, self._beginnings, is_trial=True)
        for group in made.own.param_groups:
            if is_number(group.get("lr")):
                fill(group, "lr", max(float(group["lr"]), 0.01))  # a schedule may begin at 0
        for gradients in self._gradients:
            for parameter, gradient in zip(self._chosen, gradients):
                places[parameter].grad = cut(gradient).clone() if places[parameter].numel() else None
            try:
                with without_global_hooks():
                    made.own.step()
            except Error:
                raise
            except Exception as error:
                raise UnsupportedError(f"its step() raised {type(error).__name__}: {str(error)[:200]}; {_FIX}") from error
        if notes:
            self._note(made, places)
        return [places[p] for p in self._chosen]

    def _check_moves(self, found):
        if all(torch.equal(now, begin.flatten()) for now, begin in zip(found, self._begin)):
            raise UnsupportedError(f"{_TRIAL_STEPS} steps with gradients left the parameters of its param_groups as they were; give initialize() the "
                                   "optimizer that updates them")

    def _compare(self, expected, found, difference):
        for one, other, begin in zip(expected, found, self._begin):
            way = (one - begin.flatten()).abs().max() if one.numel() else 0
            if not torch.allclose(one, other, rtol=0, atol=float(1e-3 * way + 1e-6), equal_nan=True):
                raise UnsupportedError(f"{difference}; {_FIX}")

    def _note(self, made, places):
        groups = {places[p]: g for g, group in enumerate(self._client.param_groups) for p in group["params"] if p in set(self._chosen)}
        seen = set()
        for path, _, own in made.optimizers:
            for name, value in vars(own).items():
                if id(value) in seen or name == "param_groups":
                    continue
                seen.add(id(value))
                if isinstance(value, dict) and any(isinstance(key, torch.Tensor) for key in value):
                    for part, entry in value.items():
                        if isinstance(part, torch.Tensor) and part in groups:
                            self.layout.add((path, name), groups[part], part, entry)
                    value = [inner for key, inner in value.items() if not isinstance(key, torch.Tensor)]
                _refuse_tensors(f"{path}.{name}" if path else name, value, made.optimizers, places, seen)
            for group in own.param_groups:
                for key, value in group.items():
                    if key != "params":
                        _refuse_tensors(f"param_groups[…]['{key}']", value, made.optimizers, places, seen)


def _samples(parameters):
    """Two of a group's parameters, rather such as have elements to tell apart."""
    trained = [p for p in parameters if p.requires_grad]
    return sorted(trained, key=lambda p: (p.dim() < 2, p.numel() < 2))[:1] + sorted(trained, key=lambda p: (p.numel() < 2, p.dim()))[:1]


@contextlib.contextmanager
def _same_random_numbers():
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random.seed(0)
        try:
            yield
        finally:
            random.setstate(state)


def _refuse_tensors(name, value, optimizers, places, seen):
    """Raises UnsupportedError: tensors of several elements that belong to no parameter."""
    if isinstance(value, torch.Tensor):
        if value.numel() > 1 and not any(value is place for place in places.values()):
            raise UnsupportedError(f"it keeps a tensor of shape {list(value.shape)} in `{name}`, which belongs to no parameter, so that it can neither be "
                                   "saved nor cut into shards; keep it in `state`, by parameter")
    elif isinstance(value, dict):
        for inner in value.values():
            _refuse_tensors(name, inner, optimizers, places, seen)
    elif isinstance(value, (list, tuple, set)):
        for inner in value:
            _refuse_tensors(name, inner, optimizers, places, seen)


def refuse_known(client):
    """Raises UnsupportedError: an optimizer that is known to need more than parts of parameters."""
    reasons = [_NEEDS_MORE[kind.__name__] for kind in type(client).__mro__ if kind.__name__ in _NEEDS_MORE]
    closure = inspect.signature(client.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        reasons.append("calls back for the loss")
    if reasons:
        raise UnsupportedError(f"optimizer: {type(client).__name__} {reasons[0]}, and here it would step this rank's flat parts of the parameters; {_FIX}")
