"""The section `comms_logger` as an object."""
from ..missing import names_of
from ..runtime.sections import DeepSpeedConfigModel

__getattr__ = names_of(__name__)


class CommsLoggerConfig(DeepSpeedConfigModel):
    """`comms_logger`."""

    enabled: bool = False
    prof_all: bool = True
    prof_ops: list = None
    verbose: bool = False
    debug: bool = False

    def __init__(self, **values):
        super().__init__(**values)
        self.prof_ops = self.prof_ops or []


class DeepSpeedCommsConfig:
    """The keys of a configuration (dict) about communication: comms_logger_enabled, and comms_logger where that is
    true."""

    def __init__(self, ds_config):
        section = ds_config.get("comms_logger")
        self.comms_logger_enabled = bool(section and section.get("enabled"))
        if self.comms_logger_enabled:
            self.comms_logger = CommsLoggerConfig(**section)


__all__ = ["CommsLoggerConfig", "DeepSpeedCommsConfig"]
