"""Small programs that mix tokens, each with its expected outcome under sequence parallelism: ROWS, which
sequence_table_run.py runs, and of which each is a program of the zoo, for every axis."""
import zoo

from . import (attention, attention_variants, batches, calls, chance, coincidences, combinations, known_models, functions, images, integers, lengths, losses,
               masks, merges, mixers, numbers, objectives, pooling, positions, selections, shifts, shorter, steps, stock_models, tokenwise, writes)
from .sample import SAMPLE
from .table import DOCUMENTED, ROWS, uncut

THEMES = (tokenwise, attention, attention_variants, losses, objectives, pooling, masks, positions, lengths, shifts, shorter, integers, numbers, selections, merges,
          mixers, writes, coincidences, combinations, functions, chance, batches, images, calls, steps, known_models, stock_models)
# Keys of a row's configuration, as tensor_compare.compare() has them.
_OPTIONS = {"gradient_clipping": "clipping"}


def _loss_of(row):
    """The step of a row, whose batch is its number, on whole sequences."""
    def loss(call, _, number):
        told = row.step(call, uncut, number)
        return told[0] if isinstance(told, tuple) else told
    return loss


PROGRAMS = zoo.Collection("sequence", batch=lambda number: (number,), sorted_by_words=False)
for _row in ROWS:
    PROGRAMS.add(_row.name, _row.build, _loss_of(_row), tags={_row.theme}, unavailable=_row.unavailable, accumulation=_row.accumulation,
                 **{_OPTIONS.get(key, key): value for key, value in _row.config.items()})
