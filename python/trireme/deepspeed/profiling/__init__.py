"""Profiles of a model's steps: flops_profiler."""
from ..missing import names_of

__getattr__ = names_of(__name__)
