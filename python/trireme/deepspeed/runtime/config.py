"""A configuration as an object."""
import json

from ... import config as configs
from ...errors import ConfigError as DeepSpeedConfigError
from .. import comm
from ..comm.config import DeepSpeedCommsConfig
from ..missing import names_of
from ..monitor.config import get_monitor_config
from ..profiling.config import DeepSpeedFlopsProfilerConfig
from ..settings import DTYPES
from . import sections

__getattr__ = names_of(__name__)

# Read from what was resolved.
_RESOLVED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "steps_per_print")
# Read from what was given, with their defaults.
_GIVEN = {"managed_gradient_accumulation": True, "prescale_gradients": False, "gradient_predivide_factor": 1.0, "gradient_allreduce_op": "mean",
          "communication_data_type": None, "disable_allgather": False, "dump_state": False, "memory_breakdown": False,
          "wall_clock_breakdown": False, "dataloader_drop_last": False, "zero_allow_untested_optimizer": False,
          "zero_force_ds_cpu_optimizer": True, "log_level": None}


class DeepSpeedConfig:
    """A configuration (dict, path or base64), checked and resolved for the ranks of this job.

    Attributes are the keys of the top level (batch sizes, gradient_clipping, steps_per_print, …),
    zero_optimization_stage, zero_enabled, zero_config, float16_config, bfloat16_config, flops_profiler_config,
    monitor_config (objects), optimizer_name, optimizer_params, scheduler_name, scheduler_params; `resolved` has every
    option.

    Raises  ConfigError and its subclasses, as initialize().
    """

    def __init__(self, config, mpu=None, mesh_device=None):
        # pylint: disable=unused-argument
        self._param_dict = given = configs.without_auto(configs.read(config))
        size = comm.get_world_size() if comm.is_initialized() else 1
        self.world_size, self.global_rank = size, comm.get_rank() if comm.is_initialized() else 0
        self.resolved = configs.resolve(given, size, configs.origin_of(config)).options
        for name in _RESOLVED:
            setattr(self, name, self.resolved[name])
        for name, default in _GIVEN.items():
            setattr(self, name, given.get(name, default))
        if isinstance(self.communication_data_type, str):
            self.communication_data_type = DTYPES[self.communication_data_type]
        self.comms_config = DeepSpeedCommsConfig(given)
        self.zero_config = sections.get_zero_config(given)
        self.zero_optimization_stage = self.resolved["zero_optimization"]["stage"]
        self.monitor_config = get_monitor_config(given)
        self.zero_enabled = self.zero_optimization_stage > 0
        self.float16_config, self.bfloat16_config = sections.get_float16_config(given), sections.get_bfloat16_config(given)
        self.flops_profiler_config = DeepSpeedFlopsProfilerConfig(given)
        self.optimizer_name, self.optimizer_params = self._type_and_params("optimizer")
        self.optimizer_name = self.optimizer_name and self.optimizer_name.lower()
        self.scheduler_name, self.scheduler_params = self._type_and_params("scheduler")

    def _type_and_params(self, section):
        given = self._param_dict.get(section) or {}
        return given.get("type"), given.get("params")

    def print_user_config(self):
        """Prints the configuration as it was given."""
        print(json.dumps(self._param_dict, indent=2, sort_keys=True))

    def print(self, name):
        """Prints every option under a title."""
        print(f"{name}:\n{json.dumps(self.resolved, indent=2, sort_keys=True)}")


__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]
