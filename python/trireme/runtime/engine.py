"""The engine under its longer name."""
from ..engine import DeepSpeedEngine
from ..missing import names_of

__getattr__ = names_of("trireme.runtime.engine", "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable EngineTimers")
