"""Lets `import deepspeed` mean this package, in one process and those that it starts.

    python -m trireme.as_deepspeed script.py …      runs a script, unchanged; with -m MODULE a module
    trireme.as_deepspeed.install()                  in a notebook, before anything imports deepspeed

Other packages ask for the version of the installed package deepspeed, and for its modules by name: both are answered.
"""
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import types

import trireme
from trireme.deepspeed.aliases import AliasFinder

DEEPSPEED_VERSION = "0.19.8"  # whose surface this is
# A folder for sys.path in which `deepspeed` is found, and its metadata: processes that are started from here look there, too. The
# metadata are a file, *.egg-info: builds of wheels leave out folders called *.dist-info.
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


def install():
    """From here on `import deepspeed` is this package, here and in Python processes that are started from here."""
    if isinstance(sys.modules.get("deepspeed"), _Deepspeed):
        return
    if hasattr(sys.modules.get("deepspeed"), "DeepSpeedEngine"):
        raise ImportError("trireme.as_deepspeed: deepspeed itself is imported already; call install() before")
    if _FOLDER not in sys.path:
        sys.path.insert(1, _FOLDER)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _FOLDER not in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *filter(None, inherited)])
    sys.meta_path.insert(0, AliasFinder(lambda name: "trireme" + name[9:] if name.startswith("deepspeed.") else None))
    sys.modules["deepspeed"] = _Deepspeed()


def _refuse(complaint, status):
    """Ends as Python does where it finds no program: with its exit status, and without a traceback."""
    print(f"python -m trireme.as_deepspeed: {complaint}", file=sys.stderr)
    sys.exit(status)


def _is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            return False
        raise  # what a package of the name imports


def main(words):
    """Runs `SCRIPT …` or `-m MODULE …` as Python would, after install()."""
    if not words or (words[0] == "-m" and len(words) == 1) or words[0] in ("-h", "--help"):
        sys.exit("usage: python -m trireme.as_deepspeed [-m MODULE | SCRIPT] [ARGUMENT ...]\n"
                 "Runs a program with `import deepspeed` meaning trireme.")
    if words[0] != "-m" and not os.path.exists(words[0]):
        _refuse(f"script {words[0]}: there is no such file" + ("" if os.path.isabs(words[0]) else f" in {os.getcwd()}") +
                "; correct its path", status=2)
    install()
    if words[0] == "-m":
        if not _is_module(words[1]):
            _refuse(f"module {words[1]}: there is none of this name in sys.path; correct it, or set PYTHONPATH to its folder", status=1)
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    from trireme.as_deepspeed import main as _main  # not this copy of the module, which is called __main__
    _main(sys.argv[1:])
