"""initialize(): an engine of a model, a configuration, and what a program has made itself."""
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import errors
from ..watch import earlier_engines
from . import comm
from .engine import DeepSpeedEngine

_Config = dict[str, Any] | str | os.PathLike[str] | None


def _check_arguments(model, training_data):
    if not isinstance(model, torch.nn.Module):
        fix = f"; make one, {model.__name__}(…)" if isinstance(model, type) else "; put several into one torch.nn.Module"
        raise errors.ConfigError(f"initialize: model is {model!r:.60}; expected a torch.nn.Module{fix}")
    if training_data is not None and not (hasattr(training_data, "__len__") and hasattr(training_data, "__getitem__")):
        raise errors.ConfigError(f"initialize: training_data is a {type(training_data).__name__}, which has no length and indices by which ranks "
                                 "could share it; make a DataLoader of this rank's part yourself")
    if training_data is not None and len(training_data) == 0:
        raise errors.ConfigError("initialize: training_data is empty; give it samples, or leave it out")


def _engine_of(model):
    """The class of engine that trains `model`."""
    # A program that has a PipelineModule has imported this module
    layers = sys.modules.get(f"{__package__}.runtime.pipe.module")
    if layers is None or not isinstance(model, layers.PipelineModule):
        return DeepSpeedEngine
    dualpipev = importlib.import_module(".runtime.pipe.dualpipev", __package__)
    return dualpipev.DualPipeVEngine if isinstance(model, dualpipev.DualPipeVModule) else dualpipev.PipelineEngine


def _choose(config, args):
    """The configuration, as an argument or args.deepspeed_config."""
    named = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if named is not None:
        assert config is None, "Not sure how to proceed, we were given deepspeed configs in the deepspeed arguments and " \
                               "deepspeed.initialize() function call"
        return named
    assert config is not None, "DeepSpeed requires --deepspeed_config to specify configuration file, or config= of initialize()"
    return config


def initialize(args: Any = None, model: torch.nn.Module | None = None,
               optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None, model_parameters: Iterable[Any] | None = None,
               training_data: torch.utils.data.Dataset[Any] | None = None, lr_scheduler: Any = None, distributed_port: int = 29500,
               mpu: Any = None, dist_init_required: bool | None = None, collate_fn: Callable[..., Any] | None = None,
               config: _Config = None, mesh_param: Any = None, config_params: _Config = None,
               ) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Makes `model`, any torch.nn.Module, trainable over the ranks of the job; a PipelineModule in stages
    (PipelineEngine). Collective.

    optimizer         of torch.optim or trireme.ops, or a callable that makes one of parameters; None: the
                      configuration's.
    model_parameters  what is trained: tensors, or dicts of them with hyperparameters of their own; None: all that
                      require grad.
    training_data     a dataset: the third value returned is a DataLoader over this rank's part of it; train_batch() of
                      a pipeline takes it.
    lr_scheduler      of torch.optim.lr_scheduler, or a callable that makes one of the optimizer; None: the
                      configuration's.
    mpu               an object with Megatron's getters of the tensor axis, which the configuration's `tensor_parallel`
                      must fit.
    config            a dict, a path or base64 of JSON; also as config_params or args.deepspeed_config.

    An engine that `model` has already ends, which is told. Returns (engine, optimizer, dataloader, lr_scheduler).
    Raises  ConfigError and its subclasses, before the model has been changed.
    """
    assert model is not None, "deepspeed.initialize requires a model"
    _check_arguments(model, training_data)
    if config is not None and config_params is not None:
        raise errors.ConfigError("initialize: config and config_params are two names of one argument; give one of them")
    if mesh_param is not None:
        raise errors.UnsupportedError(f"initialize(mesh_param={mesh_param!r}) is not there yet; leave it out, and set sequence_parallel_size")
    kind = _engine_of(model)
    assert mpu is None or kind is DeepSpeedEngine, "mpu must be None with pipeline parallelism"
    if sharded := [name for name, parameter in model.named_parameters() if hasattr(parameter, "device_mesh")]:
        raise errors.UnsupportedError(f"initialize: parameter '{sharded[0]}' is a DTensor, as fully_shard() or a tensor-parallel plan makes them; "
                                      "such programs are not there yet: leave it out, ZeRO stage 3 shards parameters itself")
    config = _choose(config if config is not None else config_params, args)
    comm.init_distributed(dist_init_required=dist_init_required, distributed_port=distributed_port)
    with earlier_engines.thawed(model):
        engine = kind(model, config, mpu=mpu, optimizer=optimizer, model_parameters=model_parameters, lr_scheduler=lr_scheduler)
    if training_data is not None:
        engine.take_training_data(training_data, collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser):
    """Adds --deepspeed and --deepspeed_config (and their old names) to an argparse parser, which it returns."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    for name, old in (("deepspeed", ""), ("deepscale", "Deprecated. ")):
        group.add_argument(f"--{name}", default=False, action="store_true", help=f"{old}For programs to read; means nothing here.")
        group.add_argument(f"--{name}_config", default=None, type=str, help=f"{old}Path of the JSON configuration.")
    return parser
