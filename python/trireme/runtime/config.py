"""A configuration as an object."""
import json

from .. import comm, config as configs
from .._native import core
from ..errors import ConfigError as DeepSpeedConfigError

_FIELDS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
           "steps_per_print")


class DeepSpeedConfig:
    """A configuration (dict, path or base64), checked and resolved for the ranks of this job.

    Attributes are the batch sizes, gradient_clipping, steps_per_print, zero_optimization_stage and zero_enabled; `resolved` has
    every option.

    Raises  ConfigError and its subclasses, as initialize().
    """

    def __init__(self, config, mpu=None, mesh_device=None):
        # pylint: disable=unused-argument
        self._param_dict = configs.read(config)
        size = comm.get_world_size() if comm.is_initialized() else 1
        self.world_size = size
        self.resolved = json.loads(core.resolve_config(json.dumps(configs.without_auto(self._param_dict)), size,
                                                       configs.origin_of(config)))
        for name in _FIELDS:
            setattr(self, name, self.resolved[name])
        self.zero_optimization_stage = self.resolved["zero_optimization"]["stage"]
        self.zero_enabled = self.zero_optimization_stage > 0

    def print(self, name):
        """Prints every option under a title."""
        print(f"{name}:\n{json.dumps(self.resolved, indent=2, sort_keys=True)}")


__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]
