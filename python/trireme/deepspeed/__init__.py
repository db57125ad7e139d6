"""DeepSpeed's names: its modules, its engine, and what its programs import. `import trireme` has them without
"deepspeed."."""
from . import aliases, missing  # find the modules
