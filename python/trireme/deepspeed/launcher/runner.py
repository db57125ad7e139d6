"""Names that programs import from DeepSpeed's launcher."""
from ..missing import names_of

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"  # a file of exports for other hosts; `trireme launch` does not read it
DLTS_HOSTFILE = "/job/hostfile"

__getattr__ = names_of(__name__)
