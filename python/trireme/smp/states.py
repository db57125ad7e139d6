"""State dicts of a model and its optimizer over the ranks of one copy: of this rank's tensors, or whole. Behind the
methods of DistributedModel and DistributedOptimizer.

A partial one has `_smp_is_partial`: True. Partial ones of all stages, of whatever partition, are the whole together.
Ranks that share layers have whole tensors in theirs, which they take in turns.
"""
import collections
import itertools

import torch

from ..errors import ShapeError, StateError
from .._native import core
from ..activations import wholes
from ..training import optimizer_states
from . import messages, ranks
from .config import state

#: The key by which a state dict of one stage is known.
PARTIAL = "_smp_is_partial"
#: The key by which it is known to have a part of what copies of the model share.
_SHARD = "_smp_is_shard"
#: The state of a 16-bit parameter that is its weight in fp32.
_MASTER = "master"


# --- of the model ----------------------------------------------------------------------------------------------------


def local(module, engine):
    """module.state_dict() of what is on this stage, and of what every stage has, as copies on the host; of ranks that
    share layers each has some of these tensors. Collective over those."""
    found = module.state_dict(keep_vars=True)
    for name in [name for name, value in found.items() if _home(engine, value) not in (None, engine.stage)]:
        del found[name]
    numbers = itertools.count()

    def in_turns(value):
        on_host = _whole_on_host(engine, value)
        return on_host if next(numbers) % ranks.tp_size() == ranks.tp_rank() else None

    found = _copied(found, in_turns)
    for name in [name for name, value in found.items() if value is None]:
        del found[name]
    found[PARTIAL] = True
    return found


def alone(module):
    """module.state_dict() of a module that is whole on this rank, as copies on the host."""
    return _copied(module.state_dict(keep_vars=True), _on_host)


def whole(call, module, engine, to_rank_0):
    """module.state_dict() with copies on the host, the same on every rank of a copy of the model; with `to_rank_0`
    empty on all but the first. Collective over these ranks."""
    messages.meet(call, ranks.get_whole_group(), {"gather_to_rank0": bool(to_rank_0)})
    members = ranks.get_pp_group()
    keeps = not to_rank_0 or ranks.mp_rank() == 0

    def of_all_stages(value):
        on_host = _gathered(engine, value, members)
        return on_host if keeps else None

    found = _copied(module.state_dict(keep_vars=True), of_all_stages)
    return found if keeps else collections.OrderedDict()


def load(module, state_dict, strict, engine):
    """module.load_state_dict() of the tensors that are on this stage, out of a whole state dict, or a partial one of
    this stage. `engine`: None where every rank has all of them.

    Raises  ShapeError, StateError: it does not fit; nothing has changed then, unless hooks of modules rename tensors.
    """
    given = {name: value for name, value in state_dict.items() if name != PARTIAL}
    expected = module.state_dict(keep_vars=True)
    _check_shapes(given, expected)
    is_here = lambda name: engine is None or name not in expected or _home(engine, expected[name]) in (None, engine.stage)
    missing = [name for name in expected if name not in given and (is_here(name) or not is_partial(state_dict))]
    strange = [name for name in given if name not in expected]
    renames = any(inner._load_state_dict_pre_hooks for inner in module.modules())  # pylint: disable=protected-access
    if strict and not renames:
        _check_names(missing, strange)
    own = collections.OrderedDict((name, value) for name, value in given.items() if is_here(name))
    # Without versions modules would add what older ones lack, as BatchNorm does, in the place of other stages' tensors
    if (versions := getattr(state_dict, "_metadata", None if missing else expected._metadata)) is not None:  # pylint: disable=protected-access
        own._metadata = versions  # pylint: disable=protected-access
    loaded = module.load_state_dict(own, strict=False)
    missing = [name for name in loaded.missing_keys if name in missing]
    if strict:
        _check_names(missing, loaded.unexpected_keys)
    return type(loaded)(missing, loaded.unexpected_keys)


def check_fits(module, state_dict, strict):
    """Raises  ShapeError, StateError: a whole state dict, or the shapes of a partial one, do not fit."""
    given = {name: value for name, value in state_dict.items() if name != PARTIAL}
    expected = module.state_dict(keep_vars=True)
    _check_shapes(given, expected)
    if strict:
        _check_names([] if is_partial(state_dict) else [name for name in expected if name not in given], [name for name in given if name not in expected])


def _check_shapes(given, expected):
    different = [f"'{name}' is {list(value.shape)}, and {list(expected[name].shape)} in the model" for name, value in given.items()
                 if isinstance(value, torch.Tensor) and isinstance(expected.get(name), torch.Tensor) and value.shape != expected[name].shape]
    if different:
        raise ShapeError(f"load_state_dict(): {'; '.join(different[:5])}: load what was saved of such a model")


def _check_names(missing, strange):
    if missing or strange:
        texts = [f"{what} {', '.join(map(repr, names[:5]))}" for what, names in (("it lacks", missing), ("the model lacks", strange)) if names]
        raise StateError(f"load_state_dict(): {'; '.join(texts)}; load what was saved of such a model, or give strict=False to load what fits")


def is_partial(state_dict):
    """Whether a state dict is of one stage."""
    return bool(state_dict.get(PARTIAL, False))


def joined(call, partial, homes, stage):
    """The whole of the partial state dicts of all stages; tensors of other stages by `homes` are on the device "meta".
    Collective over the ranks of a copy of the model."""
    members = ranks.get_mp_group()
    messages.meet(call, members, "a partial state dict")
    told = messages.of_all(call, {name: _TENSOR if isinstance(value, torch.Tensor) else value for name, value in partial.items()}, members)
    found = collections.OrderedDict()
    for source, values in enumerate(told):
        for name, value in values.items():
            if name in found or name == PARTIAL:
                continue
            if value == _TENSOR:
                value = messages.value_of(call, partial.get(name), members, source)
                value = value if homes.get(name, stage) == stage else value.to("meta")
            found[name] = value
    if hasattr(partial, "_metadata"):
        found._metadata = partial._metadata  # pylint: disable=protected-access
    return found


_TENSOR = "a tensor of smp's"


def _home(engine, value):
    """The stage of a tensor; None: every stage has it, or it is none."""
    return engine.core.home_of(value) if isinstance(value, torch.Tensor) else None


def _copied(found, copy_of):
    """`found` with the copy of each tensor in its place; what is one tensor is one there, too."""
    copies = {}
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            is_slice = wholes.sizes_of_whole(value) is not None  # a parameter, with memory of its own
            place = () if is_slice else (value.storage_offset(), value.shape, value.stride())
            key = (wholes.storage_of(value)._cdata, *place)  # pylint: disable=protected-access
            if key not in copies:
                copies[key] = value, copy_of(value)  # while it is here no other one gets its address
            found[name] = copies[key][1]
    return found


def _on_host(value):
    return value.detach().to("cpu", copy=True)


def _whole_on_host(engine, value):
    """Collective over the ranks that share it, its layer or its shards."""
    is_shared = engine.core.is_slice(value) or state.cfg.zero_stage == 3 and core.is_managed(value)
    return core.whole_tensor(value).cpu() if is_shared else _on_host(value)


def _gathered(engine, value, members):
    home = _home(engine, value)
    if home is None:
        return _on_host(value)
    on_host = _whole_on_host(engine, value).contiguous() if members[home] == ranks.rank() else torch.empty(value.shape, dtype=value.dtype)
    messages.broadcast_bytes(on_host.reshape(-1).view(torch.uint8) if on_host.numel() else torch.empty(0, dtype=torch.uint8), members, home)
    return on_host


# --- of the optimizer ------------------------------------------------------------------------------------------------


def optimizer_local(call, optimizer, engine, gathers=True):
    """Its state_dict() with the states of this stage's parameters, by their numbers in the whole; of ranks that share
    layers each has those of some. Without `gathers` so it is of ranks that share optimizer states. Collective over
    these."""
    if state.cfg.zero_stage:
        messages.meet(call, ranks.get_dp_group(), {"gather_if_shard": bool(gathers)})
    is_shard = not gathers and state.cfg.zero_stage > 0
    sharers, place = (ranks.dp_size(), ranks.dp_rank()) if is_shard else (ranks.tp_size(), ranks.tp_rank())
    found = _of_stage(call, optimizer, engine)
    found["state"] = {number: one for at, (number, one) in enumerate(found["state"].items()) if at % sharers == place}
    return {**found, PARTIAL: True, **({_SHARD: True} if is_shard else {})}


def optimizer_whole(call, optimizer, engine):
    """Its state_dict() with the states of all parameters, on the host. Collective over the ranks of a copy of the
    model, or all where copies share it."""
    messages.meet(call, ranks.get_whole_group(), {"groups": len(optimizer.param_groups)})
    found = _of_stage(call, optimizer, engine)
    found["state"] = _joined_states(call, found["state"], ranks.get_pp_group())
    return found


def optimizer_joined(call, partial):
    """The whole of the partial ones of all stages. Collective over the ranks of a copy of the model; over all where
    copies share it."""
    members = ranks.get_whole_group() if partial.get(_SHARD) else ranks.get_mp_group()
    messages.meet(call, members, "a partial state dict")
    return {**{name: value for name, value in partial.items() if name not in (PARTIAL, _SHARD)}, "state": _joined_states(call, partial["state"], members)}


def load_optimizer(optimizer, state_dict, engine):
    """The states of this stage's parameters out of a whole state dict. Collective over the ranks of a stage."""
    engine.use(optimizer)
    client = engine.client_steps
    optimizer_states.check("optimizer.load_state_dict()", client, optimizer, _FIX)
    states, masters = _apart(optimizer, state_dict)
    is_own = _is_own(engine)
    optimizer_states.load(optimizer, states, is_own, client, lambda tensors: None)
    if state.cfg.half is None:
        return
    for parameter, master in masters.items():
        if is_own(parameter):
            core.safe_set_full_fp32_param(parameter, master)
    if state.cfg.fp16 and (scaler := state_dict.get(_SCALER)) is not None:
        engine.core.set_loss_scaler(tuple(scaler[name] for name in _OF_SCALER))
        optimizer.loss_scale = engine.core.loss_scale


_FIX = "save them by model.save_checkpoint(), and load that by load_checkpoint()"
_SCALER = "loss_scaler"  # of a state dict of an optimizer
_OF_SCALER = ("scale", "steps", "last_overflow", "hysteresis")


def _apart(optimizer, state_dict):
    """(The state dict without masters, {parameter: its master}). Raises ShapeError: one does not fit."""
    ids = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    everything = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    parameters = dict(zip(ids, everything))
    states, masters = {}, {}
    for number, one in state_dict["state"].items():
        states[number] = {name: value for name, value in one.items() if name != _MASTER}
        if _MASTER not in one or number not in parameters:
            continue
        if one[_MASTER].shape != parameters[number].shape:
            raise ShapeError(f"optimizer.load_state_dict(): the master of parameter {number} is {list(one[_MASTER].shape)}, and its parameter "
                             f"{list(parameters[number].shape)}: load what was saved of such a model")
        masters[parameters[number]] = one[_MASTER]
    return {**state_dict, "state": states}, masters


def _of_stage(call, optimizer, engine):
    found = type(optimizer).state_dict(optimizer)
    if engine.client_optimizer is not optimizer:
        return found
    optimizer_states.check(call, engine.client_steps, optimizer, _FIX)
    is_own = _is_own(engine)
    found["state"] = optimizer_states.of(optimizer, is_own, False, engine.client_steps)
    if state.cfg.half is not None:
        for number, parameter in enumerate(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)):
            if is_own(parameter) and parameter.requires_grad:
                found["state"].setdefault(number, {})[_MASTER] = core.safe_get_full_fp32_param(parameter).cpu()
        found["state"] = dict(sorted(found["state"].items()))
    if state.cfg.fp16:
        found[_SCALER] = dict(zip(_OF_SCALER, engine.core.loss_scaler()))
    return found


def _joined_states(call, own, members):
    told = messages.of_all(call, list(own), members)
    found = {}
    for source, numbers in enumerate(told):
        for number in numbers:
            if number not in found:
                found[number] = messages.value_of(call, own.get(number) if members[source] == ranks.rank() else None, members, source)
    return dict(sorted(found.items()))


def _is_own(engine):
    own = {id(parameter) for name, parameter in engine.module.named_parameters() if engine.homes[name] == engine.stage}
    return lambda parameter: id(parameter) in own


def has_shard(saved):
    """Whether there is a state dict in `saved` that has a part of what copies of the model share."""
    return isinstance(saved, dict) and (bool(saved.get(_SHARD, False)) or any(has_shard(inner) for inner in saved.values()))


def merged(partials):
    """The whole of partial state dicts, of a model or of an optimizer, that were loaded from files."""
    found = type(partials[0])()
    for name, value in ((name, value) for partial in partials for name, value in partial.items()):
        if name in (PARTIAL, _SHARD):
            continue
        if name == "state" and isinstance(value, dict) and "param_groups" in partials[0]:
            found.setdefault(name, {}).update(value)
        else:
            found.setdefault(name, value)
    return found
