"""The package that `import deepspeed` finds in a process that was started from one with trireme.as_deepspeed."""
from trireme.as_deepspeed import install

install()
