"""Sections of the library's configuration by smp's keys, and by the arguments of a loss scale."""
from ..errors import ConfigError, UnsupportedError
from . import ranks
from .config import state


def sections():
    """The sections of precision and sharding, for the engine of a stage."""
    cfg, found = state.cfg, {}
    if cfg.half is not None:
        found[cfg.half] = {"enabled": True}
        found["data_types"] = {"buffer_dtype": cfg.half}  # as FP16_Module has them
    if cfg.zero_stage == 0 or ranks.rdp_size() == 1:
        return found
    zero = found["zero_optimization"] = {"stage": cfg.zero_stage}
    if cfg.zero_stage == 3:
        zero["stage3_max_live_parameters"] = int(cfg.sdp_max_live_parameters)
        if cfg.sharded_data_parallel_degree < ranks.rdp_size():
            zero["mics_shard_size"] = cfg.sharded_data_parallel_degree
        found["gradient_clipping"] = float(cfg.sdp_gradient_clipping)
    return found


_SCALE = "_smp_loss_scale"


def set_loss_scale_of(optimizer, section):
    """The section of the loss scale that goes with `optimizer`."""
    setattr(optimizer, _SCALE, section)


def loss_scale_of(optimizer):
    """The section that set_loss_scale_of() was given."""
    return getattr(optimizer, _SCALE)


#: The arguments of a dynamic loss scale, with smp's defaults.
_DYNAMIC = {"init_scale": 2**32, "scale_factor": 2, "scale_window": 1000, "min_scale": 1, "delayed_shift": 1, "consecutive_hysteresis": False}
_CALL = "smp.DistributedOptimizer"


def loss_scale(static, is_dynamic, arguments):
    """The section of a loss scale by DistributedOptimizer()'s arguments.

    Raises  ConfigError: a value out of range, or without `fp16`. UnsupportedError: a factor other than 2, or a first
            scale that is no power of 2.
    """
    if not isinstance(is_dynamic, bool):
        raise ConfigError(f"{_CALL}(dynamic_loss_scale={is_dynamic!r}): expected True or False")
    is_static = static not in (None, 1)
    if not (is_static or is_dynamic or arguments):
        return {"loss_scale": 1.0}
    if not state.cfg.fp16:
        given = next(text for text, has in ((f"static_loss_scale={static!r}", is_static), ("dynamic_loss_scale=True", is_dynamic), ("dynamic_loss_args=…", True)) if has)
        raise ConfigError(f"{_CALL}({given}): there is a loss scale with `fp16` = true alone; give smp.init() that, or leave it out")
    if is_static and is_dynamic:
        raise ConfigError(f"{_CALL}(static_loss_scale={static!r}, dynamic_loss_scale=True): a scale is fixed or changes; leave one of them out")
    if not is_dynamic:
        if arguments:
            raise ConfigError(f"{_CALL}(dynamic_loss_args={arguments!r}) needs dynamic_loss_scale=True; give it, or leave them out")
        if not _is_number(static) or not static > 0:
            raise ConfigError(f"{_CALL}(static_loss_scale={static!r}): expected a number above 0")
        return {"loss_scale": float(static)}
    return _dynamic(arguments or {})


def first_scale(section):
    """The scale of the first step."""
    return section["loss_scale"] or 2.0**section["initial_scale_power"]


def _dynamic(arguments):
    if not isinstance(arguments, dict) or (strange := [name for name in arguments if name not in _DYNAMIC]):
        what = repr(arguments) if not isinstance(arguments, dict) else f"{{{strange[0]!r}: …}}"
        raise ConfigError(f"{_CALL}(dynamic_loss_args={what}): expected a dict of {', '.join(_DYNAMIC)}")
    found = {**_DYNAMIC, **arguments}
    for name, value in found.items():
        least = {"scale_window": 1, "delayed_shift": 1}.get(name)
        if name == "consecutive_hysteresis":
            fits, expected = isinstance(value, bool), "True or False"
        elif least is not None:
            fits, expected = isinstance(value, int) and not isinstance(value, bool) and value >= least, f"a whole number of {least} or more"
        else:
            fits, expected = _is_number(value) and value > 0, "a number above 0"
        if not fits:
            raise ConfigError(f"{_CALL}(dynamic_loss_args={{{name!r}: {value!r}}}): expected {expected}")
    power = round(found["init_scale"]).bit_length() - 1
    if found["init_scale"] != 2**power or power > 126:
        raise UnsupportedError(f"{_CALL}(dynamic_loss_args={{'init_scale': {found['init_scale']!r}}}) is not there yet: a scale begins as a power of 2, up to 2**126; give one")
    if found["scale_factor"] != 2:
        raise UnsupportedError(f"{_CALL}(dynamic_loss_args={{'scale_factor': {found['scale_factor']!r}}}) is not there yet: a scale is doubled and halved; leave it out")
    if found["min_scale"] > found["init_scale"]:
        raise ConfigError(f"{_CALL}(dynamic_loss_args={{'min_scale': {found['min_scale']!r}}}): it is above init_scale={found['init_scale']!r}; lower it")
    return {"loss_scale": 0, "initial_scale_power": power, "loss_scale_window": found["scale_window"], "min_loss_scale": float(found["min_scale"]),
            "hysteresis": found["delayed_shift"], "consecutive_hysteresis": found["consecutive_hysteresis"]}


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)
