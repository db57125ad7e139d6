"""The section `timers` as an object."""
from ..missing import names_of
from ..runtime.sections import DeepSpeedConfigModel

__getattr__ = names_of(__name__)


class DeepSpeedThroughputTimerConfig(DeepSpeedConfigModel):
    """`timers.throughput`."""

    enabled: bool = True
    synchronized: bool = True


def get_timers_config(param_dict):
    """The object of `timers.throughput` in a configuration (dict)."""
    return DeepSpeedThroughputTimerConfig(**((param_dict.get("timers") or {}).get("throughput") or {}))
