"""The multiply-adds, times and parameters of a model, module by module (docs/profiling.md)."""
from ...missing import names_of
from .profiler import FlopsProfiler, get_model_profile
from .quantities import bytes_to_string, duration_to_string, flops_to_string, macs_to_string, number_to_string, params_to_string

__all__ = ["FlopsProfiler", "bytes_to_string", "duration_to_string", "flops_to_string", "get_model_profile", "macs_to_string", "number_to_string",
           "params_to_string"]
__getattr__ = names_of(__name__)
