"""The configuration of an engine, under DeepSpeed's names."""
import torch

from .utils import groups

# Names as a resolved configuration writes them
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class EngineSettings:
    """Reads `resolved_config`, where every option is spelled out, and the configuration as it was given."""

    def _section(self, name):
        return self.resolved_config.get(name) or {}

    def optimizer_name(self):
        """The class of the optimizer that initialize() was given; else the type of the optimizer section, in lower
        case. None: there is none."""
        if self.client_optimizer is not None:
            return type(self.client_optimizer).__name__
        kind = (self.config.get("optimizer") or {}).get("type")
        return kind and kind.lower()

    def optimizer_params(self):
        """The params of the optimizer section."""
        return self._section("optimizer").get("params")

    def scheduler_name(self):
        """The type of the scheduler section; None: there is none."""
        return self._section("scheduler").get("type")

    def scheduler_params(self):
        """The params of the scheduler section."""
        return self._section("scheduler").get("params")

    def managed_gradient_accumulation(self):
        """Whether the engine counts micro-batches; else every step() updates."""
        return self.resolved_config.get("managed_gradient_accumulation", True)

    def dynamic_loss_scale(self):
        """Whether the loss scale follows overflows."""
        fp16 = self._section("fp16")
        return bool(fp16.get("enabled")) and fp16.get("loss_scale", 0) == 0

    def fp16_auto_cast(self):
        """Whether inputs are cast to fp16."""
        return bool(self._section("fp16").get("auto_cast"))

    def torch_autocast_enabled(self):
        """Whether forward() runs under torch.autocast."""
        return bool(self._section("torch_autocast").get("enabled"))

    def torch_autocast_dtype(self):
        """Its dtype; None: it is off."""
        return DTYPES[self._section("torch_autocast")["dtype"]] if self.torch_autocast_enabled() else None

    def zero_optimization_partition_gradients(self):
        """Whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_ignore_unused_parameters(self):
        """Whether a parameter without a gradient is left alone rather than an error."""
        return self._section("zero_optimization").get("ignore_unused_parameters", True)

    def zero_allow_untested_optimizer(self):
        """As configured; any optimizer is taken."""
        return bool(self.config.get("zero_allow_untested_optimizer", False))

    def zero_cpu_offload(self):
        """Whether states lie in host memory on request of the configuration."""
        section = self.zero_offload_optimizer()
        return section is not None and section.device == "cpu"

    def wall_clock_breakdown(self):
        """As configured."""
        return bool(self.config.get("wall_clock_breakdown", False))

    def get_data_parallel_rank(self):
        """Place of this rank's samples."""
        return self.core.data_rank

    def get_model_parallel_rank(self):
        """Place of this rank among those that share layers."""
        return self.world.rank % self.mp_world_size

    get_tensor_parallel_rank = get_model_parallel_rank

    def get_sequence_parallel_group(self):
        """Ranks that share this rank's samples; None: each has its own. Collective when it is first called."""
        return groups._get_sequence_parallel_group() if self.sequence_parallel_size > 1 else None  # pylint: disable=protected-access

    def get_data_types(self):
        """(of the weights, in which gradients are summed)."""
        weights = torch.bfloat16 if self.bfloat16_enabled() else torch.float16 if self.fp16_enabled() else torch.float32
        return weights, DTYPES[self._section("data_types")["grad_accum_dtype"]]
