"""The table's rows and the model that they share.

    @row(REFUSED, says="aten::cumsum")
    def running_mean(m, input_ids, labels):      # forward(): `m` is the model, a loss comes back
        ...

    @program(RIGHT)
    def two_batches(model, cut, step):           # a training step: whole tensors in, cut(...) gives parts
        ...

A function returns a loss, or a loss and a dict of numbers that must be alike on every rank too. `cut` gives whole
tensors in plain PyTorch and this rank's tokens under an engine.

A row declares its outcome, and beside it what differs: `ring=` in a ring, `four=` where four ranks share a sequence,
for instance because a number of the program's own is a part's length by chance on two ranks alone. `on_four` says
whether it runs on four at all.
"""
from typing import Callable, NamedTuple

import torch
from torch import nn
from torch.nn import functional

# DOCUMENTED: no operator of the forward shows it, such as a branch on a length or a hook of backward; docs/sequence.md
# says so.
RIGHT, REFUSED, DOCUMENTED = "right", "refused", "documented"
# Sizes that no other one equals, nor half nor a quarter of it: a length of tokens is recognized by chance nowhere.
BATCH, LENGTH, HIDDEN, HEADS, INNER, VOCABULARY, CLASSES = 3, 24, 20, 4, 28, 37, 5
ROWS = []


class Row(NamedTuple):
    name: str
    theme: str
    expected: dict          # by kind of attention
    build: Callable         # () -> nn.Module
    step: Callable          # (model, cut, step) -> loss
    says: tuple             # fragments that a refusal has, each of them
    on_four: bool
    keeps_state: bool       # its model remembers batches in what is no buffer; not for several sequence groups
    four: str               # what is expected on four ranks, where it is not what is expected on two
    stage: int
    tolerance: float
    accumulation: int
    config: dict            # more of the engine's configuration
    unavailable: str        # why the row cannot run here

    def wanted(self, attention, ranks):
        """The expected outcome of a sequence of `ranks` parts."""
        return self.four if self.four and ranks == 4 else self.expected[attention]


class Net(nn.Module):
    """Layers for every row, each of which uses some of them; forward() is the row's function."""

    def __init__(self, function, modules=None, width=HIDDEN, head_count=HEADS, vocabulary=VOCABULARY):
        super().__init__()
        self.function, self.head_count = function, head_count
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.norm, self.last_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gate, self.down = nn.Linear(width, INNER), nn.Linear(width, INNER), nn.Linear(INNER, width)
        self.head, self.score, self.classes = nn.Linear(width, vocabulary), nn.Linear(width, 1), nn.Linear(width, CLASSES)
        for name, make in (modules or {}).items():
            made = make()
            setattr(self, name, nn.Parameter(made) if isinstance(made, torch.Tensor) else made)

    def forward(self, *inputs, **kwargs):
        return self.function(self, *inputs, **kwargs)


def generator(step, salt=0):
    return torch.Generator().manual_seed(1000 * salt + step)


def tokens(step, salt=0, batch=BATCH, length=LENGTH):
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator(step, salt))


def floats(step, *sizes, salt=1):
    return torch.randn(*sizes, generator=generator(step, salt))


def padding(step, length=LENGTH, batch=BATCH):
    """1 for tokens, 0 behind them; the samples end at other places, the last rank has fewest."""
    return (torch.arange(length)[None] < torch.tensor([length, length // 2 + 1 + step, length - 5, length - 1])[:batch, None]).long()


def language(step, length=LENGTH):
    """Ids and labels of language models, more of them ignored in the first half than in the second."""
    ids = tokens(step, length=length)
    labels = ids.clone()
    labels[0, :length // 2 - 1] = -100
    labels[1, :3] = -100
    return {"input_ids": ids, "labels": labels}


def padded(step, length=LENGTH):
    whole, mask = language(step, length), padding(step, length)
    whole["labels"] = whole["labels"].masked_fill(mask == 0, -100)
    return {**whole, "attention_mask": mask}


def with_positions(inputs=language):
    def made(step):
        whole = inputs(step)
        return {**whole, "position_ids": torch.arange(whole["input_ids"].shape[1]).expand_as(whole["input_ids"]).contiguous()}
    return made


placed = with_positions()


def words(step):
    """Ids alone."""
    return {"input_ids": tokens(step)}


def classified(step):
    """Ids of all tokens and one class for each sample, which is not cut."""
    return {"input_ids": tokens(step), "whole_classes": torch.randint(0, CLASSES, (BATCH,), generator=generator(step, 2))}


def uncut(input_ids, labels=None, position_ids=None, attention_mask=None, dim=1, **others):
    """Stands for an engine's cut() where ranks have whole sequences."""
    del dim
    named = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids, "attention_mask": attention_mask}
    return {**{name: value for name, value in named.items() if value is not None}, **others}


def _add(function, expected, build, step, options):
    ring = options.pop("ring", expected)
    name = options.pop("name", function.__name__.replace("_", " "))
    says = options.pop("says", ())
    theme = function.__module__.rpartition(".")[2]
    row = Row(name, theme, {"ulysses": expected, "ring": ring}, build, step, (says,) if isinstance(says, str) else tuple(says),
              options.pop("on_four", "four" in options or len(ROWS) % 3 == 0), options.pop("keeps_state", False),
              options.pop("four", ""), options.pop("stage", 0),
              options.pop("tolerance", 1e-5), options.pop("accumulation", 1), options.pop("config", {}), options.pop("unavailable", ""))
    if options or any(other.name == name for other in ROWS):
        raise ValueError(f"row '{name}': {options or 'there twice'}")
    ROWS.append(row)


def run_forward(inputs):
    """A training step that cuts `inputs(step)`, but for names that begin with whole_, and calls the model."""
    def step_of(model, cut, step):
        whole = inputs(step)
        uncut = {name: whole.pop(name) for name in list(whole) if name.startswith("whole_")}
        return model(**cut(**whole), **uncut)
    return step_of


def row(expected, inputs=language, modules=None, **options):
    """Declares a forward()."""
    def declare(function):
        _add(function, expected, lambda: Net(function, modules), run_forward(inputs), options)
        return function
    return declare


def program(expected, build=None, modules=None, forward=None, **options):
    """Declares a training step (model, cut, step) -> loss, of `build()` or of a Net whose forward() is `forward`."""
    def declare(function):
        _add(function, expected, build or (lambda: Net(forward or logits, modules)), function, options)
        return function
    return declare


def sized(expected, length=LENGTH, width=HIDDEN, head_count=HEADS, vocabulary=VOCABULARY, batch=BATCH, inputs=None, modules=None, **options):
    """Declares a forward() of a Net of sizes that coincide, or of ids of few tokens."""
    def whole(step):
        ids = torch.randint(1, vocabulary, (batch, length), generator=generator(step, 7))
        labels = ids.clone()
        if length > 4:
            labels[0, :length // 2 - 1] = -100
        return {"input_ids": ids, "labels": labels}

    def declare(function):
        _add(function, expected, lambda: Net(function, modules, width, head_count, vocabulary), run_forward(inputs or whole), options)
        return function
    return declare


# --- parts of models ---

def heads(x, number=HEADS):
    return x.unflatten(-1, (number, x.shape[-1] // number)).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).flatten(2)


def attend(m, x, **options):
    query, key, value = (heads(part, m.head_count) for part in m.qkv(x).chunk(3, -1))
    return m.out(joined(functional.scaled_dot_product_attention(query, key, value, **options)))


def mlp(m, x):
    return m.down(functional.gelu(m.up(x)))


def hidden(m, input_ids, **options):
    """A block of causal attention, or of what `options` say, and an MLP."""
    x = m.embed(input_ids)
    x = x + attend(m, m.norm(x), **(options or {"is_causal": True}))
    return m.last_norm(x + mlp(m, x))


def logits(m, input_ids, **options):
    return m.head(hidden(m, input_ids, **options))


def loss_of(scores, labels, **options):
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), **options)
