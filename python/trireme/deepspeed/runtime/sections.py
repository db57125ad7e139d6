"""Sections of a configuration as objects, with DeepSpeed's names and defaults. They may stand in a configuration dict.

initialize() says whether this package can do what a section asks for.
"""
import enum
import pathlib
import sys
import typing

from ...errors import ConfigError
from ..missing import names_of

__getattr__ = names_of(__name__)


class OffloadDeviceEnum(str, enum.Enum):
    """The place of offloaded data."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """States that offload_states() can move."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(int, enum.Enum):
    """ZeRO's stages, by what they shard."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def _number(value, kind):
    if isinstance(value, (int, float)) and not isinstance(value, bool) and kind(value) == value:
        return kind(value)
    raise ValueError


def _read(kind, value):
    """`value` as a `kind` (a type, or an optional one). Raises ValueError."""
    options = typing.get_args(kind)
    if type(None) in options:
        return None if value is None else _read(options[0], value)
    if typing.get_origin(kind) is list:
        return [value] if isinstance(value, str) else [_read(options[0], one) for one in value]
    if kind is bool:
        if value not in (0, 1):
            raise ValueError
        return bool(value)
    if kind in (int, float):
        return _number(value, kind)
    if issubclass(kind, DeepSpeedConfigModel):
        return value if isinstance(value, kind) else kind(**value)
    if kind is str and not isinstance(value, str):
        raise ValueError
    return kind(value)


class DeepSpeedConfigModel:
    """A section's keys as attributes. A key that is not given, or is "auto", has its default.

    Raises  ConfigError (a ValueError): a key that the section does not have, or a value of another type.
    """

    _other_names = {}  # key: the attribute that it sets

    def __init__(self, **values):
        self._given = {key: value for key, value in values.items() if value != "auto"}
        kinds = self.fields()
        for name in kinds:
            setattr(self, name, getattr(type(self), name, None))
        for key, value in self._given.items():
            name = self._other_names.get(key, key)
            if name not in kinds:
                raise ConfigError(f"{type(self).__name__}: there is no key `{key}`; there are {', '.join(kinds)}")
            try:
                setattr(self, name, _read(kinds[name], value))
            except (TypeError, ValueError) as error:
                if isinstance(error, ConfigError):
                    raise
                expected = getattr(kinds[name], "__name__", str(kinds[name]))
                raise ConfigError(f"{type(self).__name__}: `{key}` is {value!r}; expected {expected}") from None

    @classmethod
    def fields(cls):
        """{attribute: its type}."""
        return {name: kind for name, kind in typing.get_type_hints(cls).items() if not name.startswith("_")}

    def as_given(self):
        """The keys that were given, as a configuration has them."""
        return {key: str(value) if isinstance(value, pathlib.Path) else value for key, value in self._given.items()}

    def model_dump(self):
        """All attributes, sections in it as dicts."""
        values = {name: getattr(self, name) for name in self.fields()}
        return {name: value.model_dump() if isinstance(value, DeepSpeedConfigModel) else value for name, value in values.items()}

    def __eq__(self, other):
        return type(self) is type(other) and self.model_dump() == other.model_dump()

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items() if name[0] != '_')})"


class DeepSpeedZeroOffloadParamConfig(DeepSpeedConfigModel):
    """`zero_optimization.offload_param`."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: pathlib.Path | None = None
    buffer_count: int = 5
    buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000
    pin_memory: bool = True


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedConfigModel):
    """`zero_optimization.offload_optimizer`."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: pathlib.Path | None = None
    buffer_count: int = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: float = 0.8

    @property
    def pipeline(self):
        """Whether reads or writes overlap."""
        return self.pipeline_read or self.pipeline_write


DEFAULT_LEAF_MODULE_CLASSES = [f"transformers.models.{name}" for name in (
    "mixtral.modeling_mixtral.MixtralSparseMoeBlock", "qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock")]


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """`zero_optimization.leaf_module`."""

    classes: list[str]
    names: list[str]
    name_suffixes: list[str]

    def __init__(self, **values):
        super().__init__(**{"classes": DEFAULT_LEAF_MODULE_CLASSES, "names": [], "name_suffixes": [], **values})


class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    """`zero_optimization`. Keys that begin with "stage3_" set the attributes without it."""

    stage: ZeroStageEnum = ZeroStageEnum.disabled
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = 500_000_000
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    zenflow: dict | None = None
    sub_group_size: int = 1_000_000_000
    cpu_offload_param: bool | None = None
    cpu_offload_use_pin_memory: bool | None = None
    cpu_offload: bool | None = None
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    model_persistence_threshold: int = sys.maxsize
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    gather_16bit_weights_on_model_save: bool = False
    module_granularity_threshold: int = 0
    use_all_reduce_for_fetch_params: bool = False
    allgather_sequential: bool = False
    stage3_gather_fp16_weights_on_model_save: bool = False
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: int = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: DeepSpeedZeroLeafModuleConfig | None = None

    _other_names = {f"stage3_{name}": name for name in (
        "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters", "max_reuse_distance",
        "gather_16bit_weights_on_model_save", "module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential")}

    def __init__(self, **values):
        super().__init__(**values)
        if self.cpu_offload and self.offload_optimizer is None:
            self.offload_optimizer = DeepSpeedZeroOffloadOptimizerConfig(device=OffloadDeviceEnum.cpu)
        if self.cpu_offload_param and self.offload_param is None:
            self.offload_param = DeepSpeedZeroOffloadParamConfig(device=OffloadDeviceEnum.cpu)
        self.gather_16bit_weights_on_model_save |= self.stage3_gather_fp16_weights_on_model_save
        if self.overlap_comm is None:
            self.overlap_comm = self.stage == ZeroStageEnum.weights
        self.leaf_module = self.leaf_module or DeepSpeedZeroLeafModuleConfig()


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """`fp16`."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1
    fp16_master_weights_and_grads: bool = False


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """`bf16`."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


def _known(kind, section):
    """The section's object, without keys of this package or of older versions of DeepSpeed."""
    known = {*kind.fields(), *kind._other_names}  # pylint: disable=protected-access
    return kind(**{key: value for key, value in (section or {}).items() if key in known})


def get_zero_config(param_dict):
    """The `zero_optimization` section of a configuration dict as an object; true stands for stage 1."""
    section = param_dict.get("zero_optimization")
    if isinstance(section, DeepSpeedZeroConfig):
        return section
    return _known(DeepSpeedZeroConfig, {"stage": int(section)} if isinstance(section, bool) else section)


def get_float16_config(param_dict):
    """The `fp16` section of a configuration dict as an object."""
    return _known(DeepSpeedFP16Config, param_dict.get("fp16"))


def get_bfloat16_config(param_dict):
    """The `bf16` section of a configuration dict as an object."""
    return _known(DeepSpeedBF16Config, param_dict.get("bf16") or param_dict.get("bfloat16"))
