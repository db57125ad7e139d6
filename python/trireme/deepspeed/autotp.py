"""Ranks that share layers, as DeepSpeed's programs ask for it (AutoTP): by `tensor_parallel` of the configuration,
tp_model_init() and mpu."""
import enum

import torch
import torch.distributed as dist

from .. import ranks
from ..config import read as load_ds_config
from ..errors import ConfigError
from .missing import names_of

__getattr__ = names_of(__name__)

__path__ = []  # runtime.tensor_parallel.init_utils is this module, too

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_SEVERAL = "Conflicting tp_model_init arguments detected across multiple calls"


class AUTOTP_MODE(enum.Enum):  # pylint: disable=invalid-name
    """The purpose of tensor parallelism."""

    TRAINING = "TRAINING"
    INFERENCE = "INFERENCE"


_mode = AUTOTP_MODE.INFERENCE
_recorded = None  # {"tp_size", "dtype", "tp_group"} of tp_model_init()


def set_autotp_mode(training=False):
    """For programs that ask is_autotp_training_mode(); initialize() shares layers where the configuration or
    tp_model_init() says so."""
    global _mode  # pylint: disable=global-statement
    _mode = AUTOTP_MODE.TRAINING if training else AUTOTP_MODE.INFERENCE


def get_auto_tp_mode():
    """The AUTOTP_MODE."""
    return _mode


def is_autotp_training_mode():
    """Whether set_autotp_mode(training=True) was called, or initialize() shares layers."""
    return _mode is AUTOTP_MODE.TRAINING


def tp_model_init(model, tp_size, dtype, config=None, **kwargs):
    """Records how many ranks share each layer, for initialize(), which cuts the model. Returns `model`, as it is.

    tp_group  in kwargs: the ranks that share layers; they must be neighbours.
    Raises  ConfigError (a ValueError): a size, dtype or group other than those of an earlier call, or of the
            configuration, then.
    """
    # pylint: disable=unused-argument
    if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
        raise ConfigError(f"tp_model_init: tp_size is {tp_size!r}; give the number of ranks that share each layer, from 1 on")
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"tp_model_init: dtype is {dtype!r}; give a torch.dtype, such as torch.bfloat16")
    record_tp_model_init_args(tp_size=tp_size, dtype=dtype, tp_group=kwargs.get("tp_group"), dist_module=dist)
    set_autotp_mode(training=True)
    return model


def record_tp_model_init_args(tp_size, dtype, tp_group, dist_module):
    """Keeps the arguments of tp_model_init(). Raises ConfigError: other ones than before."""
    global _recorded  # pylint: disable=global-statement
    given = {"tp_size": tp_size, "dtype": dtype, "tp_group": tp_group}
    if _recorded is None:
        _recorded = given
        return
    sizes = [tp_group_world_size(one["tp_group"], dist_module) for one in (_recorded, given)]
    for key in ("tp_size", "dtype"):
        if _recorded[key] != given[key]:
            raise ConfigError(f"{_SEVERAL}: {key} {_recorded[key]} and {given[key]}.")
    if (_recorded["tp_group"] is None) != (tp_group is None):
        raise ConfigError(f"{_SEVERAL}: one of them has a tp_group.")
    if sizes[0] != sizes[1]:
        raise ConfigError(f"{_SEVERAL}: tp_group of {sizes[0]} and of {sizes[1]} ranks.")


def tp_group_world_size(tp_group, dist_module):
    """Ranks of a group; None without one."""
    return None if tp_group is None or dist_module is None else dist_module.get_world_size(group=tp_group)


def infer_config_dtype(config_dict):
    """That of bf16 or fp16, where one is enabled; else None."""
    for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        section = config_dict.get(key, {})
        if isinstance(section, dict) and section.get("enabled", False):
            return dtype
    return None


def merge_tp_model_init_into_config(config_dict, mpu, mesh_param, dist_module):
    """Writes what tp_model_init() has recorded into `config_dict`, where it does not say it itself.

    Raises  ConfigError (a ValueError): the two contradict each other, with both values.
    """
    # pylint: disable=unused-argument
    if _recorded is None:
        return
    size, dtype, group = _recorded["tp_size"], _recorded["dtype"], _recorded["tp_group"]
    if group is not None and mpu is not None:
        raise ConfigError("tp_model_init provided tp_group; deepspeed.initialize must not receive mpu.")
    section = config_dict.setdefault("tensor_parallel", {})
    tp = section.get("tp") or {}
    if not isinstance(tp, dict):
        raise ConfigError(f"tensor_parallel.tp must be a dict when provided, not {tp!r:.40}.")
    for path, found in (("autotp_size", section.get("autotp_size")), ("tp.tp_size", tp.get("tp_size"))):
        if found is not None and found != size:
            raise ConfigError(f"Conflicting tensor_parallel.{path} in config ({found}) and tp_model_init ({size}).")
    if group is not None:
        if tp.get("tp_group") is not None and tp["tp_group"] is not group:
            raise ConfigError("Conflicting tensor_parallel.tp.tp_group in config and tp_model_init.")
        if (of_group := tp_group_world_size(group, dist_module)) not in (None, size):
            raise ConfigError(f"tp_model_init tp_size ({size}) does not match tp_group size ({of_group}).")
    given = infer_config_dtype(config_dict)
    if given is not None and given != dtype:
        raise ConfigError(f"Conflicting dtype: config uses {given} but tp_model_init requested {dtype}.")
    given = section.get("dtype")
    if (_DTYPES.get(given.lower()) if isinstance(given, str) else given) not in (None, dtype):
        raise ConfigError(f"Conflicting tensor_parallel.dtype in config ({given}) and tp_model_init ({dtype}).")
    section["autotp_size"] = size
    section["tp"] = {**tp, "tp_size": size, **({} if group is None else {"tp_group": group})}


# --- initialize() ---

def has_rules(config):
    """Whether layers are cut over several ranks by rules, as the dict `config` says."""
    section = config.get("tensor_parallel")
    if not isinstance(section, dict):
        return False
    sizes = [section.get("autotp_size"), *((section.get(key) or {}).get("tp_size") for key in ("tp", "partition_config") if isinstance(section.get(key), dict))]
    return any(isinstance(size, int) and size > 1 for size in sizes)


def merged(config, mpu):
    """The dict `config` as initialize() takes it: with what tp_model_init() and `mpu` say, and without objects; and the
    ranks over which the program has cut its layers itself. Collective where ranks' groups are given.

    Raises  ConfigError, on every rank: the three contradict each other; groups that ranks of this job cannot share
            layers in.
    """
    given = config.get("tensor_parallel")
    if not isinstance(given, (dict, type(None))) or (given is None and mpu is None and _recorded is None):
        return config, 1
    config, is_asked = {**config}, given is not None or _recorded is not None
    if is_asked:
        config["tensor_parallel"] = {key: value for key, value in (given or {}).items() if value != "auto"}
    merge_tp_model_init_into_config(config, mpu, None, dist)
    section = config.get("tensor_parallel") or {}
    tp = dict(section.get("tp") or {})
    group, of_section = tp.pop("tp_group", None), tp.pop("mpu", None)
    unit = mpu if mpu is not None else of_section
    problem, slices = "", 1
    try:
        if unit is not None:
            size, group = _take_unit(unit, section)
            if is_asked and size > 1:
                section["autotp_size"] = size
            elif size > 1:
                slices = size
        if group is not None:
            _check_group(group, section.get("autotp_size") or slices, slices > 1)
    except ConfigError as error:
        problem = str(error)
    if unit is not None or group is not None or problem:
        _agree(problem)
    if is_asked:
        if tp.get("tp_size") is not None and tp["tp_size"] == section.get("autotp_size"):
            del tp["tp_size"]
        section.pop("tp", None)
        if tp:
            section["tp"] = tp
        if isinstance(section.get("autotp_size"), int) and section["autotp_size"] > 1:
            set_autotp_mode(training=True)
    return config, slices


def _asked(mpu, what):
    """The value of a getter of `mpu`, by the first of Megatron's names that it has; None: it has none of them."""
    for kind in ("tensor_model_parallel", "slice_parallel", "model_parallel"):
        getter = getattr(mpu, f"get_{kind}_{what}", None)
        if getter is not None:
            return getter()
    return None


def _take_unit(mpu, section):
    """The size and group that `mpu` tells, which fit `section`; the group is None where that is one rank."""
    size = _asked(mpu, "world_size")
    if size is None:
        raise ConfigError(f"initialize(mpu=…): {type(mpu).__name__} has no get_tensor_model_parallel_world_size() and no get_model_parallel_world_size(); "
                          "leave it out, and set tensor_parallel.autotp_size")
    for kind, key in (("sequence", "sequence_parallel_size"), ("pipe", "a PipelineModule"), ("pipeline_model", "a PipelineModule")):
        getter = getattr(mpu, f"get_{kind}_parallel_world_size", None)
        if getter is not None and getter() > 1:
            raise ConfigError(f"initialize(mpu=…): it has {getter()} ranks on its {kind} axis, which {key} makes here; leave mpu out")
    given = section.get("autotp_size")
    if given is not None and given != size:
        raise ConfigError(f"Conflicting tensor_parallel.autotp_size in config ({given}) and mpu ({size}).")
    if size == 1:
        return 1, None
    group, rank = _asked(mpu, "group"), _asked(mpu, "rank")
    if group is None or rank is None:
        fix = f"leave it out, and keep tensor_parallel.autotp_size at {size}" if section else "the program has cut its layers over that group: give it both"
        raise ConfigError(f"initialize(mpu=…): {type(mpu).__name__} lacks a getter of the group or rank on its tensor axis; {fix}")
    if rank != ranks.world().rank % size:
        raise ConfigError(f"initialize(mpu=…): rank {ranks.world().rank} is number {rank} of its tensor group; here it is number {ranks.world().rank % size}: "
                          "ranks of a tensor group are neighbours, in order")
    return size, group


def _check_group(group, size, is_of_program):
    """Raises ConfigError: the ranks of torch.distributed's `group` are not the `size` neighbours that share layers
    here, as the program has cut them or rules do."""
    members, rank = dist.get_process_group_ranks(group), ranks.world().rank
    first = rank - rank % size
    if members != list(range(first, first + size)):
        asked = f"an mpu of {size} ranks" if is_of_program else f"tensor_parallel.autotp_size={size}"
        fix = "Order the ranks so" if is_of_program else "Leave the group out, or order the ranks so"
        raise ConfigError(f"tensor_parallel: rank {rank} is in the tensor group of ranks {members}; with {asked} it is ranks "
                          f"{list(range(first, first + size))}: ranks that share layers are neighbours. {fix}")


def _agree(problem):
    """Raises ConfigError on every rank where one has a `problem`."""
    found = torch.tensor([1 if problem else 0])
    ranks.world().all_reduce(found, "max")
    if int(found):
        raise ConfigError(problem or "tensor_parallel: another rank was given a tensor group, or an mpu, that does not fit; its error says which")

