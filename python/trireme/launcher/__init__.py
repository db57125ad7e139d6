"""Names of DeepSpeed's launcher; ranks are started by `trireme launch`."""
from . import runner
