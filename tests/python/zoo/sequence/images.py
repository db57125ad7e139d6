"""Images and other tensors that are cut along rows or the first dim."""
from torch import nn

from .table import HIDDEN, REFUSED, RIGHT, attend, floats, loss_of, program, tokens


@program(RIGHT, forward=lambda m, x: m.classes(m.out(x) + attend(m, m.out(x).flatten(0, 1)).view(x.shape)).square().mean())
def axial_attention_along_columns_of_cut_rows(model, cut, step):
    x = cut(input_ids=floats(step, 3, 8, 7, HIDDEN))["input_ids"]
    return model(x)


def _rows_attend(m, x):
    y = m.out(x).transpose(1, 2)
    z = attend(m, y.reshape(-1, y.shape[2], HIDDEN)).view(y.shape)
    return m.classes(z).square().mean()


program(RIGHT, forward=_rows_attend, name="axial attention along cut rows")(
    lambda model, cut, step: model(cut(input_ids=floats(step, 3, 8, 7, HIDDEN))["input_ids"]))
program(RIGHT, forward=_rows_attend, name="axial attention along cut rows of a square")(
    lambda model, cut, step: model(cut(input_ids=floats(step, 3, 8, 8, HIDDEN))["input_ids"]))
program(RIGHT, forward=_rows_attend, name="axial attention along cut rows where columns are the part")(
    lambda model, cut, step: model(cut(input_ids=floats(step, 4, 8, 4, HIDDEN))["input_ids"]))


@program(RIGHT, forward=lambda m, x: m.classes(m.out(x) + attend(m, m.out(x).flatten(0, 1)).view(x.shape)).square().mean())
def axial_attention_along_columns_where_columns_are_the_part(model, cut, step):
    return model(cut(input_ids=floats(step, 4, 8, 4, HIDDEN))["input_ids"])


program(RIGHT, forward=lambda m, x: m.classes(attend(m, m.out(x).flatten(1, 2))).square().mean(), name="images of cut rows flattened and attended", four=REFUSED)(
    lambda model, cut, step: model(cut(input_ids=floats(step, 3, 4, 6, HIDDEN))["input_ids"]))


@program(RIGHT, forward=lambda m, x: m.classes(attend(m, m.patch(x).flatten(2).transpose(1, 2))).square().mean(),
         modules={"patch": lambda: nn.Conv2d(3, HIDDEN, 4, stride=4)})
def patches_of_cut_rows(model, cut, step):
    return model(cut(input_ids=floats(step, 2, 3, 16, 8), dim=2)["input_ids"])


@program(RIGHT, forward=lambda m, x: loss_of(m.head(m.embed(x).transpose(0, 1) + attend(m, m.embed(x).transpose(0, 1), is_causal=True)), x.t()))
def tokens_first_cut_along_dim_0(model, cut, step):
    return model(cut(input_ids=tokens(step).t().contiguous(), dim=0)["input_ids"])
