"""State dicts of LOCAL_STATE_DICT: of each parameter the elements that this rank updates, flat. They load on the same
rank of as many ranks alone."""
import torch

from .. import ranks
from .._native import core
from ..errors import StateError

_PLACE = "trireme_local_state"  # a tensor among the others: the rank that they are of, and the number of ranks


def _places(module):
    """{name: parameter} of those that are sharded."""
    own = torch.nn.Module.state_dict(module, keep_vars=True)
    return {name: parameter for name, parameter in own.items() if isinstance(parameter, torch.Tensor) and core.is_managed(parameter)}


def _place():
    world = ranks.world()
    return torch.tensor([world.rank, world.size])


def of(module, state, offload_to_cpu):
    """`state`, a module's state_dict() of whole tensors, with parts in the place of those that are sharded.
    Collective."""
    places = _places(module)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            part = core.own_part(places[name], value.full_tensor()) if name in places else value.detach().clone()
            state[name] = part.as_subclass(torch.Tensor).to("cpu" if offload_to_cpu else part.device)
    state[_PLACE] = _place()
    return state


def wholes(module, state):
    """The whole tensors of which ranks give what of() gave them. Collective.

    Raises  StateError on every rank: one of them has another rank's, or another kind of state dict.
    """
    world, places = ranks.world(), _places(module)
    place = state.get(_PLACE)
    is_own = place is not None and place.tolist() == _place().tolist()
    fits = is_own and all(name in state and state[name].numel() == core.owned_numel(parameter) for name, parameter in places.items())
    wrong = torch.tensor([0 if fits else 1])
    world.all_reduce(wrong, "max")
    if wrong.item():
        of_whom = "of another kind" if place is None else f"of rank {place[0]} of {place[1]}" + (", for another model" if is_own and not fits else "")
        here = "what this rank gives fits" if fits else f"what this rank gives is {of_whom}"
        raise StateError(f"load_state_dict() under LOCAL_STATE_DICT: each rank loads what it has saved itself, at the same number of ranks; rank {world.rank} of "
                         f"{world.size}: {here}. FULL_STATE_DICT and SHARDED_STATE_DICT load at any number")
    return {name: core.whole_of_parts(places[name], value).to(value.dtype) if name in places else value for name, value in state.items() if name != _PLACE}
