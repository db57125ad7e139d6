"""The engine under its longer name."""
from ..engine import DeepSpeedEngine
from ..missing import names_of

__getattr__ = names_of(__name__, "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable")
