"""Lets `import smdistributed.modelparallel.torch as smp` mean trireme.smp in one process.

    python -m trireme.as_smp script.py …      runs a script, unchanged; with -m MODULE a module
    trireme.as_smp.install()                  in a notebook, before anything imports these names

Ranks send each other any object then, pickled, as smp's do: who can write to one rank's connections can run code in
another's process.
"""
import importlib.machinery
import sys
import types

import trireme.smp
from trireme.aliases import AliasFinder
from trireme.patches import Added, Patches
from trireme.programs import run
from trireme.smp import messages

SMP_VERSION = "1.15.0"  # whose surface this is
_TORCH = "smdistributed.modelparallel.torch"


def _package(name, **members):
    made = types.ModuleType(name, trireme.smp.__doc__)
    made.__dict__.update(__path__=[], __version__=SMP_VERSION, __spec__=importlib.machinery.ModuleSpec(name, None, is_package=True), **members)
    return made


def _is_ours(modules):
    return modules.get(_TORCH) is trireme.smp


def install():
    """From here on smp's names are this package's."""
    if _is_ours(sys.modules):
        return
    if _TORCH in sys.modules:
        raise ImportError(f"trireme.as_smp: {_TORCH} itself is imported already; call install() before")
    PATCHES.apply()
    messages.pickles_anything()


def _put_modules(modules):
    library = _package("smdistributed.modelparallel", torch=trireme.smp)
    modules["smdistributed"] = _package("smdistributed", modelparallel=library)
    modules["smdistributed.modelparallel"] = library
    modules[_TORCH] = trireme.smp

    def undo():
        for name in [name for name in modules if name.partition(".")[0] == "smdistributed"]:
            del modules[name]

    return undo


def _put_finder(finders):
    made = AliasFinder(lambda name: f"trireme.smp.{name.removeprefix(_TORCH + '.')}" if name.startswith(_TORCH + ".") else None)
    finders.insert(0, made)
    return lambda: finders.remove(made)


PATCHES = Patches("trireme.as_smp", "`trireme launch --as-smp`, `python -m trireme.as_smp` or `as_smp.install()`", [
    Added("sys", "meta_path", f"`{_TORCH}.NAME` is `trireme.smp.NAME`", _put_finder),
    Added("sys", "modules", f"`{_TORCH}` is `trireme.smp`", _put_modules, _is_ours),
])


def main(words):
    """Runs `SCRIPT …` or `-m MODULE …` as Python would, after install()."""
    run(words, "trireme.as_smp", f"`import {_TORCH}` meaning trireme.smp", install)


if __name__ == "__main__":
    from trireme.as_smp import main as _main  # not this copy of the module, which is called __main__
    _main(sys.argv[1:])
