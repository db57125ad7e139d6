"""Lets `import deepspeed` mean this package, in one process and those that it starts.

    python -m trireme.as_deepspeed script.py …      runs a script, unchanged; with -m MODULE a module
    trireme.as_deepspeed.install()                  in a notebook, before anything imports deepspeed

Other packages ask for the version of the installed package deepspeed, and for its modules by name: both are answered.
"""
import importlib.machinery
import os
import sys
import types

import trireme
from trireme.aliases import AliasFinder
from trireme.patches import Added, Patches
from trireme.programs import run

DEEPSPEED_VERSION = "0.19.8"  # whose surface this is
# A folder for sys.path in which `deepspeed` is found, and its metadata: processes that are started from here look
# there, too. The metadata are a file, *.egg-info: builds of wheels leave out folders called *.dist-info.
_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "deepspeed_path")


class _Deepspeed(types.ModuleType):
    """The package `trireme` with another version."""

    def __init__(self):
        super().__init__("deepspeed", trireme.__doc__)
        major, minor, patch = map(int, DEEPSPEED_VERSION.split("."))
        self.__dict__.update(__version__=DEEPSPEED_VERSION, version=DEEPSPEED_VERSION, __version_major__=major, __version_minor__=minor,
                             __version_patch__=patch, __path__=[], __file__=trireme.__file__,
                             __spec__=importlib.machinery.ModuleSpec("deepspeed", None, origin=trireme.__file__, is_package=True))

    def __getattr__(self, name):
        return getattr(trireme, name)

    def __setattr__(self, name, value):
        (super() if name.startswith("__") else trireme).__setattr__(name, value)

    def __dir__(self):
        return dir(trireme)


def _is_ours(modules):
    return isinstance(modules.get("deepspeed"), _Deepspeed)


def install():
    """From here on `import deepspeed` is this package, here and in Python processes that are started from here."""
    if _is_ours(sys.modules):
        return
    if hasattr(sys.modules.get("deepspeed"), "DeepSpeedEngine"):
        raise ImportError("trireme.as_deepspeed: deepspeed itself is imported already; call install() before")
    PATCHES.apply()


def _put_module(modules):
    modules["deepspeed"] = _Deepspeed()

    def undo():
        for name in [name for name in modules if name.partition(".")[0] == "deepspeed"]:
            del modules[name]

    return undo


def _put_finder(finders):
    made = AliasFinder(lambda name: "trireme" + name[9:] if name.startswith("deepspeed.") else None)
    finders.insert(0, made)
    return lambda: finders.remove(made)


def _put_folder(path):
    if _FOLDER in path:
        return lambda: None
    path.insert(1, _FOLDER)
    return lambda: path.remove(_FOLDER) if _FOLDER in path else None


def _put_inherited(environment):
    before = environment.get("PYTHONPATH")
    inherited = (before or "").split(os.pathsep)
    if _FOLDER in inherited:
        return lambda: None
    environment["PYTHONPATH"] = made = os.pathsep.join([_FOLDER, *filter(None, inherited)])

    def undo():
        if environment.get("PYTHONPATH") == made:
            del environment["PYTHONPATH"]
            if before is not None:
                environment["PYTHONPATH"] = before

    return undo


PATCHES = Patches("trireme.as_deepspeed", "`trireme launch --as-deepspeed`, `python -m trireme.as_deepspeed` or `as_deepspeed.install()`", [
    Added("sys", "path", "a folder in which `deepspeed` is found, with its metadata", _put_folder, lambda path: _FOLDER in path),
    Added("os", "environ", "in `PYTHONPATH`, too, for Python processes that are started from here", _put_inherited),
    Added("sys", "meta_path", "`deepspeed.NAME` is `trireme.NAME`", _put_finder),
    Added("sys", "modules", "`deepspeed` is `trireme`", _put_module, _is_ours),
])


def main(words):
    """Runs `SCRIPT …` or `-m MODULE …` as Python would, after install()."""
    run(words, "trireme.as_deepspeed", "`import deepspeed` meaning trireme", install)


if __name__ == "__main__":
    from trireme.as_deepspeed import main as _main  # not this copy of the module, which is called __main__
    _main(sys.argv[1:])
