"""Names of DeepSpeed's launcher; ranks are started by `trireme launch`."""
from ..missing import names_of
from . import runner

__getattr__ = names_of(__name__)
