"""Positions of tokens: learned, rotary, by sinusoids; given, made up, counted."""
import math

import torch
from torch.nn import functional

from .table import BATCH, DOCUMENTED, HIDDEN, LENGTH, REFUSED, RIGHT, attend, heads, joined, language, loss_of, mlp, padded, row, with_positions

SIZE = 4  # of a head that rotates


def _loss(m, x, labels):
    x = x + attend(m, m.norm(x), is_causal=True)
    return loss_of(m.head(m.last_norm(x + mlp(m, x))), labels)


row(RIGHT, inputs=with_positions(), on_four=True, name="learned positions that are given")(
    lambda m, input_ids, labels, position_ids: _loss(m, m.embed(input_ids) + m.positions(position_ids), labels))
row(RIGHT, inputs=lambda step: {**language(step), "position_ids": torch.arange(LENGTH)[None]}, name="positions of one row")(
    lambda m, input_ids, labels, position_ids: _loss(m, m.embed(input_ids) + m.positions(position_ids), labels))
row(RIGHT, on_four=True, name="learned positions by arange")(
    lambda m, input_ids, labels: _loss(m, m.embed(input_ids) + m.positions(torch.arange(input_ids.shape[1])), labels))


@row(RIGHT)
def learned_positions_by_arange_of_a_batch(m, input_ids, labels):
    at = torch.arange(input_ids.shape[1]).unsqueeze(0).expand(input_ids.shape[0], -1)
    return _loss(m, m.embed(input_ids) + m.positions(at), labels)


row(RIGHT, name="learned positions sliced off a table")(
    lambda m, input_ids, labels: _loss(m, m.embed(input_ids) + m.positions.weight[:input_ids.shape[1]], labels))


@row(RIGHT)
def learned_positions_by_a_buffer(m, input_ids, labels):
    buffer = torch.arange(64).unsqueeze(0)
    return _loss(m, m.embed(input_ids) + m.positions(buffer[:, :input_ids.shape[1]]), labels)


@row(RIGHT, on_four=True)
def positions_added_in_place(m, input_ids, labels):
    x = m.embed(input_ids) * 1.0
    x += m.positions(torch.arange(input_ids.shape[1]))
    return _loss(m, x, labels)


@row(RIGHT)
def positions_added_by_add_(m, input_ids, labels):
    x = m.embed(input_ids) * 1.0
    x.add_(m.positions.weight[None, :input_ids.shape[1]])
    return _loss(m, x, labels)


row(RIGHT, name="positions first")(
    lambda m, input_ids, labels: _loss(m, m.positions(torch.arange(input_ids.shape[1]))[None] + m.embed(input_ids), labels))


@row(RIGHT)
def positions_that_tokens_are_added_to_in_place(m, input_ids, labels):
    x = m.positions(torch.arange(input_ids.shape[1])).repeat(input_ids.shape[0], 1, 1)
    x += m.embed(input_ids)
    return _loss(m, x, labels)


@row(RIGHT, on_four=True)
def positions_chosen_by_where(m, input_ids, labels):
    at = m.positions(torch.arange(input_ids.shape[1])).expand(input_ids.shape[0], -1, -1)
    return _loss(m, torch.where((input_ids < 20).unsqueeze(-1), m.embed(input_ids), at), labels)


@row(RIGHT)
def positions_that_fill_by_where_of_ids_alone(m, input_ids, labels):
    """Only integers are cut in this operator."""
    at = m.positions(torch.arange(input_ids.shape[1])).expand(input_ids.shape[0], -1, -1)
    return _loss(m, m.embed(input_ids) + torch.where((input_ids < 20).unsqueeze(-1), 0.0, at), labels)


@row(RIGHT, on_four=True)
def ids_times_positions(m, input_ids, labels):
    at = m.positions(torch.arange(input_ids.shape[1]))
    return _loss(m, m.embed(input_ids) + 0.1 * input_ids.unsqueeze(-1) * at, labels)


@row(RIGHT)
def a_mask_of_ids_times_positions(m, input_ids, labels):
    at = m.positions(torch.arange(input_ids.shape[1]))
    return _loss(m, m.embed(input_ids) + at * (input_ids != 5).unsqueeze(-1).float(), labels)


@row(RIGHT)
def positions_concatenated_as_features(m, input_ids, labels):
    at = m.positions(torch.arange(input_ids.shape[1])).expand(input_ids.shape[0], -1, -1)
    return _loss(m, torch.cat([m.embed(input_ids)[..., :10], at[..., 10:]], -1), labels)


@row(RIGHT)
def positions_stacked(m, input_ids, labels):
    at = m.positions(torch.arange(input_ids.shape[1])).expand(input_ids.shape[0], -1, -1)
    return _loss(m, torch.stack([m.embed(input_ids), at]).sum(0), labels)


@row(RIGHT)
def positions_by_addcmul(m, input_ids, labels):
    at = m.positions(torch.arange(input_ids.shape[1])).expand(input_ids.shape[0], -1, -1)
    return _loss(m, torch.addcmul(m.embed(input_ids), at, at), labels)


@row(RIGHT)
def positions_by_lerp(m, input_ids, labels):
    at = m.positions(torch.arange(input_ids.shape[1])).expand(input_ids.shape[0], -1, -1)
    return _loss(m, torch.lerp(m.embed(input_ids), at, 0.3), labels)


@row(RIGHT)
def positions_copied_into_a_buffer(m, input_ids, labels):
    x = torch.empty(input_ids.shape[0], input_ids.shape[1], HIDDEN)
    x.copy_(m.positions(torch.arange(input_ids.shape[1])))
    x = x + m.embed(input_ids)
    return _loss(m, x, labels)


@row(RIGHT)
def positions_of_tokens_first(m, input_ids, labels):
    x = m.embed(input_ids.t()) + m.positions(torch.arange(input_ids.shape[1])).unsqueeze(1)
    return _loss(m, x.transpose(0, 1), labels)


@row(RIGHT)
def positions_of_merged_tokens(m, input_ids, labels):
    """[B * S, D]: a row for each token of the batch."""
    at = torch.arange(input_ids.shape[1]).repeat(input_ids.shape[0])
    return _loss(m, (m.embed(input_ids).flatten(0, 1) + m.positions(at)).view(*input_ids.shape, HIDDEN), labels)


row(RIGHT, name="positions by linspace")(
    lambda m, input_ids, labels: _loss(m, m.embed(input_ids) + torch.linspace(0, 1, input_ids.shape[1])[None, :, None], labels))


@row(DOCUMENTED)
def positions_by_a_number_of_tokens_alone(m, input_ids, labels):
    """A scale by the length: log n of all tokens."""
    return _loss(m, m.embed(input_ids) * math.log(input_ids.shape[1]), labels)


@row(DOCUMENTED)
def positions_divided_by_the_length(m, input_ids, labels):
    at = torch.ones_like(input_ids).cumsum(1) / input_ids.shape[1]
    return _loss(m, m.embed(input_ids) + at.unsqueeze(-1), labels)


@row(RIGHT)
def sinusoids_by_arange(m, input_ids, labels):
    angle = torch.arange(input_ids.shape[1])[:, None] * torch.exp(-torch.arange(HIDDEN // 2) / 3)
    return _loss(m, m.embed(input_ids) + torch.cat([angle.sin(), angle.cos()], -1), labels)


@row(RIGHT, inputs=with_positions())
def sinusoids_of_given_positions(m, input_ids, labels, position_ids):
    angle = position_ids[..., None] * torch.exp(-torch.arange(HIDDEN // 2) / 3)
    return _loss(m, m.embed(input_ids) + torch.cat([angle.sin(), angle.cos()], -1), labels)


# --- counted ---

@row(RIGHT, on_four=True)
def positions_by_cumsum_of_ids_that_are_no_padding(m, input_ids, labels):
    """RoBERTa's."""
    mask = input_ids.ne(5).int()
    at = (torch.cumsum(mask, dim=1).type_as(mask) + 0) * mask
    return _loss(m, m.embed(input_ids) + m.positions(at.long() + 1), labels)


@row(RIGHT, inputs=padded, on_four=True)
def positions_by_cumsum_of_the_mask(m, input_ids, labels, attention_mask):
    """OPT's, and generate()'s of all models."""
    at = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
    return _loss(m, m.embed(input_ids) + m.positions(at), labels)


@row(RIGHT)
def positions_by_cumsum_of_floats(m, input_ids, labels):
    at = (torch.ones_like(input_ids).float().cumsum(1) - 1).long()
    return _loss(m, m.embed(input_ids) + m.positions(at), labels)


@row(RIGHT)
def positions_by_cumsum_over_a_transposed_mask(m, input_ids, labels):
    at = torch.ones_like(input_ids).t().cumsum(0).t()
    return _loss(m, m.embed(input_ids) + m.positions(at), labels)


@row(RIGHT)
def positions_by_cumsum_in_place(m, input_ids, labels):
    at = torch.ones_like(input_ids)
    at.cumsum_(1)
    return _loss(m, m.embed(input_ids) + m.positions(at), labels)


@row(RIGHT)
def positions_by_cumsum_of_new_ones(m, input_ids, labels):
    """No number of any cut tensor goes in, its length alone."""
    at = torch.ones(input_ids.shape, dtype=torch.long).cumsum(1)
    return _loss(m, m.embed(input_ids) + m.positions(at), labels)


@row(RIGHT)
def positions_by_nonzero(m, input_ids, labels):
    at = torch.ones_like(input_ids).nonzero()[:, 1].view_as(input_ids)
    return _loss(m, m.embed(input_ids) + m.positions(at), labels)


@row(RIGHT)
def positions_within_documents(m, input_ids, labels):
    """They begin anew behind each separator, by cummax."""
    at = torch.ones_like(input_ids).cumsum(1)
    begin = torch.where(input_ids == 7, at, 0).cummax(1).values
    return _loss(m, m.embed(input_ids) + m.positions(at - begin), labels)


row(RIGHT, inputs=with_positions(), name="positions from the end")(
    lambda m, input_ids, labels, position_ids: _loss(m, m.embed(input_ids) + m.positions(position_ids.max() - position_ids), labels))
row(RIGHT, inputs=with_positions(), name="positions from the end of each sample")(
    lambda m, input_ids, labels, position_ids: _loss(m, m.embed(input_ids) + m.positions(position_ids.max(1, keepdim=True).values - position_ids), labels))
row(RIGHT, inputs=with_positions(), name="flipped positions")(
    lambda m, input_ids, labels, position_ids: _loss(m, m.embed(input_ids) + m.positions(position_ids.flip(1)), labels))
row(RIGHT, inputs=with_positions(), name="ranks of ids")(
    lambda m, input_ids, labels, position_ids: _loss(m, m.embed(input_ids) + m.positions(input_ids.mul(100).add(position_ids).argsort(1).argsort(1)), labels))


# --- rotary ---

def _angles(position_ids, base=50.0):
    frequencies = base ** (-torch.arange(0, SIZE, 2).float() / SIZE)
    return position_ids[..., None].float() * frequencies


def _rotated(part, cos, sin):
    first, second = part.chunk(2, -1)
    return part * cos + torch.cat([-second, first], -1) * sin


def _rotary(m, input_ids, labels, rotate):
    x = m.embed(input_ids)
    query, key, value = (heads(part, 5) for part in m.qkv(x).chunk(3, -1))
    attended = functional.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
    return loss_of(m.head(x + m.out(joined(attended))), labels)


@row(RIGHT, inputs=with_positions(), on_four=True)
def rotary_of_given_positions(m, input_ids, labels, position_ids):
    angle = _angles(position_ids).repeat(1, 1, 2)[:, None]
    return _rotary(m, input_ids, labels, lambda part: _rotated(part, angle.cos(), angle.sin()))


@row(RIGHT, inputs=with_positions())
def rotary_by_a_table_of_cosines(m, input_ids, labels, position_ids):
    angle = _angles(torch.arange(64)).repeat(1, 2)
    cos, sin = angle.cos()[position_ids][:, None], angle.sin()[position_ids][:, None]
    return _rotary(m, input_ids, labels, lambda part: _rotated(part, cos, sin))


@row(RIGHT, inputs=with_positions())
def rotary_by_functional_embedding(m, input_ids, labels, position_ids):
    angle = _angles(torch.arange(64)).repeat(1, 2)
    cos, sin = (functional.embedding(position_ids, table)[:, None] for table in (angle.cos(), angle.sin()))
    return _rotary(m, input_ids, labels, lambda part: _rotated(part, cos, sin))


@row(RIGHT, inputs=with_positions())
def rotary_by_index_select(m, input_ids, labels, position_ids):
    angle = _angles(torch.arange(64)).repeat(1, 2)
    cos, sin = (table.index_select(0, position_ids.flatten()).view(*position_ids.shape, SIZE)[:, None] for table in (angle.cos(), angle.sin()))
    return _rotary(m, input_ids, labels, lambda part: _rotated(part, cos, sin))


@row(RIGHT, inputs=with_positions())
def rotary_by_complex_numbers(m, input_ids, labels, position_ids):
    """Meta's."""
    angle = _angles(position_ids)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    rotate = lambda part: torch.view_as_real(torch.view_as_complex(part.float().unflatten(-1, (-1, 2))) * turn).flatten(-2)
    return _rotary(m, input_ids, labels, rotate)


@row(RIGHT, inputs=with_positions())
def rotary_of_neighbours(m, input_ids, labels, position_ids):
    """GPT-J's: pairs of neighbouring features."""
    angle = _angles(position_ids).repeat_interleave(2, -1)[:, None]
    def rotate(part):
        other = torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2)
        return part * angle.cos() + other * angle.sin()
    return _rotary(m, input_ids, labels, rotate)


@row(RIGHT, inputs=with_positions())
def rotary_of_a_part_of_the_features(m, input_ids, labels, position_ids):
    angle = _angles(position_ids)[..., :1].repeat(1, 1, 2)[:, None]
    return _rotary(m, input_ids, labels, lambda part: torch.cat([_rotated(part[..., :2], angle.cos(), angle.sin()), part[..., 2:]], -1))


@row(RIGHT, inputs=with_positions())
def rotary_by_a_product_of_frequencies(m, input_ids, labels, position_ids):
    """Hugging Face's: frequencies @ positions."""
    frequencies = 50.0 ** (-torch.arange(0, SIZE, 2).float() / SIZE)
    angle = (frequencies[None, :, None].expand(input_ids.shape[0], -1, 1) @ position_ids[:, None, :].float()).transpose(1, 2)
    angle = torch.cat([angle, angle], -1)[:, None]
    return _rotary(m, input_ids, labels, lambda part: _rotated(part, angle.cos(), angle.sin()))


@row(RIGHT, inputs=with_positions())
def rotary_by_einsum_and_outer(m, input_ids, labels, position_ids):
    frequencies = 50.0 ** (-torch.arange(0, SIZE, 2).float() / SIZE)
    angle = torch.einsum("bs,f->bsf", position_ids.float(), frequencies).repeat(1, 1, 2)[:, None]
    return _rotary(m, input_ids, labels, lambda part: _rotated(part, angle.cos(), angle.sin()))


@row(RIGHT)
def rotary_by_arange(m, input_ids, labels):
    angle = _angles(torch.arange(input_ids.shape[1])).repeat(1, 2)
    return _rotary(m, input_ids, labels, lambda part: _rotated(part, angle.cos(), angle.sin()))


@row(RIGHT)
def rotary_by_a_table_sliced_to_the_length(m, input_ids, labels):
    angle = _angles(torch.arange(64)).repeat(1, 2)[None, None, :input_ids.shape[1]]
    return _rotary(m, input_ids, labels, lambda part: _rotated(part, angle.cos(), angle.sin()))


@row(RIGHT)
def rotary_in_place(m, input_ids, labels):
    angle = _angles(torch.arange(input_ids.shape[1])).repeat(1, 2)
    def rotate(part):
        turned = part * 1.0
        turned.mul_(angle.cos())
        return turned.add_(_rotated(part, 0.0, angle.sin()))
    return _rotary(m, input_ids, labels, rotate)


@row(RIGHT)
def rotary_by_complex_numbers_of_arange(m, input_ids, labels):
    angle = _angles(torch.arange(input_ids.shape[1]))
    turn = torch.polar(torch.ones_like(angle), angle)
    rotate = lambda part: torch.view_as_real(torch.view_as_complex(part.float().unflatten(-1, (-1, 2))) * turn).flatten(-2)
    return _rotary(m, input_ids, labels, rotate)


@row(RIGHT, inputs=with_positions(), on_four=True)
def rotary_with_frequencies_by_the_largest_position(m, input_ids, labels, position_ids):
    """Dynamic NTK, longrope."""
    base = 50.0 if int(position_ids.max()) + 1 <= 16 else 50.0 * (int(position_ids.max()) + 1) / 16
    angle = _angles(position_ids, base).repeat(1, 1, 2)[:, None]
    return _rotary(m, input_ids, labels, lambda part: _rotated(part, angle.cos(), angle.sin()))


@row(DOCUMENTED, inputs=with_positions())
def rotary_with_frequencies_by_the_length(m, input_ids, labels, position_ids):
    base = 50.0 if input_ids.shape[1] <= 16 else 500.0
    angle = _angles(position_ids, base).repeat(1, 1, 2)[:, None]
    return _rotary(m, input_ids, labels, lambda part: _rotated(part, angle.cos(), angle.sin()))


@row(RIGHT, inputs=with_positions())
def frequencies_chosen_by_where(m, input_ids, labels, position_ids):
    base = torch.where(position_ids.max() >= 16, 500.0, 50.0)
    frequencies = base ** (-torch.arange(0, SIZE, 2).float() / SIZE)
    angle = (position_ids[..., None].float() * frequencies).repeat(1, 1, 2)[:, None]
    return _rotary(m, input_ids, labels, lambda part: _rotated(part, angle.cos(), angle.sin()))


@row(RIGHT, inputs=with_positions())
def queries_scaled_by_position(m, input_ids, labels, position_ids):
    """Llama 4's temperature."""
    scale = torch.log(torch.floor((position_ids + 1.0) / 5) + 1) * 0.1 + 1
    return _rotary(m, input_ids, labels, lambda part: part * scale[:, None, :, None])


@row(RIGHT, inputs=lambda step: {**language(step), "position_ids": torch.arange(LENGTH).expand(3, BATCH, LENGTH).contiguous()[0]})
def positions_of_three_axes(m, input_ids, labels, position_ids):
    """Qwen2-VL's sections of features."""
    three = position_ids[None].expand(3, -1, -1)
    angle = three[..., None].float() * torch.tensor([1.0, 0.3])
    angle = torch.cat([angle[index % 3, ..., index % 2, None] for index in range(2)], -1).repeat(1, 1, 2)[:, None]
    return _rotary(m, input_ids, labels, lambda part: _rotated(part, angle.cos(), angle.sin()))


