"""Whether the packages of monitors are there."""
from ..missing import names_of
from .base import require

__getattr__ = names_of(__name__)


def check_tb_availability():
    """Nothing: the library writes TensorBoard's files itself."""


def check_wandb_availability():
    """Raises ConfigError: there is no wandb."""
    require("wandb", "wandb")


def check_comet_availability():
    """Raises ConfigError: there is no comet_ml."""
    require("comet_ml", "comet")
