"""ZeRO-3's scopes: models that are made in shards, and whole parameters for the length of a scope."""
import enum
import sys

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from .. import config as configs, higher_order
from .._native import core
from ..activations import wholes
from ..errors import ConfigError, ShapeError, UnsupportedError
from ..parameters import in_order, is_numbered, number, numbered
from ..watch import shared_memory
from . import comm, missing
from .mem_needs import (estimate_zero2_model_states_mem_needs_all_cold, estimate_zero2_model_states_mem_needs_all_live,
                        estimate_zero3_model_states_mem_needs_all_cold, estimate_zero3_model_states_mem_needs_all_live)
from .optimizer_kinds import DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3

__path__ = []  # zero.partition_parameters is this module, too
partition_parameters = sys.modules[__name__]
__getattr__ = missing.names_of(__name__, "MiCS_AllGatherCoalescedHandle MiCS_Offload MiCS_Optimizer")


# transformers replaces the first of these while it makes a model, to keep DeepSpeed from casting what arange() gives:
# here nothing is wrapped, and a tensor that was told its dtype keeps it.
_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn, *_args, **_kwargs):
    """`fn` itself."""
    return fn


class ZeroParamType(enum.Enum):
    """How a parameter lies in memory. Here every one is a NORMAL tensor of its whole shape."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """Whether a parameter can be read. Here every one can: what is sharded is gathered when an operator touches it."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def _options_of(config):
    """A configuration as far as Init reads it: neither optimizer nor schedule, whose "auto" values a program fills
    later."""
    given = configs.without_auto(configs.read(config))
    given = {key: value for key, value in given.items() if key not in ("optimizer", "scheduler") and value != "auto"}
    given.setdefault("train_micro_batch_size_per_gpu", 1)
    for key in ("train_batch_size", "gradient_accumulation_steps"):
        given.pop(key, None)
    return given


class Init:
    """While it lasts, what a model makes is sharded over the ranks as soon as it is cold; initialize() takes it over.
    Collective.

        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Model()

    module               made whole already: its values become shards with initialize(); nothing is done to it here.
    remote_device        where shards stay: None or "cpu", which is the same here.
    config_dict_or_path  as initialize()'s: gives the dtype, and switches the scope off below ZeRO stage 3; also as
                         `config`.
    enabled              False: the scope does nothing.
    dtype                of what is made without one; None: the configuration's.

    Raises  UnsupportedError: a group of its own, quantized weights. ConfigError: a dtype that is not floating.
    """

    def __init__(self, module=None, data_parallel_group=None, mem_efficient_linear=True, remote_device=None, pin_memory=False,
                 config_dict_or_path=None, config=None, enabled=True, dtype=None, mpu=None, zero_param_parallel_group=None,
                 zero_quantized_weights=False, zero_quantized_nontrainable_weights=False, sequence_data_parallel_group=None,
                 param_swapper=None, tensor_overrides=None):
        # pylint: disable=too-many-arguments,unused-argument
        asked = {"mpu": mpu, "zero_param_parallel_group": zero_param_parallel_group, "param_swapper": param_swapper,
                 "zero_quantized_weights": zero_quantized_weights or zero_quantized_nontrainable_weights,
                 "sequence_data_parallel_group": sequence_data_parallel_group}
        for name, value in asked.items():
            if value:
                raise UnsupportedError(f"zero.Init({name}=…) is not there yet; leave it out")
        given = config_dict_or_path if config_dict_or_path is not None else config
        self._arguments = (None if given is None else _options_of(given), dtype, remote_device or "", bool(enabled))
        self._scope = self._hook = None

    def __enter__(self):
        higher_order.PATCHES.apply()
        shared_memory.PATCHES.apply()
        self._scope = core.InitContext(comm.world(), *self._arguments)
        self._scope.__enter__()
        self._hook = register_module_parameter_registration_hook(number)
        return self

    def __exit__(self, *error):
        self._hook.remove()
        scope, self._scope = self._scope, None
        scope.__exit__(*error)
        return False

    @property
    def peak_live_bytes(self):
        """Most bytes that whole tensors held at once on this rank; inside of the scope."""
        return self._scope.peak_live_bytes if self._scope is not None else 0


class MiCS_Init(Init):  # pylint: disable=invalid-name
    """Init for a model that initialize() shards within groups of "mics_shard_size" ranks; inside of the scope the
    shards are over all ranks.

    Arguments are Init's. Raises  ConfigError: the configuration has no "mics_shard_size". As Init.
    """

    def __init__(self, module=None, data_parallel_group=None, sequence_data_parallel_group=None, mem_efficient_linear=True, remote_device=None,
                 pin_memory=False, config_dict_or_path=None, config=None, enabled=True, dtype=None, mpu=None):
        # pylint: disable=too-many-arguments
        given = config_dict_or_path if config_dict_or_path is not None else config
        section = configs.read(given).get("zero_optimization", {}) if given is not None else {}
        if section.get("mics_shard_size", -1) == -1:
            raise ConfigError('zero.MiCS_Init: the configuration has no "zero_optimization": {"mics_shard_size": N}; set it in config_dict_or_path, '
                              "or use zero.Init")
        super().__init__(module=module, data_parallel_group=data_parallel_group, sequence_data_parallel_group=sequence_data_parallel_group,
                         mem_efficient_linear=mem_efficient_linear, remote_device=remote_device, pin_memory=pin_memory, config_dict_or_path=given,
                         enabled=enabled, dtype=dtype, mpu=mpu)


def _tensors_of(params):
    if isinstance(params, torch.Tensor):
        return [params]
    if isinstance(params, torch.nn.Module):
        return list(params.parameters())
    params = list(params.values() if isinstance(params, dict) else params)
    odd = [param for param in params if param is not None and not isinstance(param, torch.Tensor)]
    if odd:
        raise ShapeError(f"GatheredParameters: expected tensors or a module, got {odd[0]!r:.60}")
    params = dict.fromkeys(param for param in params if param is not None)
    return in_order(params)


def _are_loaded(tensors):
    """Whether these are what state_dict() gives of parameters that transformers has marked as filled by a checkpoint:
    it asks for all of them where it means the others alone. What is touched inside of the scope is gathered then."""
    owners = [(tensor, numbered(tensor)) for tensor in tensors if is_numbered(tensor)]
    return all(owner is not tensor and getattr(owner, "_is_hf_initialized", False) for tensor, owner in owners)


def _check_wholes(tensors):
    """Raises UnsupportedError: one rank cannot write a tensor of which it has a part."""
    for tensor in tensors:
        if (sizes := wholes.sizes_of_whole(tensor)) is not None:
            raise UnsupportedError(f"GatheredParameters(modifier_rank=…): {tuple(sizes)} is a tensor of which each rank has a part, so that no rank can write it "
                                   "for all; write it on every rank alike, such as by load_state_dict(), or before initialize()")


class GatheredParameters:
    """While it lasts, `params` (a tensor, a module or an iterable of tensors) are whole and may be read directly.
    Collective.

    modifier_rank  whose values become everybody's at the end; None: reading alone, a write by an operator is an error.
    fwd_module     accepted; nothing needs to be registered.
    """

    def __init__(self, params, modifier_rank=None, fwd_module=None, enabled=True):
        # pylint: disable=unused-argument
        tensors = _tensors_of(params) if enabled else []
        if modifier_rank is not None and _are_loaded(tensors):
            tensors = []
        if modifier_rank is not None:
            _check_wholes(tensors)
        self._scope = core.GatheredContext(tensors, modifier_rank) if enabled else None

    def __enter__(self):
        if self._scope is not None:
            self._scope.__enter__()

    def __exit__(self, *error):
        if self._scope is not None:
            self._scope.__exit__(*(error or (None, None, None)))
        return False


def _check_parameter(parameter):
    if not isinstance(parameter, torch.nn.Parameter):
        raise ShapeError("expected a torch.nn.Parameter")


def register_external_parameter(module, parameter):
    """Accepted for programs that were written for it: a parameter that another module uses is found by itself."""
    # pylint: disable=unused-argument
    _check_parameter(parameter)


def unregister_external_parameter(module, parameter):
    """As register_external_parameter()."""
    # pylint: disable=unused-argument
    _check_parameter(parameter)


def is_zero_param(parameter):
    """Whether DeepSpeed's attributes (ds_id, ds_status, …) are on a parameter: here never, it is an ordinary tensor."""
    return hasattr(parameter, "ds_id")
