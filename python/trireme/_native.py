"""Loads the extension, once it is known to fit the torch that is here."""
import importlib.util
import pathlib

import torch

try:
    from . import _build
except ImportError as error:
    raise ImportError("trireme: this folder holds the sources alone, not the built package; run `pip install .` in the project, "
                      "or put build/release/python on PYTHONPATH after `make build`") from error

_found = torch.__version__.split("+", maxsplit=1)[0]
if _found != _build.TORCH_VERSION:
    raise ImportError(f"trireme: built against torch {_build.TORCH_VERSION}, but torch {torch.__version__} is installed; install "
                      f"torch=={_build.TORCH_VERSION}, or rebuild against this one: pip install --no-build-isolation .")
if importlib.util.find_spec("trireme._core") is None:
    _others = sorted(path.name for path in pathlib.Path(__file__).parent.glob("_core.*.so"))
    raise ImportError("trireme: the extension " + (f"was built for another Python ({_others[0]}); run `pip install .` with this one"
                                                   if _others else "is not built yet; run `make build`, or `pip install .`"))

from . import _core as core  # pylint: disable=wrong-import-position

__all__ = ["core"]
