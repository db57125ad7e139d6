"""`is_shared()` of a parameter whose memory ZeRO has released: libtorch's own function ends the process there, as it
asks for the memory and may not throw."""
from .. import ranks
from .._native import core
from ..patches import Patches, Wrapped


def _answered(original):
    def is_shared(storage):
        return False if core.is_managed_storage(storage) else original(storage)

    return is_shared


PATCHES = Patches(__name__, "an engine is made, or `zero.Init` is entered", [
    Wrapped("torch", "UntypedStorage.is_shared", "memory that ZeRO manages is not shared by torch.multiprocessing; asked for it, libtorch would end the process", _answered),
], ranks.living)
