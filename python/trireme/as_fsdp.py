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
from trireme.programs import run

_PLACES = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp", "torch.distributed._composable.fsdp.fully_shard",
           "torch.distributed.fsdp._fully_shard", "torch.distributed.fsdp._fully_shard._fully_shard", "torch.distributed.fsdp._fully_shard._fsdp_api")
_PLACES_OF_FSDP1 = ("torch.distributed.fsdp", "torch.distributed.fsdp.fully_sharded_data_parallel")


_is_installed = False


class _Installs:
    """Calls install() where it is unpickled, with the path that modules are found by here."""

    def __reduce__(self):
        return exec, (f"import sys\nsys.path[:] = {sys.path!r}\nfrom trireme import as_fsdp\nas_fsdp.install()",)


def _reach_spawned():
    """Processes that multiprocessing starts anew call install(), too, before they import the program."""
    prepare = multiprocessing.spawn.get_preparation_data

    @functools.wraps(prepare)
    def prepare_and_install(name):
        # the process unpickles it, and leaves names alone that it does not know
        return {"trireme": _Installs(), **prepare(name)}

    multiprocessing.spawn.get_preparation_data = prepare_and_install


def install():
    """From here on the names of torch.distributed.fsdp that trireme.fsdp has are trireme.fsdp's, in processes that
    multiprocessing spawns, too."""
    global _is_installed  # pylint: disable=global-statement
    if not _is_installed:
        _is_installed = True
        _reach_spawned()
    for place in _PLACES:
        module = sys.modules.get(place)
        for name in fsdp.__all__:
            if module is not None and hasattr(module, name):
                setattr(module, name, getattr(fsdp, name))
    for place in _PLACES_OF_FSDP1:
        sys.modules[place].FullyShardedDataParallel = fsdp.FullyShardedDataParallel
    accelerate.install()


def main(words):
    """Runs `SCRIPT …` or `-m MODULE …` as Python would, after install()."""
    run(words, "trireme.as_fsdp", "torch.distributed.fsdp's fully_shard meaning trireme", install)


if __name__ == "__main__":
    from trireme.as_fsdp import main as _main  # not this copy of the module, which is called __main__
    _main(sys.argv[1:])
