"""Random numbers of parts: each rank draws its own from a stream beside torch's generator. Whoever keeps torch's state
and sets it again, as torch.utils.checkpoint does around a forward that it computes again, gets the same numbers of
parts, too."""
import torch

from .. import ranks
from .._native import core
from ..device import local_device
from ..patches import Patches, Wrapped

_WHY = "the numbers that are drawn for parts come again with torch's"


def _devices():
    return dict.fromkeys((torch.device("cpu"), local_device()))


def _kept(get):
    def get_rng_state():
        state = get()
        state.trireme_parts = [(device, core.EngineBase.random_state_of_parts(device)) for device in _devices()]
        return state

    return get_rng_state


def _restored(set_state):
    def set_rng_state(new_state):
        set_state(new_state)
        for device, state in getattr(new_state, "trireme_parts", ()):
            core.EngineBase.set_random_state_of_parts(device, state)

    return set_rng_state


PATCHES = Patches(__name__, "an engine is made that cuts samples or layers (sequence or tensor parallelism)", [
    Wrapped("torch", "get_rng_state", _WHY, _kept, also=("torch.random.get_rng_state",)),
    Wrapped("torch", "set_rng_state", _WHY, _restored, also=("torch.random.set_rng_state",)),
], ranks.living)
