"""Distributed training for unmodified PyTorch models: `import trireme as deepspeed`.

    engine, optimizer, loader, scheduler = trireme.initialize(model=model, config="ds_config.json")
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
"""
import importlib
import pathlib
from typing import TYPE_CHECKING

from . import errors, uncaught as _uncaught
from ._build import TORCH_VERSION as _TORCH_VERSION, VERSION as __version__
from ._native import core as _core
from .deepspeed import accelerator, checkpoint, checkpointing, comm, launcher, missing as _missing, ops, runtime, utils, zero
from .deepspeed.accelerator import get_accelerator
from .deepspeed.autotp import set_autotp_mode, tp_model_init
from .deepspeed.comm import init_distributed
from .deepspeed.engine import DeepSpeedEngine
from .deepspeed.initialize import add_config_arguments, initialize
from .deepspeed.runtime import DeepSpeedOptimizer, ZeROOptimizer
from .deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from .deepspeed.utils import OnDevice, log_dist, logger

#: What CMAKE_PREFIX_PATH needs for find_package(Trireme); of a package that pip installed.
cmake_prefix_path = str(pathlib.Path(__file__).parent / "lib" / "cmake")
dist = comm
version = __version__
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split("."))
__git_hash__, __git_branch__ = git_hash, git_branch = "unknown", "unknown"

if TYPE_CHECKING:
    from .deepspeed import pipe
    from .deepspeed.pipe import PipelineModule

_uncaught.install()
_missing_names = _missing.names_of("trireme", "revert_transformer_layer")


def __getattr__(name):
    if name not in ("pipe", "PipelineModule"):
        return _missing_names(name)
    pipe = importlib.import_module(".deepspeed.pipe", __name__)  # when it is asked for: most programs do not
    return pipe if name == "pipe" else pipe.PipelineModule
