"""Small programs that mix tokens, each with its expected outcome under sequence parallelism; sequence_table_run.py runs them."""
from . import attention, batches, families, integers, losses, masks, merges, pooling, positions, shifts, steps, tokenwise, trial
from .sample import SAMPLE
from .table import DOCUMENTED, EITHER, REFUSED, RIGHT, ROWS

THEMES = (tokenwise, attention, losses, pooling, masks, positions, shifts, integers, merges, batches, steps, families, trial)
