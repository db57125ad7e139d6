"""The sections of a configuration that switch monitors on, as objects."""
from ...errors import ConfigError
from ..missing import names_of
from ..runtime.sections import DeepSpeedConfigModel

__getattr__ = names_of(__name__)

_FILES = ("tensorboard", "csv_monitor")
_PACKAGES = ("wandb", "comet")


class TensorBoardConfig(DeepSpeedConfigModel):
    """`tensorboard`: event files in output_path/job_name."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class CSVConfig(DeepSpeedConfigModel):
    """`csv_monitor`: CSV files in output_path/job_name."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class WandbConfig(DeepSpeedConfigModel):
    """`wandb`: a run of Weights & Biases."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class CometConfig(DeepSpeedConfigModel):
    """`comet`: an experiment of Comet."""

    enabled: bool = False
    samples_log_interval: int = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None

    def __repr__(self):
        shown = {name: "…" if name == "api_key" and value else value for name, value in self.model_dump().items()}
        return f"CometConfig({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """All of them; `enabled`: one is switched on."""

    tensorboard: TensorBoardConfig
    comet: CometConfig
    wandb: WandbConfig
    csv_monitor: CSVConfig

    def __init__(self, **sections):
        kinds = self.fields()
        given = {name: {} if section is None else section for name, section in sections.items()}
        super().__init__(**{**{name: kind() for name, kind in kinds.items()}, **given})

    @property
    def enabled(self):
        """Whether one is switched on."""
        return any(getattr(self, name).enabled for name in self.fields())


def get_monitor_config(param_dict):
    """Those of a configuration dict. Raises ConfigError: a key that a section does not have, or a value of another
    type."""
    if not isinstance(param_dict, dict):
        raise ConfigError(f"get_monitor_config: expected a configuration dict, got {type(param_dict).__name__}")
    return DeepSpeedMonitorConfig(**{name: param_dict[name] for name in (*_FILES, *_PACKAGES) if name in param_dict})
