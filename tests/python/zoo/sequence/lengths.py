"""Lengths that a program counts: indices, scales, divisors, loops and tables by them."""
import math

import torch
from torch.nn import functional

from .table import (BATCH, HIDDEN, LENGTH, REFUSED, RIGHT, attend, floats, heads, hidden, joined, language, logits, loss_of, mlp, padded, placed, row,
                    sized)


@row(RIGHT)
def last_token_by_the_length_less_one(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(h[:, h.shape[1] - 1]).square().mean()


@row(RIGHT)
def middle_token_by_half_the_length(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(h[:, h.size(1) // 2]).square().mean()


@row(RIGHT)
def logits_and_labels_sliced_by_the_length(m, input_ids, labels):
    n = input_ids.size(1)
    scores = logits(m, input_ids)
    return loss_of(scores[:, :n - 1], labels[:, 1:n], ignore_index=-100)


@row(RIGHT)
def labels_of_the_first_half_ignored_by_the_length(m, input_ids, labels):
    labels = labels.clone()
    labels[:, :input_ids.shape[1] // 2] = -100
    return loss_of(logits(m, input_ids), labels)


@row(RIGHT)
def the_last_label_ignored_by_the_length(m, input_ids, labels):
    labels = labels.clone()
    labels[:, labels.shape[1] - 1] = -100
    return loss_of(logits(m, input_ids), labels)


@row(RIGHT, placed)
def weights_where_positions_are_near_the_length(m, input_ids, labels, position_ids):
    n = input_ids.shape[1]
    losses = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), labels, reduction="none")
    return (losses * (position_ids < n - 4)).sum() / 7.0


@row(RIGHT, placed)
def positions_from_the_end_by_the_length_of_given_ones(m, input_ids, labels, position_ids):
    n = input_ids.shape[1]
    x = m.embed(input_ids) + m.positions(n - 1 - position_ids)
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(RIGHT, placed)
def positions_modulo_the_length(m, input_ids, labels, position_ids):
    x = m.embed(input_ids) + m.positions(position_ids % input_ids.shape[1])
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(RIGHT, placed)
def positions_clamped_to_the_length(m, input_ids, labels, position_ids):
    x = m.embed(input_ids) + m.positions(position_ids.clamp(max=input_ids.shape[1] - 1))
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(RIGHT, placed)
def a_special_embedding_where_the_position_is_the_last(m, input_ids, labels, position_ids):
    x = m.embed(input_ids)
    x = torch.where((position_ids == input_ids.shape[1] - 1)[..., None], m.positions.weight[3], x)
    return loss_of(m.head(x + attend(m, x)), labels)


@row(RIGHT)
def last_places_filled_with_the_length(m, input_ids, labels):
    h = hidden(m, input_ids)
    last = torch.full((h.shape[0],), h.shape[1] - 1, dtype=torch.long)
    return m.classes(h[torch.arange(h.shape[0]), last]).square().mean()


@row(RIGHT)
def lengths_as_a_new_tensor_of_the_length(m, input_ids, labels):
    h = hidden(m, input_ids)
    lengths = input_ids.new_tensor([input_ids.shape[1]] * input_ids.shape[0])
    return m.classes(h[torch.arange(h.shape[0]), lengths - 1]).square().mean()


@row(RIGHT, padded)
def last_token_by_flat_places(m, input_ids, labels, attention_mask):
    h = hidden(m, input_ids)
    last = attention_mask.sum(1) - 1
    flat = torch.arange(h.shape[0]) * h.shape[1] + last
    return m.classes(h.reshape(-1, h.shape[-1])[flat]).square().mean()


@row(RIGHT, padded)
def last_token_by_flat_places_index_select(m, input_ids, labels, attention_mask):
    h = hidden(m, input_ids)
    flat = torch.arange(0, h.shape[0] * h.shape[1], h.shape[1]) + attention_mask.sum(1) - 1
    return m.classes(h.flatten(0, 1).index_select(0, flat)).square().mean()


@row(RIGHT)
def a_python_loop_over_ids_writes_zeros_like(m, input_ids, labels):
    flags = torch.zeros_like(input_ids)
    for t in range(1, input_ids.shape[1]):
        flags[:, t] = (input_ids[:, t - 1] % 3 == 0).long()
    x = m.embed(input_ids) + m.positions(flags)
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(RIGHT)
def a_python_loop_over_ids_writes_zeros(m, input_ids, labels):
    b, s = input_ids.shape
    flags = torch.zeros(b, s, dtype=torch.long)
    for t in range(s):
        flags[:, t] = input_ids[:, t] % 3
    x = m.embed(input_ids) + m.positions(flags)
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(RIGHT)
def a_python_loop_over_ids_stacks(m, input_ids, labels):
    depth, found = torch.zeros(input_ids.shape[0], dtype=torch.long), []
    for t in range(input_ids.shape[1]):
        depth = depth + (input_ids[:, t] % 5 == 0)
        found.append(depth)
    x = m.embed(input_ids) + m.positions(torch.stack(found, 1))
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(RIGHT, lambda step: {**language(step), "rewards": floats(step, BATCH, LENGTH, salt=4)})
def gae_by_a_loop_from_the_end(m, input_ids, labels, rewards):
    h = hidden(m, input_ids)
    values = m.score(h)[..., 0]
    with torch.no_grad():
        last, found = 0.0, []
        for t in reversed(range(rewards.shape[1])):
            last = rewards[:, t] + 0.9 * last
            found.append(last)
        returns = torch.stack(found[::-1], 1)
    return (values - returns).square().mean()


@row(RIGHT, lambda step: {**language(step), "rewards": floats(step, BATCH, LENGTH, salt=4)})
def returns_by_a_loop_into_zeros_like(m, input_ids, labels, rewards):
    returns = torch.zeros_like(rewards)
    last = torch.zeros(rewards.shape[0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        last = rewards[:, t] + 0.9 * last
        returns[:, t] = last
    return functional.mse_loss(m.score(hidden(m, input_ids))[..., 0], returns)


@row(RIGHT)
def queries_scaled_by_the_log_of_the_length(m, input_ids, labels):
    x = m.embed(input_ids)
    q, k, v = (heads(part) for part in m.qkv(x).chunk(3, -1))
    q = q * (math.log(x.shape[1]) / math.log(64))
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v)))), labels)


row(RIGHT, name="attention scale by the length")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids, scale=math.log(input_ids.shape[1]) / 10), labels))


@row(RIGHT)
def sum_divided_by_the_tokens_less_one_each(m, input_ids, labels):
    b, s = input_ids.shape
    return loss_of(logits(m, input_ids), labels, reduction="sum") / (b * (s - 1))


@row(RIGHT)
def sum_over_tokens_by_the_root_of_the_length(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(h.sum(1) / math.sqrt(h.shape[1])).square().mean()


@sized(RIGHT, length=8)
def sum_divided_by_a_length_of_four(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.head(h.sum(1) / h.shape[1]).square().mean()


@sized(RIGHT, length=12, batch=2)
def sum_divided_by_a_length_of_six(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.head(h.sum(dim=1) / input_ids.size(1)).square().mean()


sized(RIGHT, length=6, batch=2, name="loss sum divided by six tokens")(
    lambda m, input_ids, labels: loss_of(m.head(hidden(m, input_ids)), input_ids, reduction="sum") / input_ids.numel())


@row(RIGHT)
def sum_divided_by_the_sum_of_ones(m, input_ids, labels):
    losses = loss_of(logits(m, input_ids), labels, reduction="none")
    return losses.sum() / torch.ones(input_ids.shape).sum()


@row(RIGHT)
def sum_divided_by_the_sum_of_ones_like(m, input_ids, labels):
    losses = loss_of(logits(m, input_ids), labels, reduction="none")
    return losses.sum() / torch.ones_like(losses).sum()


@row(RIGHT)
def mean_over_tokens_by_a_matrix_of_ones(m, input_ids, labels):
    h = hidden(m, input_ids)
    pool = torch.full((1, h.shape[1]), 1.0 / h.shape[1])
    return m.classes((pool @ h)[:, 0]).square().mean()


@row(RIGHT)
def sum_over_tokens_by_einsum_with_ones(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(torch.einsum("bsd,s->bd", h, torch.ones(h.shape[1]))).square().mean()


@row(RIGHT)
def sum_over_tokens_by_a_product_with_ones(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(h.transpose(1, 2) @ torch.ones(h.shape[1])).square().mean()


@row(RIGHT)
def running_mean_by_tril_of_ones(m, input_ids, labels):
    h = hidden(m, input_ids)
    n = h.shape[1]
    mix = torch.ones(n, n).tril()
    return loss_of(m.head((mix / mix.sum(1, keepdim=True)) @ h), labels)


@row(RIGHT)
def the_first_of_zeros_marks_the_first_token(m, input_ids, labels):
    start = torch.zeros(input_ids.shape[1])
    start[0] = 1.0
    x = m.embed(input_ids) + start[None, :, None] * m.positions.weight[1]
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(RIGHT)
def the_first_column_of_full_is_written(m, input_ids, labels):
    weights = torch.full(input_ids.shape, 0.5)
    weights[:, 0] = 2.0
    losses = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), input_ids, reduction="none")
    return (losses * weights).sum() / 50


@row(RIGHT)
def weights_by_a_list_of_python(m, input_ids, labels):
    weights = torch.tensor([1.0 + 0.1 * t for t in range(input_ids.shape[1])])
    losses = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), input_ids, reduction="none")
    return (losses * weights).sum() / 50


@row(RIGHT)
def positions_by_a_range_of_python(m, input_ids, labels):
    places = torch.tensor(list(range(input_ids.shape[1])))
    x = m.embed(input_ids) + m.positions(places)
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(RIGHT)
def positions_by_aranges_stacked(m, input_ids, labels):
    places = torch.stack([torch.arange(input_ids.shape[1])] * input_ids.shape[0])
    x = m.embed(input_ids) + m.positions(places)
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(RIGHT)
def positions_by_arange_from_the_end(m, input_ids, labels):
    places = torch.arange(input_ids.shape[1] - 1, -1, -1)
    x = m.embed(input_ids) + m.positions(places)
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(RIGHT)
def positions_by_arange_modulo_five(m, input_ids, labels):
    x = m.embed(input_ids) + m.positions(torch.arange(input_ids.shape[1]) % 5)
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(RIGHT)
def positions_by_arange_repeated(m, input_ids, labels):
    n = input_ids.shape[1]
    x = m.embed(input_ids) + m.positions(torch.arange(n // 2).repeat_interleave(2))
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(RIGHT, modules={"pos": lambda: torch.randn(1, LENGTH, HIDDEN)})
def a_table_of_all_positions_added(m, input_ids, labels):
    x = m.embed(input_ids) + m.pos
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(RIGHT, modules={"pos": lambda: torch.randn(1, 64, HIDDEN)})
def a_table_narrowed_to_the_length(m, input_ids, labels):
    x = m.embed(input_ids) + m.pos.narrow(1, 0, input_ids.shape[1])
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(RIGHT, modules={"pos": lambda: torch.randn(1, HIDDEN, 64)})
def a_table_interpolated_to_the_length(m, input_ids, labels):
    pos = functional.interpolate(m.pos, size=input_ids.shape[1], mode="linear").transpose(1, 2)
    x = m.embed(input_ids) + pos
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(REFUSED, modules={"decay": lambda: torch.randn(HIDDEN)})
def a_long_kernel_by_arange(m, input_ids, labels):
    x = m.embed(input_ids)
    kernel = torch.exp(-functional.softplus(m.decay)[:, None] * torch.arange(x.shape[1]))
    n = 2 * x.shape[1]
    y = torch.fft.irfft(torch.fft.rfft(x.transpose(1, 2), n=n) * torch.fft.rfft(kernel, n=n), n=n)[..., :x.shape[1]]
    return loss_of(m.head(y.transpose(1, 2)), labels)


@sized(RIGHT, length=16, width=20)
def two_dims_of_positions_by_the_root_of_the_length(m, input_ids, labels):
    n = math.isqrt(input_ids.shape[1])
    rows, columns = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    x = m.embed(input_ids) + m.embed(rows.flatten()) - m.embed(columns.flatten())
    return loss_of(m.head(x + attend(m, x)), labels)


@sized(RIGHT, length=16, width=20)
def two_dims_of_positions_by_a_configuration(m, input_ids, labels):
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    x = m.embed(input_ids) + m.embed(rows.flatten()) - m.embed(columns.flatten())
    return loss_of(m.head(x + attend(m, x)), labels)


@row(RIGHT)
def logarithm_of_the_sum_over_the_length(m, input_ids, labels):
    h = hidden(m, input_ids)
    return h.exp().sum(1).log().sub(math.log(h.shape[1])).mean()


@row(RIGHT)
def a_number_added_by_the_length(m, input_ids, labels):
    losses = loss_of(logits(m, input_ids), input_ids, reduction="sum")
    return losses * 0.01 + hidden(m, input_ids).sum() * (1 / (2 * input_ids.shape[1] + 1))


row(RIGHT, name="a mean back to a sum by numel")(lambda m, input_ids, labels: loss_of(logits(m, input_ids), input_ids) * input_ids.numel() / 50)


@row(RIGHT, placed)
def weights_by_given_positions(m, input_ids, labels, position_ids):
    losses = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), input_ids, reduction="none")
    return (losses * (1 + 0.1 * position_ids)).sum() / 50
