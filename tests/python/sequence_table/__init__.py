"""Small programs that mix tokens, each with its expected outcome under sequence parallelism; sequence_table_run.py runs
them."""
from . import (attention, attention_variants, batches, calls, chance, coincidences, combinations, families, functions, images, integers, lengths, losses,
               masks, merges, mixers, numbers, objectives, pooling, positions, selections, shifts, shorter, steps, stock_models, tokenwise, writes)
from .sample import SAMPLE
from .table import DOCUMENTED, ROWS

THEMES = (tokenwise, attention, attention_variants, losses, objectives, pooling, masks, positions, lengths, shifts, shorter, integers, numbers, selections, merges,
          mixers, writes, coincidences, combinations, functions, chance, batches, images, calls, steps, families, stock_models)
