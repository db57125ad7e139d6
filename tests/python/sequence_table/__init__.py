"""Small programs that mix tokens, each with its expected outcome under sequence parallelism; sequence_table_run.py runs them."""
from . import attention, losses, masks, pooling, positions, shifts, tokenwise
from .table import DOCUMENTED, EITHER, REFUSED, RIGHT, ROWS

THEMES = (tokenwise, attention, losses, pooling, masks, positions, shifts)
