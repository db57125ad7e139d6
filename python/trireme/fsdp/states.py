"""States of a program's optimizer of sharded parameters: whole, in a state dict, and as `optimizer.state` shows
them."""
import torch

from .. import agreement, ranks
from .._native import core
from ..errors import UnsupportedError
from ..training import optimizer_states
from .tensors import ShardedParameter
from .values import Source, Value, plain


def _is_own(parameter):
    return isinstance(parameter, ShardedParameter)


def check(call, client, optimizer):
    """As optimizer_states.check()."""
    optimizer_states.check(call, client, optimizer,
                           "save them with the weights by trireme.fsdp.save_checkpoint(model, optimizer, folder), and load that by load_checkpoint()")


def of(optimizer, has_all, client):
    """As optimizer_states.of()."""
    return optimizer_states.of(optimizer, _is_own, has_all, client)


def names(optimizer, client):
    """As optimizer_states.names()."""
    return optimizer_states.names(optimizer, _is_own, client)


def load(optimizer, state_dict, client):
    """As optimizer_states.load(), of states that are the same on every rank. Collective."""
    read = {id_: {name: plain(value) for name, value in (one or {}).items()} for id_, one in state_dict["state"].items()}
    optimizer_states.load(optimizer, {**state_dict, "state": read}, _is_own, client,
                          lambda tensors: agreement.check_tensors(ranks.world(), "optimizer.load_state_dict()", tensors))


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
            return torch.as_tensor(optimizer_states.of_client(self._client, self._parameter)[self._name], dtype=self.dtype)
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
    has_all = has_all or optimizer_states.has_from_start(optimizer)
    found = {parameter: one for parameter, one in names(optimizer, client).items() if one and (has_all or core.step_count(parameter))}
    return {parameter: {name: _form(optimizer, parameter, name, client) for name in one} for parameter, one in found.items()}


def _form(optimizer, parameter, name, client):
    if client is not None and name != "step" and not client.forms(parameter)[name].is_whole:
        return optimizer_states.of_client(client, parameter).get(name)  # a number, such as NAdam's mu_product
    return Value(_State(optimizer, parameter, name, client))
