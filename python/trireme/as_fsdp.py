"""Lets torch's names of FSDP mean trireme.fsdp in one process.

    python -m trireme.as_fsdp script.py …      runs a script, unchanged; with -m MODULE a module
    trireme.as_fsdp.install()                  in a notebook, before anything imports these names
"""
import functools
import multiprocessing.spawn
import sys

# This import keeps PyTorch's own FullyShardedDataParallel; no module here is one of those
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed._composable.fsdp

from trireme import fsdp
from trireme.fsdp import accelerate
from trireme.patches import Exchanged, Patches, Wrapped
from trireme.programs import run

_PLACES = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp", "torch.distributed._composable.fsdp.fully_shard",
           "torch.distributed.fsdp._fully_shard", "torch.distributed.fsdp._fully_shard._fully_shard", "torch.distributed.fsdp._fully_shard._fsdp_api")
_PLACES_OF_FSDP1 = ("torch.distributed.fsdp", "torch.distributed.fsdp.fully_sharded_data_parallel")


class _Installs:
    """Calls install() where it is unpickled, with the path that modules are found by here."""

    def __reduce__(self):
        return exec, (f"import sys\nsys.path[:] = {sys.path!r}\nfrom trireme import as_fsdp\nas_fsdp.install()",)


def _installing(prepare):
    def prepare_and_install(name):
        # the process unpickles it, and leaves names alone that it does not know
        return {"trireme": _Installs(), **prepare(name)}

    return prepare_and_install


def install():
    """From here on the names of torch.distributed.fsdp that trireme.fsdp has are trireme.fsdp's, in processes that
    multiprocessing spawns, too."""
    PATCHES.apply()
    accelerate.PATCHES.apply()


def _row(name, places):
    places = [place for place in places if hasattr(sys.modules.get(place), name)]
    return Exchanged(places[0], name, f"`trireme.fsdp.{name}`", functools.partial(getattr, fsdp, name), also=tuple(f"{place}.{name}" for place in places[1:]))


PATCHES = Patches("trireme.as_fsdp", "`trireme launch --as-fsdp`, `python -m trireme.as_fsdp` or `as_fsdp.install()`", [
    *[_row(name, _PLACES) for name in fsdp.__all__ if hasattr(torch.distributed.fsdp, name)],
    _row("FullyShardedDataParallel", _PLACES_OF_FSDP1),
    Wrapped("multiprocessing.spawn", "get_preparation_data", "processes that are started anew get these names, too, before they import the program", _installing),
])


def main(words):
    """Runs `SCRIPT …` or `-m MODULE …` as Python would, after install()."""
    run(words, "trireme.as_fsdp", "torch.distributed.fsdp's fully_shard meaning trireme", install)


if __name__ == "__main__":
    from trireme.as_fsdp import main as _main  # not this copy of the module, which is called __main__
    _main(sys.argv[1:])
