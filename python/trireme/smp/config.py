"""The configuration under smp's keys, and what was resolved of it, `smp.state.cfg`.

KEYS is the one place where a key stands: its values, its default, and whether it works here.
"""
import collections.abc
import dataclasses
import difflib
import json
import types

from .._native import core
from ..errors import ConfigError, StateError, UnsupportedError

#: What smp's pipelines, and ours, are called in trireme.pipe.make_schedule(). "sequential" is ours: one micro-batch at
#: a time, which any program can take.
SCHEDULES = {"interleaved": "1f1b", "simple": "gpipe", "_only_forward": "gpipe", "sequential": "sequential", "1f1b": "1f1b", "gpipe": "gpipe"}
_VARIABLE = "SM_HP_MP_PARAMETERS"


@dataclasses.dataclass(frozen=True)
class _Kind:
    """The values that a key takes."""

    expected: str
    takes: collections.abc.Callable


def _is_whole(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _one_of(*values):
    return _Kind(f"one of {', '.join(map(json.dumps, values))}", lambda value: value in values)


_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_COUNT = _Kind("a whole number of 1 or more", lambda value: _is_whole(value) and value >= 1)
_INDEX = _Kind("a whole number of 0 or more", lambda value: _is_whole(value) and value >= 0)
_PORT = _Kind("a port from 1 to 65535, or null", lambda value: value is None or _is_whole(value) and 1 <= value <= 65535)
_SHARE = _Kind("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
_AMOUNT = _Kind("a number above 0", lambda value: _is_number(value) and value > 0)
_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_PATH = _Kind("a text, or null", lambda value: value is None or isinstance(value, str))


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of the configuration."""

    kind: _Kind
    default: object  # None: follows from other keys, or there is no value
    refused: str = ""  # why another value than the default is refused; empty: it works


_TENSORFLOW = "is for TensorFlow"

KEYS = {
    "pipeline_parallel_degree": Key(_COUNT, None),
    "microbatches": Key(_COUNT, 1),
    "active_microbatches": Key(_COUNT, None),
    "pipeline": Key(_one_of(*SCHEDULES), "interleaved"),
    "optimize": Key(_one_of("memory", "speed"), "memory"),
    "placement_strategy": Key(_TEXT, "cluster"),
    "auto_partition": Key(_FLAG, True),
    "default_partition": Key(_INDEX, 0),
    "memory_weight": Key(_SHARE, None),
    "partition_method": Key(_one_of("ordered", "tree"), "ordered"),  # ours
    "skip_tracing": Key(_FLAG, False),
    "tensor_parallel_degree": Key(_COUNT, 1),
    "prescaled_batch": Key(_FLAG, False),
    "delayed_parameter_initialization": Key(_FLAG, False),
    "ddp": Key(_FLAG, False),
    "ddp_port": Key(_PORT, None),
    "ddp_dist_backend": Key(_one_of("auto", "nccl", "gloo"), "auto"),
    "static_mode": Key(_FLAG, False),
    # Accepted: what they ask for is so anyway.
    "deterministic_server": Key(_FLAG, False),
    "fast_mode": Key(_FLAG, False),
    "overlapping_allreduce": Key(_FLAG, True),
    "_match_weights": Key(_FLAG, False),
    "horovod": Key(_FLAG, False, _TENSORFLOW),
    "contiguous": Key(_FLAG, True, _TENSORFLOW),
    "partition_file": Key(_PATH, None, _TENSORFLOW),
    "load_partition": Key(_FLAG, False, _TENSORFLOW),
    "fp16": Key(_FLAG, False),
    "bf16": Key(_FLAG, False),
    "fp16_params": Key(_FLAG, False),
    "shard_optimizer_state": Key(_FLAG, False),
    "sharded_data_parallel_degree": Key(_COUNT, 1),
    "sdp_max_live_parameters": Key(_AMOUNT, 1e9),
    "sdp_gradient_clipping": Key(_AMOUNT, 1.0),
    # Accepted: gradients are reduced unit by unit, small units are merged, and the ranks of a host share memory.
    "sdp_reduce_bucket_size": Key(_AMOUNT, 5e8),
    "sdp_param_persistence_threshold": Key(_AMOUNT, 1e6),
    "sdp_hierarchical_allgather": Key(_FLAG, True),
    "offload_activations": Key(_FLAG, False),
    "activation_loading_horizon": Key(_COUNT, 4),
    "checkpoint_attentions": Key(_FLAG, False),
}
ALIASES = {"partitions": "pipeline_parallel_degree"}


class Configuration(types.SimpleNamespace):
    """Every key with its value."""

    def __getattr__(self, name):
        raise AttributeError(f"smp.state.cfg has no key '{name}'" + _nearest(name))

    @property
    def partitions(self):
        """The older name of pipeline_parallel_degree."""
        return self.pipeline_parallel_degree

    @property
    def schedule(self):
        """The pipeline's name in trireme.pipe.make_schedule(), or "sequential"."""
        return SCHEDULES[self.pipeline]

    @property
    def half(self):
        """The name of the 16-bit type of weights; None: they have the model's."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else None

    @property
    def zero_stage(self):
        """The ZeRO stage by which ranks that have the same parameters share: 0 nothing, 1 optimizer states, 3 weights,
        too."""
        return 3 if self.sharded_data_parallel_degree > 1 else int(self.shard_optimizer_state)


class State:
    """The state that smp.init() has set: `cfg`, `world`, `topology` and `place`, this rank's position by axis."""

    def __init__(self):
        self._made = None

    @property
    def is_initialized(self):
        """Whether there is something set."""
        return self._made is not None

    def set(self, **made):
        """Sets it."""
        self._made = made

    def __getattr__(self, name):
        if name.startswith("_") or name not in ("cfg", "world", "topology", "place"):
            raise AttributeError(f"smp.state has no member '{name}'")
        if self._made is None:
            raise StateError(f"smp.state.{name}: there is none yet; call smp.init() first")
        return self._made[name]


state = State()


def checked(options):
    """`options` by their newest names, each with a value of its kind that works here.

    Raises  ConfigError: an unknown key, or a value of another kind. UnsupportedError: a value that is not there yet.
    """
    found = {}
    for name, value in options.items():
        key = ALIASES.get(name, name)
        if key not in KEYS:
            raise ConfigError(f"smp.init: there is no key `{name}`{_nearest(name)}; docs/smp.md has all keys")
        if not KEYS[key].kind.takes(value):
            raise ConfigError(f"smp.init: `{name}` = {_shown(value)}; expected {KEYS[key].kind.expected}")
        if KEYS[key].refused and value != KEYS[key].default:
            raise UnsupportedError(f"smp.init: `{name}` = {_shown(value)} {KEYS[key].refused}; leave it out")
        if key in found and found[key] != value:
            raise ConfigError(f"smp.init: `{key}` is {found[key]} and `{name}` {value}; they are two names of one number: give one of them")
        found[key] = value
    return found


def resolved(options, size):
    """The Configuration of checked() options for a world of `size` ranks. Raises ConfigError: a combination."""
    if "pipeline_parallel_degree" not in options:
        raise ConfigError("smp.init: `pipeline_parallel_degree` (or `partitions`) is missing; give the number of stages of the model, 1 for none")
    cfg = Configuration(**{name: options.get(name, key.default) for name, key in KEYS.items()})
    stages = cfg.pipeline_parallel_degree
    if cfg.active_microbatches is None:
        cfg.active_microbatches = min(stages + 2, cfg.microbatches)
    if cfg.active_microbatches > cfg.microbatches:
        raise ConfigError(f"smp.init: `active_microbatches` = {cfg.active_microbatches} is more than `microbatches` = {cfg.microbatches}; give at most that, or leave it out")
    if cfg.memory_weight is None:
        cfg.memory_weight = 0.2 if cfg.optimize == "speed" else 0.8
    if not cfg.auto_partition and "default_partition" not in options:
        raise ConfigError("smp.init: `auto_partition` = false needs `default_partition`, the stage of modules that were made outside of smp.partition(); give it")
    if cfg.default_partition >= stages:
        raise ConfigError(f"smp.init: `default_partition` = {cfg.default_partition}, and there are {stages} partitions; give 0 to {stages - 1}")
    core.place(cfg.placement_strategy, 1, 1, 1)  # raises for a strategy that there is not
    _check_tensor(cfg)
    model = stages * cfg.tensor_parallel_degree
    degrees = f"`pipeline_parallel_degree` = {stages}" + (f" · `tensor_parallel_degree` = {cfg.tensor_parallel_degree}" if cfg.tensor_parallel_degree > 1 else "")
    if size % model:
        raise ConfigError(f"smp.init: {degrees} does not divide the {size} ranks; start a multiple of {model} ranks, or give another degree")
    if size > model and not cfg.ddp:
        raise ConfigError(f"smp.init: {size} ranks have {size // model} copies of a model of {degrees}, which needs `ddp` = true; give it, or start {model} ranks")
    _check_precision(cfg)
    _check_sharding(cfg, options, size // model)
    if cfg.activation_loading_horizon != 4 and not cfg.offload_activations:
        raise ConfigError(f"smp.init: `activation_loading_horizon` = {cfg.activation_loading_horizon} needs `offload_activations` = true; give it, or leave the horizon out")
    for name in ("ddp_port", "ddp_dist_backend"):
        if options.get(name, KEYS[name].default) != KEYS[name].default and not cfg.ddp:
            raise ConfigError(f"smp.init: `{name}` = {_shown(options[name])} needs `ddp` = true; give it, or leave `{name}` out")
    return cfg


def _check_tensor(cfg):
    """Raises  ConfigError, UnsupportedError: keys that do not fit `tensor_parallel_degree`."""
    degree = cfg.tensor_parallel_degree
    if degree > 1 and not cfg.ddp:
        raise ConfigError(f"smp.init: `tensor_parallel_degree` = {degree} needs `ddp` = true; give it")


def _check_precision(cfg):
    """Raises  ConfigError: types of weights that do not fit each other."""
    if cfg.fp16 and cfg.bf16:
        raise ConfigError("smp.init: `fp16` = true and `bf16` = true are two types of weights; give one of them")
    if cfg.fp16_params and not cfg.fp16:
        raise ConfigError("smp.init: `fp16_params` = true needs `fp16` = true, which has masters and a loss scale; give it, or leave `fp16_params` out")


def _check_sharding(cfg, options, copies):
    """Raises  ConfigError: keys that do not fit the `copies` of the model, or each other."""
    degree = cfg.sharded_data_parallel_degree
    for name, is_on in (("shard_optimizer_state", cfg.shard_optimizer_state), ("sharded_data_parallel_degree", degree > 1)):
        if is_on and not cfg.ddp:
            raise ConfigError(f"smp.init: `{name}` = {_shown(getattr(cfg, name))} needs `ddp` = true; give it, or leave `{name}` out")
    if degree > 1 and cfg.shard_optimizer_state:
        raise ConfigError(f"smp.init: `sharded_data_parallel_degree` = {degree} shards optimizer states, too; leave out `shard_optimizer_state` = true")
    if copies % degree:
        raise ConfigError(f"smp.init: `sharded_data_parallel_degree` = {degree} does not divide the {copies} ranks that have the same parameters; give a divisor of {copies}")
    if degree == 1:
        for name in options:
            if name.startswith("sdp_") and options[name] != KEYS[name].default:
                raise ConfigError(f"smp.init: `{name}` = {_shown(options[name])} needs `sharded_data_parallel_degree` above 1; give it, or leave `{name}` out")


def given(cfg_dict):
    """The options that smp.init() was given: those of the variable SM_HP_MP_PARAMETERS before those of `cfg_dict`.

    Raises  ConfigError: there are none, or they are no dict.
    """
    if cfg_dict is not None and not isinstance(cfg_dict, collections.abc.Mapping):
        raise ConfigError(f"smp.init: the configuration is {_shown(cfg_dict)}; expected a dict of smp's keys")
    text = core.environment(_VARIABLE)
    if cfg_dict is None and text is None:
        raise ConfigError(f"smp.init: no configuration; give a dict, or set {_VARIABLE} to its JSON")
    try:
        of_variable = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"smp.init: {_VARIABLE} is no JSON: {error}; its value is {_shown(text)}") from None
    if not isinstance(of_variable, dict):
        raise ConfigError(f"smp.init: {_VARIABLE} is {_shown(text)}; expected a JSON object of smp's keys")
    return {**_renamed(cfg_dict or {}, of_variable), **of_variable}


def _renamed(options, stronger):
    """`options` without those that `stronger` has under any of their names."""
    names = {ALIASES.get(name, name) for name in stronger}
    return {name: value for name, value in options.items() if ALIASES.get(name, name) not in names}


def _nearest(name):
    close = difflib.get_close_matches(str(name), [*KEYS, *ALIASES], 1)
    return f"; did you mean `{close[0]}`?" if close else ""


def _shown(value):
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
