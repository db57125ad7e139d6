"""Runs a program as Python would, after some names mean something else: `python -m trireme.as_… SCRIPT …`."""
import importlib.util
import os
import runpy
import sys


def _refuse(name, complaint, status):
    """Ends as Python does where it finds no program: with its exit status, and without a traceback."""
    print(f"python -m {name}: {complaint}", file=sys.stderr)
    sys.exit(status)


def _is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            return False
        raise  # what a package of the name imports


def run(words, name, meaning, install):
    """Runs `SCRIPT …` or `-m MODULE …` after install(). `name` is the module that was called, and `meaning` what it
    does to names."""
    if not words or (words[0] == "-m" and len(words) == 1) or words[0] in ("-h", "--help"):
        sys.exit(f"usage: python -m {name} [-m MODULE | SCRIPT] [ARGUMENT ...]\nRuns a program with {meaning}.")
    if words[0] != "-m" and not os.path.exists(words[0]):
        _refuse(name, f"script {words[0]}: there is no such file" + ("" if os.path.isabs(words[0]) else f" in {os.getcwd()}") +
                "; correct its path", status=2)
    install()
    if words[0] == "-m":
        if not _is_module(words[1]):
            _refuse(name, f"module {words[1]}: there is none of this name in sys.path; correct it, or set PYTHONPATH to its folder", status=1)
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
    runpy.run_path(words[0], run_name="__main__")
