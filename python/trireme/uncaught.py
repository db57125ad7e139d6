"""Errors of this package that a program does not catch: shown with the program's own frames alone, and by a launcher of
ours once for all ranks that say the same. `TRIREME_TRACEBACK=full` shows every frame."""
import os
import site
import sys
import sysconfig
import traceback

from ._native import core
from .errors import CommError, Error, InternalError
from .patches import Added, Patches

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep


def _libraries():
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")] + [site.getusersitepackages()]
    return tuple(os.path.realpath(folder) + os.sep for folder in folders)


def _frames_of_program(stack):
    """The frames of `stack` that are neither Python's nor an installed package's; of a program that is installed itself
    those that are not this package's."""
    others = [frame for frame in stack if not frame.filename.startswith(("<frozen ", _OWN))]
    libraries = _libraries()
    return [frame for frame in others if not os.path.realpath(frame.filename).startswith(libraries)] or others


def text_of(error):
    """The traceback of `error`, with the frames of the program alone, also of the errors that led to it; those among
    them that the program never saw are left out."""
    shown = traceback.TracebackException.from_exception(error)
    one, seen = shown, set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        one.stack = traceback.StackSummary.from_list(_frames_of_program(one.stack))
        if one.__cause__ is None and one.__context__ is not None and not _frames_of_program(one.__context__.stack):
            one.__context__ = None
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return "".join(shown.format())


def _is_of_the_user(error):
    """Whether `error` is about what the program has given or called; frames of the library say nothing of it."""
    return isinstance(error, Error) and not isinstance(error, (CommError, InternalError))


def _is_out_of_memory(error):
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


class _Shows:
    own = False


def _show(kind, error, trace):
    if not _Shows.own or not _is_of_the_user(error):
        sys.__excepthook__(kind, error, trace)
        if _Shows.own and _is_out_of_memory(error):
            sys.stderr.write("trireme: out of memory: lower train_micro_batch_size_per_gpu, raise zero_optimization.stage, compute activations again "
                             "(trireme.recompute), or start fewer ranks on this machine\n")
        return
    text = text_of(error.with_traceback(trace))
    if not core.leave_to_launcher(text):
        sys.stderr.write(text)
        sys.stderr.flush()


def _show_from_now(found):
    sys.excepthook = _show
    _Shows.own = True

    def undo():
        _Shows.own = False  # where another hook calls this one
        if sys.excepthook is _show:
            sys.excepthook = found

    return undo


def install():
    """Lets errors that nobody catches be shown so, unless the program or its Python shows errors in a way of its
    own."""
    if sys.excepthook is sys.__excepthook__ and core.environment("TRIREME_TRACEBACK") != "full":
        PATCHES.apply()


PATCHES = Patches(__name__, "`import trireme`, unless there is a hook already or `TRIREME_TRACEBACK=full` is set", [
    Added("sys", "excepthook", "an error of this package that nobody catches is shown with the program's own frames alone", _show_from_now),
])
