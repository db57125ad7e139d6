"""Forward passes of engines that cut samples or layers stay eager: compiled code reads sizes without Python, and hides
operators."""
import contextlib
import contextvars

from .. import ranks
from ..errors import StateError, UnsupportedError
from ..patches import Added, Patches

_keys = contextvars.ContextVar("trireme_cut_by", default=())


def check(module, keys):
    """Raises  UnsupportedError: `module` is compiled, and `keys` of the configuration cut what it computes."""
    if module._compiled_call_impl is not None:  # pylint: disable=protected-access
        raise UnsupportedError("forward: the module is compiled by torch.compile(), which hides operators from sequence and tensor parallelism; "
                               f"leave it eager, or set {' and '.join(keys)} to 1")


@contextlib.contextmanager
def forward_of(keys):
    """While it lives, torch.compile() is refused by name; `keys` of the configuration cut what is computed."""
    PATCHES.apply()
    token = _keys.set(tuple(keys))
    try:
        yield
    finally:
        _keys.reset(token)


def _refuse_to_compile(*_):
    if keys := _keys.get():
        raise StateError("torch.compile(): sizes of parts are the whole's for Python and this rank's for compiled code; leave functions that meet "
                         f"activations eager while an engine cuts them, or set {' and '.join(keys)} to 1")


def _watch_compilation(handler):
    handler.register_start_callback(_refuse_to_compile)
    return lambda: handler.remove_start_callback(_refuse_to_compile) if _is_watched(handler) else None


def _is_watched(handler):
    return _refuse_to_compile in handler.start_callbacks  # which torch._dynamo.reset() empties


PATCHES = Patches(__name__, "a forward pass of an engine that cuts samples or layers", [
    Added("torch._dynamo.callback", "callback_handler", "refuses `torch.compile()` inside of it", _watch_compilation, _is_watched),
], ranks.living)
