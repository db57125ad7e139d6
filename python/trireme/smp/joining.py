"""model.join(): copies of the model whose batches end before the others' go on with these, and count nothing.

Every call that all ranks make together begins with a meeting, to which ranks without batches come, too. These make the
same call then: a step function with their last arguments, whose backward passes begin with zeros.
"""
import contextlib
import json

import torch

from .. import agreement
from ..errors import ConfigError, StateError, UnsupportedError
from . import messages, program, ranks
from .config import state

_CALL = "DistributedModel.join()"


def of(models, call):
    """The Join that a step function of these models is in; None: there is none. Raises UnsupportedError: there are
    several models."""
    found = [model.joined for model in models if model.joined is not None]
    if found and len(models) > 1:
        raise UnsupportedError(f"{call}: {_CALL} with {len(models)} models is not there yet; give each rank as many batches, or put the modules into one model")
    return found[0] if found else None


class Join:
    """A context. `divide_by_initial_world_size`: gradients are divided by all copies; else by those that have a batch.
    `throws`: the first rank without a batch is an error on every rank."""

    def __init__(self, model, divides_by_all, throws):
        self._model, self._divides_by_all, self._throws = model, divides_by_all, throws
        self._last = {}  # {name of a step function: (it, args, kwargs)}
        self._is_out, self._active = False, frozenset()  # copies that have a batch

    @property
    def factor(self):
        """How often this rank's gradients count."""
        if self._is_out:
            return 0.0
        return 1.0 if self._divides_by_all or not self._active else ranks.rdp_size() / len(self._active)

    def __enter__(self):
        if self._model.joined is not None:
            raise StateError(f"{_CALL}: inside of another one; one is enough")
        agreement.check(state.world, {"divide_by_initial_world_size": self._divides_by_all, "throw_on_early_termination": self._throws}, _CALL)
        self._model.joined = self
        return self

    def __exit__(self, kind, error, trace):
        try:
            if kind is None:
                self._is_out = True
                while (call := self._met({"out": True, "can": list(self._last)})) is not None:
                    self._follow(call)
        finally:
            self._model.joined = None

    def meet(self, call, **told):
        """Before `call`, of which `told` is what ranks without batches need. Collective over the world.

        Raises  StateError, on every rank: ranks make other calls, or a rank without a batch cannot follow.
        """
        if not self._is_out:
            self._met({"call": call, **told})

    def meet_step(self, step, name, args, kwargs):
        """meet() before a step function."""
        self.meet(name, grad=torch.is_grad_enabled(), training=self._model.training)
        self._last[name] = step, args, kwargs

    def meet_update(self, optimizer):
        """meet() before optimizer.step(), whose hyperparameters all ranks take."""
        self.meet("optimizer.step()", groups=[{key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups])

    @contextlib.contextmanager
    def stepping(self):
        """Around a step function: it changes no buffers of copies without a batch. Where rank 0's are everyone's, its
        copy takes those of one that has a batch."""
        buffers = [buffer for _, buffer in self._model.local_named_buffers()]
        before = [buffer.clone() for buffer in buffers] if self._is_out else []
        yield
        with torch.no_grad():
            for buffer, value in zip(buffers, before):
                buffer.copy_(value)
            if buffers and 0 not in self._active and not self._model.has_own_buffers:
                found = messages.value_of(_CALL, [buffer.cpu() for buffer in buffers], ranks.get_rdp_group(), min(self._active))
                for buffer, value in zip(buffers, found if ranks.rdp_rank() == 0 else ()):
                    buffer.copy_(value)

    def _met(self, told):
        """The call that a rank with a batch told; None: there is none any more."""
        of_ranks = [json.loads(text) for text in state.world.gather(json.dumps({"copy": ranks.rdp_rank(), **told}), _CALL)]
        active = [rank for rank, one in enumerate(of_ranks) if "out" not in one]
        out = [rank for rank, one in enumerate(of_ranks) if "out" in one]
        self._active = frozenset(of_ranks[rank]["copy"] for rank in active)
        if not active:
            return None
        first = of_ranks[active[0]]
        if out and self._throws:
            raise StateError(f"{_CALL}: rank {out[0]} has no batch any more, before rank {active[0]} ({first['call']}), and throw_on_early_termination=True")
        for rank in active[1:]:
            if of_ranks[rank]["call"] != first["call"]:
                raise StateError(f"{_CALL}: rank {active[0]} calls {first['call']} and rank {rank} {of_ranks[rank]['call']}; ranks that have a batch run the same program")
        for rank in out:
            if of_ranks[rank]["copy"] in self._active:
                other = next(one for one in active if of_ranks[one]["copy"] == of_ranks[rank]["copy"])
                raise StateError(f"{_CALL}: rank {rank} has no batch any more, and rank {other}, which has a part of the same copy of the model, has one; give the ranks of "
                                 "smp.get_mp_group() as many batches")
            if "grad" in first and first["call"] not in of_ranks[rank]["can"]:
                raise StateError(f"{_CALL}: rank {rank} has ended without a call of {first['call']}, so that it has no arguments to follow with; give each rank one batch or more")
        return first

    def _follow(self, told):
        """The call of a rank with a batch."""
        call = told["call"]
        optimizer = program.optimizer_of(self._model)
        if "grad" in told:
            step, args, kwargs = self._last[call]
            with torch.set_grad_enabled(told["grad"]), _mode(self._model, told["training"]):
                step(*args, **kwargs)
        elif call == "zero_grad()":
            self._model.zero_grad()
        elif call == "optimizer.clip_master_grads()":
            optimizer.clip_master_grads(told["max_norm"], told["norm_type"])
        else:
            _take(optimizer, told["groups"])
            optimizer.step()


def join(model, divide_by_initial_world_size, enable, throw_on_early_termination):
    """The context of DistributedModel.join(). Raises ConfigError: an argument that is no bool."""
    for name, value in (("divide_by_initial_world_size", divide_by_initial_world_size), ("enable", enable), ("throw_on_early_termination", throw_on_early_termination)):
        if not isinstance(value, bool):
            raise ConfigError(f"DistributedModel.join({name}={value!r}): expected True or False")
    return Join(model, divide_by_initial_world_size, throw_on_early_termination) if enable else contextlib.nullcontext()


def refuse(model, call):
    """Raises StateError: `call`, which ranks without a batch do not follow, inside of model.join()."""
    if model is not None and model.joined is not None:
        raise StateError(f"{call}: inside of model.join(), where ranks without a batch follow step functions, zero_grad(), clip_master_grads() and optimizer.step() alone; "
                         "call it when the context has ended")


@contextlib.contextmanager
def _mode(model, is_training):
    before = model.training
    if before != is_training:
        model.train(is_training)
    yield
    if before != is_training:
        model.train(before)


def _plain(value):
    """A hyperparameter as JSON has it; None: it has nothing of it."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return value if isinstance(value, (bool, int, float)) else None


def _take(optimizer, groups):
    """The hyperparameters of another rank's optimizer."""
    for group, told in zip(optimizer.param_groups, groups):
        for key, value in told.items():
            if value is None or _plain(group.get(key)) == value:
                continue
            if isinstance(group[key], torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = type(group[key])(value)
