"""Programs of a sceptical user: written from docs/sequence.md alone, many with sizes that coincide."""
import math

import torch
from torch import nn
from torch.nn import functional

from .table import (BATCH, CLASSES, DOCUMENTED, EITHER, HEADS, HIDDEN, LENGTH, REFUSED, RIGHT, VOCABULARY, attend, classified, floats, generator, heads,
                    hidden, joined, language, logits, loss_of, mlp, padded, padding, program, row, run_forward, tokens, with_positions, words)

placed = with_positions()


class Sized(nn.Module):
    """A block of sizes that a row chooses."""

    def __init__(self, function, D, H, V, modules):
        super().__init__()
        self.function, self.H = function, H
        self.embed, self.norm, self.last_norm = nn.Embedding(V, D), nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down, self.head = nn.Linear(D, D + 3), nn.Linear(D + 3, D), nn.Linear(D, V)
        for name, make in (modules or {}).items():
            made = make()
            setattr(self, name, nn.Parameter(made) if isinstance(made, torch.Tensor) else made)

    def forward(self, *inputs, **named):
        return self.function(self, *inputs, **named)


def sized(expected, D=HIDDEN, H=HEADS, V=VOCABULARY, B=BATCH, S=LENGTH, inputs=None, modules=None, **options):
    """Declares a forward() of a Sized, or of ids of B samples of S tokens."""
    def made(step):
        ids = torch.randint(1, V, (B, S), generator=generator(step, 7))
        labels = ids.clone()
        if S > 4:
            labels[0, :S // 2 - 1] = -100
        return {"input_ids": ids, "labels": labels}

    def declare(function):
        step_of = run_forward(inputs or made)
        def step_fn(model, cut, step):
            return step_of(model, cut, step)
        step_fn.__name__, step_fn.__module__ = function.__name__, function.__module__
        program(expected, build=lambda: Sized(function, D, H, V, modules), **options)(step_fn)
        return function
    return declare


def sheads(m, x):
    return x.view(x.shape[0], x.shape[1], m.H, -1).transpose(1, 2)


def sattend(m, x, **options):
    q, k, v = (sheads(m, part) for part in m.qkv(x).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v, **options)
    return m.out(y.transpose(1, 2).reshape(x.shape))


def shidden(m, ids, **options):
    x = m.embed(ids)
    x = x + sattend(m, m.norm(x), **(options or {"is_causal": True}))
    return m.last_norm(x + m.down(functional.silu(m.up(x))))


# ---------------------------------------------------------------- lengths that a program counts
@row(EITHER)
def adv_last_token_by_the_length_less_one(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(h[:, h.shape[1] - 1]).square().mean()


@row(EITHER)
def adv_middle_token_by_half_the_length(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(h[:, h.size(1) // 2]).square().mean()


@row(EITHER)
def adv_logits_and_labels_sliced_by_the_length(m, input_ids, labels):
    n = input_ids.size(1)
    scores = logits(m, input_ids)
    return loss_of(scores[:, :n - 1], labels[:, 1:n], ignore_index=-100)


@row(EITHER)
def adv_labels_of_the_first_half_ignored_by_the_length(m, input_ids, labels):
    labels = labels.clone()
    labels[:, :input_ids.shape[1] // 2] = -100
    return loss_of(logits(m, input_ids), labels)


@row(EITHER)
def adv_the_last_label_ignored_by_the_length(m, input_ids, labels):
    labels = labels.clone()
    labels[:, labels.shape[1] - 1] = -100
    return loss_of(logits(m, input_ids), labels)


@row(EITHER, placed)
def adv_weights_where_positions_are_near_the_length(m, input_ids, labels, position_ids):
    n = input_ids.shape[1]
    losses = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), labels, reduction="none")
    return (losses * (position_ids < n - 4)).sum() / 7.0


@row(EITHER, placed)
def adv_positions_from_the_end_by_the_length_of_given_ones(m, input_ids, labels, position_ids):
    n = input_ids.shape[1]
    x = m.embed(input_ids) + m.positions(n - 1 - position_ids)
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(EITHER, placed)
def adv_positions_modulo_the_length(m, input_ids, labels, position_ids):
    x = m.embed(input_ids) + m.positions(position_ids % input_ids.shape[1])
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(EITHER, placed)
def adv_positions_clamped_to_the_length(m, input_ids, labels, position_ids):
    x = m.embed(input_ids) + m.positions(position_ids.clamp(max=input_ids.shape[1] - 1))
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(EITHER, placed)
def adv_a_special_embedding_where_the_position_is_the_last(m, input_ids, labels, position_ids):
    x = m.embed(input_ids)
    x = torch.where((position_ids == input_ids.shape[1] - 1)[..., None], m.positions.weight[3], x)
    return loss_of(m.head(x + attend(m, x)), labels)


@row(EITHER)
def adv_last_places_filled_with_the_length(m, input_ids, labels):
    h = hidden(m, input_ids)
    last = torch.full((h.shape[0],), h.shape[1] - 1, dtype=torch.long)
    return m.classes(h[torch.arange(h.shape[0]), last]).square().mean()


@row(EITHER)
def adv_lengths_as_a_new_tensor_of_the_length(m, input_ids, labels):
    h = hidden(m, input_ids)
    lengths = input_ids.new_tensor([input_ids.shape[1]] * input_ids.shape[0])
    return m.classes(h[torch.arange(h.shape[0]), lengths - 1]).square().mean()


@row(EITHER, padded)
def adv_last_token_by_flat_places(m, input_ids, labels, attention_mask):
    h = hidden(m, input_ids)
    last = attention_mask.sum(1) - 1
    flat = torch.arange(h.shape[0]) * h.shape[1] + last
    return m.classes(h.reshape(-1, h.shape[-1])[flat]).square().mean()


@row(EITHER, padded)
def adv_last_token_by_flat_places_index_select(m, input_ids, labels, attention_mask):
    h = hidden(m, input_ids)
    flat = torch.arange(0, h.shape[0] * h.shape[1], h.shape[1]) + attention_mask.sum(1) - 1
    return m.classes(h.flatten(0, 1).index_select(0, flat)).square().mean()


@row(EITHER)
def adv_a_python_loop_over_ids_writes_zeros_like(m, input_ids, labels):
    flags = torch.zeros_like(input_ids)
    for t in range(1, input_ids.shape[1]):
        flags[:, t] = (input_ids[:, t - 1] % 3 == 0).long()
    x = m.embed(input_ids) + m.positions(flags)
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(EITHER)
def adv_a_python_loop_over_ids_writes_zeros(m, input_ids, labels):
    b, s = input_ids.shape
    flags = torch.zeros(b, s, dtype=torch.long)
    for t in range(s):
        flags[:, t] = input_ids[:, t] % 3
    x = m.embed(input_ids) + m.positions(flags)
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(EITHER)
def adv_a_python_loop_over_ids_stacks(m, input_ids, labels):
    depth, found = torch.zeros(input_ids.shape[0], dtype=torch.long), []
    for t in range(input_ids.shape[1]):
        depth = depth + (input_ids[:, t] % 5 == 0)
        found.append(depth)
    x = m.embed(input_ids) + m.positions(torch.stack(found, 1))
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(EITHER, lambda step: {**language(step), "rewards": floats(step, BATCH, LENGTH, salt=4)})
def adv_gae_by_a_loop_from_the_end(m, input_ids, labels, rewards):
    h = hidden(m, input_ids)
    values = m.score(h)[..., 0]
    with torch.no_grad():
        last, found = 0.0, []
        for t in reversed(range(rewards.shape[1])):
            last = rewards[:, t] + 0.9 * last
            found.append(last)
        returns = torch.stack(found[::-1], 1)
    return (values - returns).square().mean()


@row(EITHER, lambda step: {**language(step), "rewards": floats(step, BATCH, LENGTH, salt=4)})
def adv_returns_by_a_loop_into_zeros_like(m, input_ids, labels, rewards):
    returns = torch.zeros_like(rewards)
    last = torch.zeros(rewards.shape[0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        last = rewards[:, t] + 0.9 * last
        returns[:, t] = last
    return functional.mse_loss(m.score(hidden(m, input_ids))[..., 0], returns)


@row(EITHER)
def adv_queries_scaled_by_the_log_of_the_length(m, input_ids, labels):
    x = m.embed(input_ids)
    q, k, v = (heads(part) for part in m.qkv(x).chunk(3, -1))
    q = q * (math.log(x.shape[1]) / math.log(64))
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v)))), labels)


@row(EITHER)
def adv_attention_scale_by_the_length(m, input_ids, labels):
    return loss_of(logits(m, input_ids, scale=math.log(input_ids.shape[1]) / 10), labels)


@row(EITHER)
def adv_sum_divided_by_the_tokens_less_one_each(m, input_ids, labels):
    b, s = input_ids.shape
    return loss_of(logits(m, input_ids), labels, reduction="sum") / (b * (s - 1))


@row(EITHER)
def adv_sum_over_tokens_by_the_root_of_the_length(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(h.sum(1) / math.sqrt(h.shape[1])).square().mean()


@sized(EITHER, S=8)
def adv_sum_divided_by_a_length_of_four(m, input_ids, labels):
    h = shidden(m, input_ids)
    return m.head(h.sum(1) / h.shape[1]).square().mean()


@sized(EITHER, S=12, B=2)
def adv_sum_divided_by_a_length_of_six(m, input_ids, labels):
    h = shidden(m, input_ids)
    return m.head(h.sum(dim=1) / input_ids.size(1)).square().mean()


@sized(EITHER, S=6, B=2)
def adv_loss_sum_divided_by_six_tokens(m, input_ids, labels):
    return loss_of(m.head(shidden(m, input_ids)), input_ids, reduction="sum") / input_ids.numel()


@row(EITHER)
def adv_sum_divided_by_the_sum_of_ones(m, input_ids, labels):
    losses = loss_of(logits(m, input_ids), labels, reduction="none")
    return losses.sum() / torch.ones(input_ids.shape).sum()


@row(EITHER)
def adv_sum_divided_by_the_sum_of_ones_like(m, input_ids, labels):
    losses = loss_of(logits(m, input_ids), labels, reduction="none")
    return losses.sum() / torch.ones_like(losses).sum()


@row(EITHER)
def adv_mean_over_tokens_by_a_matrix_of_ones(m, input_ids, labels):
    h = hidden(m, input_ids)
    pool = torch.full((1, h.shape[1]), 1.0 / h.shape[1])
    return m.classes((pool @ h)[:, 0]).square().mean()


@row(EITHER)
def adv_sum_over_tokens_by_einsum_with_ones(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(torch.einsum("bsd,s->bd", h, torch.ones(h.shape[1]))).square().mean()


@row(EITHER)
def adv_sum_over_tokens_by_a_product_with_ones(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(h.transpose(1, 2) @ torch.ones(h.shape[1])).square().mean()


@row(EITHER)
def adv_running_mean_by_tril_of_ones(m, input_ids, labels):
    h = hidden(m, input_ids)
    n = h.shape[1]
    mix = torch.ones(n, n).tril()
    return loss_of(m.head((mix / mix.sum(1, keepdim=True)) @ h), labels)


@row(EITHER)
def adv_the_first_of_zeros_marks_the_first_token(m, input_ids, labels):
    start = torch.zeros(input_ids.shape[1])
    start[0] = 1.0
    x = m.embed(input_ids) + start[None, :, None] * m.positions.weight[1]
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(EITHER)
def adv_the_first_column_of_full_is_written(m, input_ids, labels):
    weights = torch.full(input_ids.shape, 0.5)
    weights[:, 0] = 2.0
    losses = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), input_ids, reduction="none")
    return (losses * weights).sum() / 50


@row(EITHER)
def adv_weights_by_a_list_of_python(m, input_ids, labels):
    weights = torch.tensor([1.0 + 0.1 * t for t in range(input_ids.shape[1])])
    losses = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), input_ids, reduction="none")
    return (losses * weights).sum() / 50


@row(EITHER)
def adv_positions_by_a_range_of_python(m, input_ids, labels):
    places = torch.tensor(list(range(input_ids.shape[1])))
    x = m.embed(input_ids) + m.positions(places)
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(EITHER)
def adv_positions_by_aranges_stacked(m, input_ids, labels):
    places = torch.stack([torch.arange(input_ids.shape[1])] * input_ids.shape[0])
    x = m.embed(input_ids) + m.positions(places)
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(EITHER)
def adv_positions_by_arange_from_the_end(m, input_ids, labels):
    places = torch.arange(input_ids.shape[1] - 1, -1, -1)
    x = m.embed(input_ids) + m.positions(places)
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(EITHER)
def adv_positions_by_arange_modulo_two(m, input_ids, labels):
    x = m.embed(input_ids) + m.positions(torch.arange(input_ids.shape[1]) % 5)
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(EITHER)
def adv_positions_by_arange_repeated(m, input_ids, labels):
    n = input_ids.shape[1]
    x = m.embed(input_ids) + m.positions(torch.arange(n // 2).repeat_interleave(2))
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(EITHER, modules={"pos": lambda: torch.randn(1, LENGTH, HIDDEN)})
def adv_a_table_of_all_positions_added(m, input_ids, labels):
    x = m.embed(input_ids) + m.pos
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(REFUSED, modules={"pos": lambda: torch.randn(1, 64, HIDDEN)})
def adv_a_table_narrowed_to_the_length(m, input_ids, labels):
    x = m.embed(input_ids) + m.pos.narrow(1, 0, input_ids.shape[1])
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(REFUSED, modules={"pos": lambda: torch.randn(1, HIDDEN, 64)})
def adv_a_table_interpolated_to_the_length(m, input_ids, labels):
    pos = functional.interpolate(m.pos, size=input_ids.shape[1], mode="linear").transpose(1, 2)
    x = m.embed(input_ids) + pos
    return loss_of(m.head(x + mlp(m, x)), labels)


@row(REFUSED, modules={"decay": lambda: torch.randn(HIDDEN)})
def adv_a_long_kernel_by_arange(m, input_ids, labels):
    x = m.embed(input_ids)
    kernel = torch.exp(-functional.softplus(m.decay)[:, None] * torch.arange(x.shape[1]))
    n = 2 * x.shape[1]
    y = torch.fft.irfft(torch.fft.rfft(x.transpose(1, 2), n=n) * torch.fft.rfft(kernel, n=n), n=n)[..., :x.shape[1]]
    return loss_of(m.head(y.transpose(1, 2)), labels)


@sized(EITHER, S=16, D=20)
def adv_two_dims_of_positions_by_the_root_of_the_length(m, input_ids, labels):
    n = math.isqrt(input_ids.shape[1])
    rows, columns = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    x = m.embed(input_ids) + m.embed(rows.flatten()) - m.embed(columns.flatten())
    return loss_of(m.head(x + sattend(m, x)), labels)


@sized(EITHER, S=16, D=20)
def adv_two_dims_of_positions_by_a_configuration(m, input_ids, labels):
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    x = m.embed(input_ids) + m.embed(rows.flatten()) - m.embed(columns.flatten())
    return loss_of(m.head(x + sattend(m, x)), labels)


# ---------------------------------------------------------------- sizes that coincide
@sized(RIGHT, S=24, D=24, H=4)
def adv_length_is_hidden_size(m, input_ids, labels):
    return loss_of(m.head(shidden(m, input_ids)), labels)


@sized(RIGHT, S=24, D=12, H=3, on_four=True, stage=1)
def adv_part_is_hidden_size(m, input_ids, labels):
    return loss_of(m.head(shidden(m, input_ids)), labels)


@sized(RIGHT, S=8, D=16, H=4, B=4, on_four=True)
def adv_part_is_batch_and_heads_and_head_size(m, input_ids, labels):
    return loss_of(m.head(shidden(m, input_ids)), labels)


@sized(RIGHT, S=12, D=12, H=12, V=12, B=6)
def adv_everything_is_the_length(m, input_ids, labels):
    return loss_of(m.head(shidden(m, input_ids)), input_ids)


@sized(RIGHT, S=12, D=6, H=6, V=6, B=6, stage=2)
def adv_everything_is_the_part(m, input_ids, labels):
    return loss_of(m.head(shidden(m, input_ids)), input_ids)


@sized(EITHER, S=16, D=8, H=8, B=8, V=8, stage=3)
def adv_tokens_first_of_equal_sizes(m, input_ids, labels):
    x = m.embed(input_ids).transpose(0, 1).contiguous()
    y = m.norm(x).transpose(0, 1)
    y = y + sattend(m, y, is_causal=True)
    z = y.transpose(0, 1)
    return loss_of(m.head(z).transpose(0, 1), labels)


@sized(RIGHT, S=12, D=24, H=6, on_four=True)
def adv_packed_qkv_by_a_view_where_heads_are_the_part(m, input_ids, labels):
    x = m.embed(input_ids)
    q, k, v = m.qkv(x).view(x.shape[0], x.shape[1], 3, m.H, -1).permute(2, 0, 3, 1, 4)
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return loss_of(m.head(m.out(y.permute(0, 2, 1, 3).reshape(x.shape))), labels)


@sized(EITHER, S=12, D=24, H=6)
def adv_attention_over_heads_of_each_token_of_as_many_heads_as_the_part(m, input_ids, labels):
    x = m.embed(input_ids)
    q, k, v = (part.view(*x.shape[:2], m.H, -1) for part in m.qkv(x).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v)
    return loss_of(m.head(m.out(y.flatten(2))), labels)


@sized(EITHER, S=12, D=24, H=6)
def adv_attention_over_features_of_merged_tokens(m, input_ids, labels):
    x = m.embed(input_ids)
    q, k, v = (part.reshape(-1, m.H, 24 // m.H) for part in m.qkv(x).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v)
    return loss_of(m.head(m.out(y.reshape(x.shape))), labels)


@sized(EITHER, S=12, B=6, D=20)
def adv_in_batch_contrast_where_the_batch_is_the_part(m, input_ids, labels):
    h = shidden(m, input_ids)
    a, b = functional.normalize(h.mean(1), dim=-1), functional.normalize(m.embed(input_ids).mean(1), dim=-1)
    return functional.cross_entropy(a @ b.T * 5, torch.arange(a.shape[0]))


@sized(EITHER, S=12, B=6, D=20)
def adv_last_tokens_by_arange_where_the_batch_is_the_part(m, input_ids, labels):
    h = shidden(m, input_ids)
    last = (input_ids > 18).long().sum(1)
    return m.head(h[torch.arange(h.shape[0]), last]).square().mean()


@sized(EITHER, S=12, B=6, D=20)
def adv_siglip_where_the_batch_is_the_part(m, input_ids, labels):
    h = shidden(m, input_ids)
    a, b = functional.normalize(h[:, 0], dim=-1), functional.normalize(h[:, -1], dim=-1)
    signs = 2 * torch.eye(a.shape[0]) - torch.ones(a.shape[0], a.shape[0])
    return -functional.logsigmoid(signs * (a @ b.T)).sum() / a.shape[0]


@sized(EITHER, S=12, D=6, H=3)
def adv_sinusoids_where_features_are_as_many_as_the_part(m, input_ids, labels):
    x = m.embed(input_ids)
    places, features = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[2])[None, :]
    x = x + torch.sin(places / 10 ** (features / x.shape[2]))
    return loss_of(m.head(x + sattend(m, x, is_causal=True)), labels)


@sized(EITHER, S=12, D=6, H=3, inputs=lambda step: {"input_ids": tokens(step, length=12), "labels": tokens(step, length=12),
                                                   "position_ids": torch.arange(12).expand(BATCH, -1).contiguous()})
def adv_rotary_of_given_positions_where_features_are_as_many_as_the_part(m, input_ids, labels, position_ids):
    x = m.embed(input_ids)
    inverse = 1.0 / (10 ** (torch.arange(6).float() / 6))
    angles = position_ids[:, :, None].float() * inverse
    x = x * angles.cos() + x.roll(1, -1) * angles.sin()
    return loss_of(m.head(x + sattend(m, x, is_causal=True)), labels)


@sized(EITHER, S=24, D=12, H=3, modules={"w": lambda: torch.randn(12, 12)})
def adv_weights_made_orthogonal_of_the_part_s_size(m, input_ids, labels):
    skew = m.w.triu(1) - m.w.triu(1).T
    rotation = torch.linalg.solve(torch.eye(12) + skew, torch.eye(12) - skew)
    x = m.embed(input_ids) @ rotation
    return loss_of(m.head(x + sattend(m, x)), labels)


@sized(EITHER, S=24, D=12, H=3, modules={"w": lambda: torch.randn(12, 12)})
def adv_a_masked_autoregressive_weight_of_the_part_s_size(m, input_ids, labels):
    x = functional.linear(m.embed(input_ids), m.w * torch.ones(12, 12).tril())
    return loss_of(m.head(x), labels)


@sized(EITHER, S=24, D=12, H=3, modules={"w": lambda: torch.randn(12, 12)})
def adv_a_weight_softmaxed_of_the_part_s_size(m, input_ids, labels):
    x = m.embed(input_ids) @ m.w.softmax(0) + torch.arange(12) * 0.1
    return loss_of(m.head(x + sattend(m, x)), labels)


@sized(EITHER, S=8, D=16, H=4, modules={"slopes": lambda: torch.randn(4)})
def adv_alibi_of_given_positions_where_heads_are_the_part(m, input_ids, labels):
    places = torch.ones_like(input_ids).cumsum(1) - 1
    bias = (places[:, None, None, :] - places[:, None, :, None]).abs() * -torch.pow(2.0, -torch.arange(1, m.H + 1))[None, :, None, None]
    return loss_of(m.head(shidden(m, input_ids, attn_mask=bias.float())), labels)


@sized(EITHER, S=24, D=24, H=2, modules={"memory": lambda: torch.randn(12, 24)})
def adv_cross_attention_to_a_memory_of_the_part_s_length(m, input_ids, labels):
    x = m.embed(input_ids)
    q = sheads(m, x)
    k = v = sheads(m, m.memory.expand(x.shape[0], -1, -1))
    y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
    return loss_of(m.head(x + m.out(y)), labels)


@sized(EITHER, S=24, D=24, H=2, modules={"latents": lambda: torch.randn(12, 24)})
def adv_a_perceiver_of_as_many_latents_as_the_part(m, input_ids, labels):
    x = m.embed(input_ids)
    z = m.latents.expand(x.shape[0], -1, -1)
    z = z + functional.scaled_dot_product_attention(sheads(m, z), sheads(m, x), sheads(m, x)).transpose(1, 2).reshape(z.shape)
    z = z + sattend(m, z)
    x = x + functional.scaled_dot_product_attention(sheads(m, x), sheads(m, z), sheads(m, z)).transpose(1, 2).reshape(x.shape)
    return loss_of(m.head(x), labels)


@sized(EITHER, S=24, D=20, inputs=lambda step: {"input_ids": tokens(step), "whole_memory": floats(step, BATCH, 12, HIDDEN)})
def adv_cross_attention_to_uncut_states_of_the_part_s_length(m, input_ids, whole_memory):
    x = m.embed(input_ids)
    y = functional.scaled_dot_product_attention(sheads(m, x), sheads(m, whole_memory), sheads(m, whole_memory)).transpose(1, 2).reshape(x.shape)
    return loss_of(m.head(x + y), input_ids)


@sized(EITHER, S=24, D=20, inputs=lambda step: {"input_ids": tokens(step), "whole_bias": floats(step, BATCH, 12, HIDDEN)})
def adv_uncut_states_of_the_part_s_length_by_mistake_of_nobody(m, input_ids, whole_bias):
    x = m.embed(input_ids)
    x = x + whole_bias.mean(1, keepdim=True)
    return loss_of(m.head(x + sattend(m, x)), input_ids) + (whole_bias @ m.head.weight.T).square().mean() * 0.01


@sized(EITHER, S=24, D=20, inputs=lambda step: {"input_ids": tokens(step), "labels": tokens(step), "whole_teacher": floats(step, BATCH, LENGTH, VOCABULARY)})
def adv_uncut_teacher_logits(m, input_ids, labels, whole_teacher):
    scores = m.head(shidden(m, input_ids))
    return functional.kl_div(scores.log_softmax(-1), whole_teacher.softmax(-1), reduction="batchmean")


@sized(EITHER, S=24, D=20, V=12)
def adv_classes_as_many_as_the_part_in_dim_1(m, input_ids, labels):
    scores = m.head(shidden(m, input_ids)).transpose(1, 2)
    return functional.cross_entropy(scores, input_ids) + functional.nll_loss(scores.log_softmax(1), input_ids)


@sized(EITHER, S=24, D=20, V=24)
def adv_soft_targets_of_as_many_classes_as_tokens(m, input_ids, labels):
    scores = m.head(shidden(m, input_ids)).transpose(1, 2)
    soft = functional.one_hot(input_ids, 24).float().transpose(1, 2) * 0.9 + 0.1 / 24
    return functional.cross_entropy(scores, soft)


@sized(EITHER, S=24, D=12, H=3)
def adv_gram_of_features_where_they_are_as_many_as_the_part(m, input_ids, labels):
    h = shidden(m, input_ids)
    gram = h.transpose(1, 2) @ h
    return (gram - torch.eye(12)).square().mean()


@sized(EITHER, S=12, D=6, H=3)
def adv_each_token_attends_with_its_features(m, input_ids, labels):
    x = m.embed(input_ids)
    scores = torch.einsum("bsi,bsj->bsij", x, x).softmax(-1)
    return loss_of(m.head(torch.einsum("bsij,bsj->bsi", scores, x)), labels)


@sized(EITHER, S=12, D=6, H=3)
def adv_cross_covariance_attention_as_xcit_writes_it(m, input_ids, labels):
    x = m.embed(input_ids)
    q, k, v = (part.transpose(1, 2) for part in m.qkv(x).chunk(3, -1))
    weights = (functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).transpose(-2, -1)).softmax(-1)
    return loss_of(m.head((weights @ v).transpose(1, 2)), labels)


@sized(EITHER, S=12, D=6, H=3)
def adv_channels_attend_by_sdpa(m, input_ids, labels):
    x = m.embed(input_ids)
    q, k, v = (part.transpose(1, 2) for part in m.qkv(x).chunk(3, -1))
    return loss_of(m.head(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)), labels)


# ---------------------------------------------------------------- one token each, and odd lengths
@sized(EITHER, S=2, B=2, on_four=False)
def adv_one_token_for_each_rank(m, input_ids, labels):
    return loss_of(m.head(shidden(m, input_ids)), labels)


@sized(EITHER, S=4, B=1, D=4, H=1, on_four=True, stage=3)
def adv_one_sample_of_four_tokens_one_head(m, input_ids, labels):
    h = shidden(m, input_ids)
    return loss_of(m.head(h)[:, :-1], labels[:, 1:])


@sized(EITHER, S=2, B=2, modules={"pos": lambda: torch.randn(1, 2, HIDDEN)})
def adv_a_table_of_two_positions_added_to_one_token(m, input_ids, labels):
    x = m.embed(input_ids) + m.pos
    return m.head(x + m.down(torch.relu(m.up(x)))).square().mean()


@sized(EITHER, S=2, B=2, inputs=lambda step: {"input_ids": tokens(step, batch=2, length=2), "whole_mask": torch.tensor([[1.0, 0.5], [1.0, 2.0]])})
def adv_a_whole_mask_times_one_token(m, input_ids, whole_mask):
    losses = shidden(m, input_ids).square().sum(-1)
    return (losses * whole_mask).sum() / 4.5


@sized(EITHER, S=4, B=3, inputs=lambda step: {"input_ids": tokens(step, length=4), "labels": tokens(step, length=4)}, on_four=True)
def adv_first_and_last_of_few_tokens(m, input_ids, labels):
    h = shidden(m, input_ids)
    return (h[:, 0] * h[:, -1]).mean() + h[:, -1:].square().mean() + h[:, :1].mean() + m.head(h[:, 1]).square().mean()


@sized(EITHER, S=3, B=2, on_four=False)
def adv_three_tokens_on_two_ranks(m, input_ids, labels):
    h = shidden(m, input_ids)
    return loss_of(m.head(h), labels) + h.mean(1).square().mean()


@sized(EITHER, S=5, B=2, on_four=True)
def adv_five_tokens(m, input_ids, labels):
    h = shidden(m, input_ids)
    return loss_of(m.head(h), input_ids) + h[:, -1].square().mean()


@sized(EITHER, S=1, B=2)
def adv_one_token_in_all(m, input_ids, labels):
    return loss_of(m.head(shidden(m, input_ids)), labels)


@sized(EITHER, S=8, B=3, on_four=True)
def adv_targets_three_tokens_on_where_parts_are_short(m, input_ids, labels):
    h = shidden(m, input_ids)
    total = 0
    for k in (1, 2, 3):
        total = total + loss_of(m.head(h)[:, :-k], input_ids[:, k:])
    return total / 3


@sized(EITHER, S=8, B=3, on_four=True)
def adv_targets_three_tokens_on_by_pad(m, input_ids, labels):
    scores = m.head(shidden(m, input_ids))
    total = 0
    for k in (1, 3, 5):
        total = total + loss_of(scores, functional.pad(input_ids, (0, k), value=-100)[:, k:])
    return total


@sized(EITHER, S=10, B=2, on_four=True)
def adv_a_constant_slice_longer_than_a_part(m, input_ids, labels):
    h = shidden(m, input_ids)
    return m.head(h[:, :7]).square().mean() + m.head(h[:, 7:]).mean()


@program(EITHER, on_four=True)
def adv_lengths_that_go_down_to_the_part(model, cut, step):
    whole = language(step, length=(24, 12)[step])
    part = cut(**whole)
    return loss_of(model(part["input_ids"]), part["labels"])


@program(EITHER, accumulation=2, stage=2)
def adv_lengths_that_differ_in_each_micro_batch(model, cut, step):
    part = cut(**language(step, length=(23, 10, 17, 40)[step]))
    return loss_of(model(part["input_ids"]), part["labels"])


# ---------------------------------------------------------------- autograd of the user's own
class _ChunkedLoss(torch.autograd.Function):
    """As Liger and Unsloth do: gradients are made in forward."""

    @staticmethod
    def forward(ctx, h, weight, labels):
        scores = h.flatten(0, 1) @ weight.T
        count = (labels != -100).sum()
        kept = (labels.flatten() != -100).float()[:, None]
        target = functional.one_hot(labels.flatten().clamp(min=0), weight.shape[0]).float()
        log_p = scores.log_softmax(-1)
        loss = -(log_p * target * kept).sum() / count
        d_scores = (log_p.exp() - target) * kept / count
        ctx.save_for_backward((d_scores @ weight).view(h.shape), d_scores.T @ h.flatten(0, 1))
        return loss

    @staticmethod
    def backward(ctx, d):
        d_h, d_weight = ctx.saved_tensors
        return d * d_h, d * d_weight, None


@row(EITHER, on_four=True)
def adv_a_fused_linear_cross_entropy_of_ones_own(m, input_ids, labels):
    return _ChunkedLoss.apply(hidden(m, input_ids), m.head.weight, labels)


class _LossByInnerGrad(torch.autograd.Function):
    """Gradients by autograd inside of forward, chunk by chunk."""

    @staticmethod
    def forward(ctx, h, labels):
        total, parts = 0.0, []
        with torch.enable_grad():
            for chunk, label in zip(h.detach().chunk(2, 1), labels.chunk(2, 1)):
                chunk = chunk.requires_grad_()
                loss = functional.cross_entropy(chunk.flatten(0, 1), label.flatten(), reduction="sum")
                parts.append(torch.autograd.grad(loss, chunk)[0])
                total = total + loss.detach()
        ctx.save_for_backward(torch.cat(parts, 1))
        return total

    @staticmethod
    def backward(ctx, d):
        return ctx.saved_tensors[0] * d, None


@row(EITHER)
def adv_a_chunked_loss_whose_gradient_is_taken_in_forward(m, input_ids, labels):
    return _LossByInnerGrad.apply(logits(m, input_ids), labels) / 60


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.mean(1)

    @staticmethod
    def backward(ctx, d):
        return (d / ctx.shape[1]).unsqueeze(1).expand(ctx.shape)


@row(EITHER)
def adv_a_mean_over_tokens_with_a_backward_of_ones_own(m, input_ids, labels):
    return m.classes(_Mean.apply(hidden(m, input_ids))).square().mean()


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx, d):
        return 2 * ctx.saved_tensors[0] * d


@row(EITHER)
def adv_a_square_sum_with_a_backward_of_ones_own(m, input_ids, labels):
    return _Sum.apply(hidden(m, input_ids)) / 1000


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, d):
        x, weight = ctx.saved_tensors
        return d @ weight, d.flatten(0, 1).T @ x.flatten(0, 1)


@row(EITHER, stage=3)
def adv_a_linear_with_a_backward_of_ones_own(m, input_ids, labels):
    return loss_of(_Linear.apply(hidden(m, input_ids), m.head.weight), labels)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight):
        ctx.save_for_backward(ids)
        ctx.rows = weight.shape[0]
        return weight[ids]

    @staticmethod
    def backward(ctx, d):
        ids, = ctx.saved_tensors
        return None, torch.zeros(ctx.rows, d.shape[-1]).index_add_(0, ids.flatten(), d.flatten(0, 1))


@row(EITHER)
def adv_an_embedding_with_a_backward_of_ones_own(m, input_ids, labels):
    x = _Embed.apply(input_ids, m.embed.weight)
    return loss_of(m.head(x + attend(m, x, is_causal=True)), labels)


class _NormGrad(torch.autograd.Function):
    """Divides gradients by their norm over all tokens."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        return d / d.norm()


@row(DOCUMENTED)
def adv_gradients_of_activations_normalized_in_a_backward(m, input_ids, labels):
    return loss_of(m.head(_NormGrad.apply(hidden(m, input_ids))), labels)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        rstd = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    def backward(ctx, d):
        x, weight, rstd = ctx.saved_tensors
        y = x * rstd
        g = d * weight
        return rstd * (g - y * (g * y).mean(-1, keepdim=True)), (d * y).sum((0, 1))


@row(EITHER, on_four=True, stage=1)
def adv_rms_norm_with_a_backward_of_ones_own(m, input_ids, labels):
    x = _RMSNorm.apply(m.embed(input_ids), m.norm.weight)
    return loss_of(m.head(x + attend(m, x)), labels)


@row(EITHER)
def adv_func_grad_of_a_token_energy(m, input_ids, labels):
    x = m.embed(input_ids)
    force = torch.func.grad(lambda y: m.score(torch.tanh(m.out(y))).sum())(x)
    return loss_of(m.head(x - 0.1 * force), labels)


@row(EITHER)
def adv_vmap_over_tokens(m, input_ids, labels):
    x = m.embed(input_ids)
    y = torch.func.vmap(lambda one: mlp(m, one), in_dims=1, out_dims=1)(x)
    return loss_of(m.head(x + y), labels)


@row(EITHER)
def adv_vmapped_loss_of_samples(m, input_ids, labels):
    scores = logits(m, input_ids)
    each = torch.func.vmap(lambda s, l: functional.cross_entropy(s, l, reduction="sum"))(scores, input_ids)
    return each.mean() / 10


@row(EITHER)
def adv_checkpoint_of_the_loss_in_chunks(m, input_ids, labels):
    h = hidden(m, input_ids)
    part = lambda a, b: functional.cross_entropy(m.head(a).flatten(0, 1), b.flatten(), reduction="sum")
    total = sum(torch.utils.checkpoint.checkpoint(part, a, b, use_reentrant=False) for a, b in zip(h.split(5, 1), labels.split(5, 1)))
    return total / (labels != -100).sum()


@row(EITHER, stage=3)
def adv_scripted_functions(m, input_ids, labels):
    return loss_of(m.head(_scripted(hidden(m, input_ids), m.norm.weight)), labels)


@torch.jit.script
def _scripted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x) * w


@torch.jit.script
def _scripted_pool(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1) / x.size(1)


@row(EITHER)
def adv_a_scripted_pool_by_the_length(m, input_ids, labels):
    return m.classes(_scripted_pool(hidden(m, input_ids))).square().mean()


# ---------------------------------------------------------------- losses
@row(EITHER)
def adv_mean_of_means_of_chunks(m, input_ids, labels):
    h = hidden(m, input_ids)
    losses = [loss_of(m.head(a), b) for a, b in zip(h.chunk(3, 1), input_ids.chunk(3, 1))]
    losses[0] = losses[0] * 2
    return sum(losses) / 3


@row(EITHER)
def adv_mean_of_means_of_splits_of_ignored_labels(m, input_ids, labels):
    scores = logits(m, input_ids)
    parts = list(zip(scores.split(8, dim=1), labels.split(8, dim=1)))
    return torch.stack([loss_of(a, b.masked_fill(b < 0, 1)) for a, b in parts]).mean()


@row(EITHER)
def adv_loss_of_each_sample_in_a_loop(m, input_ids, labels):
    scores = logits(m, input_ids)
    return sum(functional.cross_entropy(scores[i], labels[i]) for i in range(scores.shape[0])) / scores.shape[0]


@row(EITHER)
def adv_loss_of_each_sample_s_selected_tokens(m, input_ids, labels):
    scores = logits(m, input_ids)
    total = 0.0
    for i in range(scores.shape[0]):
        kept = labels[i] != -100
        total = total + functional.cross_entropy(scores[i][kept], labels[i][kept])
    return total / scores.shape[0]


@row(EITHER)
def adv_loss_of_each_sample_then_worst_sample(m, input_ids, labels):
    each = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), labels, reduction="none")
    kept = (labels != -100).float()
    return ((each * kept).sum(1) / kept.sum(1)).max()


@row(EITHER, modules={"w": lambda: torch.rand(VOCABULARY)})
def adv_label_smoothing_with_class_weights(m, input_ids, labels):
    weight = torch.linspace(0.1, 2, VOCABULARY)
    return loss_of(logits(m, input_ids), labels, weight=weight, label_smoothing=0.1)


@row(EITHER)
def adv_label_smoothing_without_reduction(m, input_ids, labels):
    losses = loss_of(logits(m, input_ids), labels, label_smoothing=0.2, reduction="none")
    return losses[labels.flatten() != -100].mean()


@row(EITHER)
def adv_selected_losses_topk_of_a_sample(m, input_ids, labels):
    losses = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), input_ids, reduction="none")
    return losses.topk(5, dim=1).values.mean()


@row(EITHER)
def adv_clipped_ratio_with_whole_old_log_probabilities(m, input_ids, labels):
    logp = logits(m, input_ids).log_softmax(-1).gather(-1, input_ids[..., None])[..., 0]
    ratio = (logp - logp.detach() + 0.05).exp()
    advantage = torch.tensor([1.0, -1.0, 0.5])[:, None]
    mask = (labels != -100).float()
    loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.02) * advantage)
    return ((loss * mask).sum(1) / mask.sum(1)).mean(), {"clipped": ((ratio > 1.02).float() * mask).sum() / mask.sum()}


@row(EITHER)
def adv_advantages_whitened_in_no_grad(m, input_ids, labels):
    h = hidden(m, input_ids)
    values = m.score(h)[..., 0]
    mask = (labels != -100)
    with torch.no_grad():
        advantage = input_ids.float() - values
        advantage = (advantage - advantage[mask].mean()) / (advantage[mask].std() + 1e-6)
    return -(advantage * values * mask).sum() / mask.sum()


@row(EITHER, tolerance=2e-4)
def adv_advantages_whitened_by_sums_in_no_grad(m, input_ids, labels):
    values = m.score(hidden(m, input_ids))[..., 0]
    mask = (labels != -100).float()
    with torch.no_grad():
        a = input_ids.float() - values
        mean = (a * mask).sum() / mask.sum()
        a = (a - mean) * (((a - mean).square() * mask).sum() / (mask.sum() - 1)).rsqrt()
    return -(a * values * mask).sum() / mask.sum(), {"mean": mean}


@row(EITHER, words)
def adv_span_extraction(m, input_ids):
    scores = m.score(hidden(m, input_ids))[..., 0]
    return functional.cross_entropy(scores, torch.tensor([3, 20, 14]))


@row(EITHER, words)
def adv_span_extraction_as_transformers_write_it(m, input_ids):
    scores = m.score(hidden(m, input_ids))[..., 0]
    ignored = scores.size(1)
    return functional.cross_entropy(scores, torch.tensor([3, 20, 14]).clamp(0, ignored), ignore_index=ignored)


@row(EITHER, words)
def adv_a_pointer_by_log_softmax_of_merged_tokens(m, input_ids):
    scores = m.score(hidden(m, input_ids)).flatten()
    return -scores.log_softmax(0)[5]


@row(EITHER, words)
def adv_binary_relevance_of_tokens_then_noisy_or(m, input_ids):
    p = torch.sigmoid(m.score(hidden(m, input_ids))[..., 0])
    none = (1 - p).log().sum(1).exp()
    return functional.binary_cross_entropy(1 - none * 0.999, torch.tensor([1.0, 0.0, 1.0]))


@row(EITHER)
def adv_gradnorm_like_weights_of_totals(m, input_ids, labels):
    h = hidden(m, input_ids)
    totals = torch.stack([loss_of(m.head(h), labels), h.square().mean(), m.score(h).mean()])
    return (totals * totals.softmax(0)).sum() + totals.exp().mean().log()


@row(EITHER)
def adv_total_normalized_by_itself_detached(m, input_ids, labels):
    loss = loss_of(logits(m, input_ids), labels)
    other = hidden(m, input_ids).abs().mean()
    return loss / loss.detach() + other * (loss.detach() / other.detach()) + loss.exp().log1p()


@row(EITHER)
def adv_cosine_similarity_of_tokens_with_merged_targets(m, input_ids, labels):
    h = hidden(m, input_ids)
    e = m.embed(input_ids)
    flat = functional.cosine_embedding_loss(h.flatten(0, 1), e.flatten(0, 1), torch.ones(h.shape[0] * h.shape[1]))
    return flat


@row(EITHER)
def adv_margins_of_tokens(m, input_ids, labels):
    h = hidden(m, input_ids)
    a, b = m.score(h)[..., 0], m.score(m.embed(input_ids))[..., 0]
    target = (input_ids % 2 * 2 - 1).float()
    return (functional.margin_ranking_loss(a, b, target, margin=0.3) + functional.hinge_embedding_loss(a, target) + functional.huber_loss(a, b, delta=0.4) +
            functional.triplet_margin_loss(h, m.embed(input_ids), m.norm(h)) + functional.multilabel_soft_margin_loss(m.classes(h).flatten(0, 1), torch.ones(CLASSES).expand(h.shape[0] * h.shape[1], -1)))


@row(EITHER, modules={"adaptive": lambda: nn.AdaptiveLogSoftmaxWithLoss(HIDDEN, VOCABULARY, [10, 20])})
def adv_an_adaptive_softmax_of_tokens(m, input_ids, labels):
    return m.adaptive(hidden(m, input_ids).flatten(0, 1), input_ids.flatten()).loss


@row(EITHER)
def adv_a_balancing_loss_and_the_variation_of_importance(m, input_ids, labels):
    h = hidden(m, input_ids)
    p = m.classes(h).softmax(-1)
    importance = p.sum((0, 1))
    load = functional.one_hot(p.argmax(-1), CLASSES).sum((0, 1)).float()
    cv = importance.var() / importance.mean().square() + load.var() / load.mean().square()
    aux = (p.mean((0, 1)) * load / load.sum()).sum() * CLASSES
    return loss_of(m.head(h), labels) + 0.1 * cv + 0.1 * aux + 0.01 * m.classes(h).logsumexp(-1).square().mean()


@row(EITHER)
def adv_entropy_of_the_mean_of_probabilities(m, input_ids, labels):
    p = m.classes(hidden(m, input_ids)).softmax(-1).view(-1, CLASSES)
    mean = p.mean(0)
    return (mean * mean.log()).sum() - (p * p.log()).sum(-1).mean()


@row(EITHER)
def adv_barlow_twins_of_tokens(m, input_ids, labels):
    h = hidden(m, input_ids).flatten(0, 1)
    a, b = m.classes(h), m.classes(m.norm(h))
    a, b = a - a.mean(0), b - b.mean(0)
    a, b = a / a.square().mean(0).sqrt(), b / b.square().mean(0).sqrt()
    c = a.T @ b / a.shape[0]
    return (c - torch.eye(CLASSES)).square().sum()


@row(EITHER, tolerance=2e-4)
def adv_vicreg_of_pooled_tokens(m, input_ids, labels):
    h = hidden(m, input_ids)
    z = m.classes(h.mean(1))
    z = z - z.mean(0)
    cov = z.T @ z / (z.shape[0] - 1)
    return functional.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() + cov.square().sum() - cov.diagonal().square().sum()


@row(EITHER)
def adv_info_nce_of_each_token_against_all_of_its_sample(m, input_ids, labels):
    h = functional.normalize(hidden(m, input_ids), dim=-1)
    sim = torch.bmm(h, h.transpose(1, 2))
    return functional.cross_entropy(sim.flatten(0, 1), torch.arange(h.shape[1]).repeat(h.shape[0]))


@row(EITHER, modules={"queue_": lambda: torch.zeros(1)})
def adv_a_queue_that_is_a_buffer(m, input_ids, labels):
    if not hasattr(m, "queue"):
        m.queue = torch.ones(8, CLASSES)
    z = functional.normalize(m.classes(hidden(m, input_ids).mean(1)), dim=-1)
    loss = (z @ m.queue.T).logsumexp(-1).mean()
    m.queue = torch.cat([z.detach(), m.queue])[:8]
    return loss + m.queue_.sum(), {"queue": m.queue.sum()}


@row(EITHER)
def adv_hidden_states_of_the_step_before(m, input_ids, labels):
    h = hidden(m, input_ids)
    before = getattr(m, "memory", None)
    m.memory = h.detach()
    loss = loss_of(m.head(h), labels)
    return loss + ((h - before).square().mean() if before is not None else 0.0)


@row(EITHER)
def adv_a_transformer_xl_memory_of_the_step_before(m, input_ids, labels):
    x = m.embed(input_ids)
    before = getattr(m, "memory", None)
    m.memory = x.detach()
    keys = x if before is None else torch.cat([before, x], 1)
    q, k, v = m.qkv(x).chunk(3, -1)[0], *m.qkv(keys).chunk(3, -1)[1:]
    y = functional.scaled_dot_product_attention(heads(q), heads(k), heads(v))
    return loss_of(m.head(x + m.out(joined(y))), labels)


# ---------------------------------------------------------------- numbers that a program prints
@row(EITHER)
def adv_metrics_of_many_kinds(m, input_ids, labels):
    scores = logits(m, input_ids)
    loss = loss_of(scores, labels)
    with torch.no_grad():
        guess, kept = scores.argmax(-1), labels != -100
        right = (guess == labels) & kept
        top5 = (scores.topk(5, -1).indices == labels[..., None]).any(-1)
        told = {"accuracy": right.sum() / kept.sum(), "by items": right.sum().item() / kept.sum().item(), "top5": top5[kept].float().mean(),
                "exact": (right | ~kept).all(1).float().mean(), "perplexity": math.exp(loss.item()), "correct": (guess == labels)[kept].float().mean(),
                "true positives": ((guess % 2 == 1) & (labels % 2 == 1) & kept).sum(), "any": right.any(), "per sample": right.sum(1).float() / kept.sum(1),
                "confidence": scores.softmax(-1).amax(-1)[kept].mean()}
    return loss, told


@row(EITHER)
def adv_accuracy_by_counting_what_is_selected(m, input_ids, labels):
    scores = logits(m, input_ids)
    kept = labels != -100
    right = (scores.argmax(-1) == labels)[kept]
    return loss_of(scores, labels), {"accuracy": right.sum().item() / right.numel()}


@row(EITHER)
def adv_accuracy_by_the_length_of_nonzero(m, input_ids, labels):
    scores = logits(m, input_ids)
    right = (scores.argmax(-1) % 2 == labels % 2).nonzero()
    return loss_of(scores, labels), {"right": len(right)}


@row(EITHER)
def adv_a_confusion_matrix_by_bincount(m, input_ids, labels):
    scores = m.classes(hidden(m, input_ids))
    target = input_ids % CLASSES
    pairs = (target * CLASSES + scores.argmax(-1)).flatten()
    return loss_of(scores, target), {"confusion": torch.bincount(pairs, minlength=CLASSES ** 2)}


@row(EITHER)
def adv_calibration_bins(m, input_ids, labels):
    scores = m.classes(hidden(m, input_ids))
    target, told = input_ids % CLASSES, 0.0
    with torch.no_grad():
        sure, guess = scores.softmax(-1).max(-1)
        for low in torch.linspace(0, 0.9, 10).tolist():
            inside = (sure > low) & (sure <= low + 0.1)
            if inside.any():
                told = told + (sure[inside].mean() - (guess == target)[inside].float().mean()).abs() * inside.float().mean()
    return loss_of(scores, target), {"calibration": told}


@row(EITHER)
def adv_mean_of_selected_activations_in_python(m, input_ids, labels):
    h = hidden(m, input_ids)
    picked = h[labels != -100]
    return picked.sum() / picked.shape[0] * 0.1


@row(EITHER)
def adv_mean_of_few_selected_activations_in_python(m, input_ids, labels):
    h = hidden(m, input_ids)
    picked = h[input_ids == 5]
    return picked.sum() / max(len(picked), 1) * 0.1


@row(EITHER)
def adv_the_first_of_the_selected(m, input_ids, labels):
    picked = hidden(m, input_ids)[labels != -100]
    return m.classes(picked[0]).square().mean() + m.classes(picked[-1]).square().mean()


@row(EITHER)
def adv_the_first_ten_of_the_selected(m, input_ids, labels):
    picked = hidden(m, input_ids)[labels != -100]
    return m.classes(picked[:10]).square().mean()


@row(EITHER, lambda step: {"input_ids": (ids := tokens(step)), "labels": torch.tensor([[0, 0, 1, 0, 0, 0] * 4, [1, 0, 0, 0, 0, 0] * 4, [0, 0, 0, 0, 1, 0] * 4])})
def adv_masked_tokens_of_each_sample_by_a_view(m, input_ids, labels):
    picked = hidden(m, input_ids)[labels == 1].view(input_ids.shape[0], -1, HIDDEN)
    return m.classes(picked.mean(1)).square().mean()


@row(EITHER)
def adv_deviation_of_the_selected(m, input_ids, labels):
    picked = m.score(hidden(m, input_ids))[labels != -100]
    return picked.std() + picked.var(0).mean()


@row(EITHER)
def adv_largest_of_the_selected(m, input_ids, labels):
    picked = m.score(hidden(m, input_ids))[labels != -100]
    return picked.max() + picked.logsumexp(0).sum()


@row(EITHER)
def adv_two_selections_joined(m, input_ids, labels):
    h = hidden(m, input_ids)
    both = torch.cat([h[input_ids < 15], h[input_ids >= 15]])
    return m.classes(both).square().mean() + both.norm()


@row(EITHER)
def adv_selected_of_each_sample_meaned_in_a_list(m, input_ids, labels):
    h = hidden(m, input_ids)
    means = torch.stack([h[i][labels[i] != -100].mean(0) for i in range(h.shape[0])])
    return m.classes(means).square().mean()


@row(EITHER, padded)
def adv_real_tokens_of_each_sample_by_a_python_length(m, input_ids, labels, attention_mask):
    h = hidden(m, input_ids)
    lengths = attention_mask.sum(1).tolist()
    return sum(m.classes(h[i, :n].mean(0)).square().mean() for i, n in enumerate(lengths))


@row(EITHER, padded)
def adv_nested_tensors_of_real_tokens(m, input_ids, labels, attention_mask):
    h = hidden(m, input_ids)
    nested = torch.nested.nested_tensor([h[i, :n] for i, n in enumerate(attention_mask.sum(1).tolist())])
    return m.classes(nested.to_padded_tensor(0.0).sum(1)).square().mean()


@row(EITHER)
def adv_out_variants_without_gradients(m, input_ids, labels):
    h = hidden(m, input_ids)
    with torch.no_grad():
        total, mean, largest = torch.empty(BATCH, HIDDEN), torch.empty(BATCH, HIDDEN), torch.empty(BATCH, HIDDEN)
        torch.sum(h, 1, out=total)
        torch.mean(h, 1, out=mean)
    return loss_of(m.head(h), labels), {"total": total, "mean": mean}


@row(EITHER)
def adv_out_variant_of_amax(m, input_ids, labels):
    h = hidden(m, input_ids)
    with torch.no_grad():
        largest = torch.empty(BATCH, HIDDEN)
        torch.amax(h, 1, out=largest)
    return loss_of(m.head(h), labels), {"largest": largest}


@row(EITHER)
def adv_out_variant_of_cat_and_matmul(m, input_ids, labels):
    h = hidden(m, input_ids)
    with torch.no_grad():
        gram = torch.empty(BATCH, HIDDEN, HIDDEN)
        torch.bmm(h.transpose(1, 2), h, out=gram)
    return loss_of(m.head(h), labels), {"gram": gram}


@row(EITHER)
def adv_numbers_written_into_a_buffer(m, input_ids, labels):
    h = hidden(m, input_ids)
    with torch.no_grad():
        seen = torch.zeros(HIDDEN)
        seen += h.sum((0, 1))
        seen.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
        other = torch.zeros(2, HIDDEN)
        other[0] = h.mean((0, 1))
        other[1].copy_(h.square().mean((0, 1)))
        ema = torch.zeros(HIDDEN).lerp_(h.mean((0, 1)), 0.3)
    return loss_of(m.head(h), labels), {"seen": seen, "other": other, "ema": ema}


@row(EITHER)
def adv_sums_of_ids_by_index_add_without_gradients(m, input_ids, labels):
    h = hidden(m, input_ids)
    with torch.no_grad():
        sums = torch.zeros(VOCABULARY, HIDDEN).index_add_(0, input_ids.flatten(), h.flatten(0, 1))
    return loss_of(m.head(h), labels), {"sums": sums}


@row(EITHER)
def adv_sums_of_ids_by_scatter_reduce(m, input_ids, labels):
    h = m.score(hidden(m, input_ids)).flatten()
    means = torch.zeros(VOCABULARY).scatter_reduce(0, input_ids.flatten(), h, "mean", include_self=False)
    return means.square().sum()


@row(EITHER)
def adv_sums_of_ids_by_bincount_with_weights(m, input_ids, labels):
    h = hidden(m, input_ids)
    with torch.no_grad():
        loads = torch.bincount(input_ids.flatten(), weights=m.score(h).flatten().double(), minlength=VOCABULARY)
    return loss_of(m.head(h), labels), {"loads": loads}


@row(EITHER)
def adv_sums_of_ids_by_index_put_accumulate(m, input_ids, labels):
    h = hidden(m, input_ids)
    sums = torch.zeros(VOCABULARY, HIDDEN).index_put((input_ids.flatten(),), h.flatten(0, 1), accumulate=True)
    return sums.square().mean()


@row(EITHER)
def adv_sums_by_addmm_and_addbmm(m, input_ids, labels):
    h = hidden(m, input_ids)
    flat = h.flatten(0, 1)
    gram = torch.addmm(torch.eye(HIDDEN), flat.T, flat, alpha=0.01)
    return gram.square().mean() + torch.addbmm(torch.eye(HIDDEN), h.transpose(1, 2), h, alpha=0.01).mean()


@row(EITHER)
def adv_centroids_by_products_without_gradients(m, input_ids, labels):
    h = hidden(m, input_ids)
    with torch.no_grad():
        flat = h.reshape(-1, HIDDEN)
        assigned = functional.one_hot(torch.cdist(flat, m.classes.weight).argmin(-1), CLASSES).float()
        size, total = assigned.sum(0), assigned.t() @ flat
    return loss_of(m.head(h), labels), {"size": size, "total": total}


@row(EITHER)
def adv_a_quantizer_s_scale_by_the_largest(m, input_ids, labels):
    h = hidden(m, input_ids)
    scale = h.detach().abs().max() / 127
    q = h + ((h / scale).round() * scale - h).detach()
    return loss_of(m.head(q), labels)


@row(EITHER)
def adv_a_quantizer_s_scale_by_item(m, input_ids, labels):
    h = hidden(m, input_ids)
    scale = h.detach().abs().mean().item() / 10
    return loss_of(m.head(h + ((h / scale).round() * scale - h).detach()), labels)


@row(EITHER)
def adv_fake_quantization_per_tensor(m, input_ids, labels):
    h = hidden(m, input_ids)
    return loss_of(m.head(torch.fake_quantize_per_tensor_affine(h, 0.05, 0, -128, 127)), labels)


# ---------------------------------------------------------------- attention
@row(EITHER)
def adv_grouped_keys_expanded(m, input_ids, labels):
    x = m.embed(input_ids)
    q = heads(m.qkv(x)[..., :HIDDEN])
    k, v = (heads(part, 2) for part in m.qkv(x)[..., HIDDEN:2 * HIDDEN].chunk(2, -1))
    k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(t.shape[0], 4, t.shape[2], t.shape[3]) for t in (k, v))
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v, is_causal=True)))), labels)


@row(EITHER, on_four=True)
def adv_attention_of_merged_batch_and_heads(m, input_ids, labels):
    x = m.embed(input_ids)
    b, s, d = x.shape
    q, k, v = (part.view(b, s, HEADS, -1).transpose(1, 2).reshape(b * HEADS, s, -1) for part in m.qkv(x).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return loss_of(m.head(m.out(y.view(b, HEADS, s, -1).transpose(1, 2).reshape(b, s, d))), labels)


@row(EITHER)
def adv_attention_of_merged_heads_first(m, input_ids, labels):
    x = m.embed(input_ids)
    b, s, d = x.shape
    q, k, v = (part.view(b, s, HEADS, -1).permute(2, 0, 1, 3).reshape(HEADS * b, s, -1) for part in m.qkv(x).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v)
    return loss_of(m.head(m.out(y.view(HEADS, b, s, -1).permute(1, 2, 0, 3).reshape(b, s, d))), labels)


@sized(EITHER, S=12, D=24, H=6, B=6)
def adv_attention_of_merged_heads_where_sizes_are_equal(m, input_ids, labels):
    x = m.embed(input_ids)
    b, s, d = x.shape
    q, k, v = (part.view(b, s, m.H, -1).transpose(1, 2).reshape(b * m.H, s, -1) for part in m.qkv(x).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return loss_of(m.head(m.out(y.view(b, m.H, s, -1).transpose(1, 2).reshape(b, s, d))), labels)


@row(EITHER)
def adv_attention_of_tokens_first_merged(m, input_ids, labels):
    x = m.embed(input_ids).transpose(0, 1)
    s, b, d = x.shape
    q, k, v = (part.contiguous().view(s, b * HEADS, d // HEADS).transpose(0, 1) for part in m.qkv(x).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v)
    y = y.transpose(0, 1).contiguous().view(s, b, d)
    return loss_of(m.head(m.out(y).transpose(0, 1)), labels)


@sized(EITHER, B=1, H=1, S=10, D=8, on_four=True)
def adv_one_sample_one_head(m, input_ids, labels):
    return loss_of(m.head(shidden(m, input_ids)), labels)


@sized(EITHER, B=1, S=10, D=8, H=2)
def adv_one_sample_squeezed(m, input_ids, labels):
    x = m.embed(input_ids).squeeze(0)
    q, k, v = (part.view(-1, 2, 4).transpose(0, 1) for part in m.qkv(x).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return functional.cross_entropy(m.head(m.out(y.transpose(0, 1).reshape(-1, 8))), labels[0])


@row(EITHER, placed)
def adv_a_window_by_positions_and_causality(m, input_ids, labels, position_ids):
    p = position_ids
    ahead = p[:, :, None] - p[:, None, :]
    mask = (ahead >= 0) & (ahead < 15)
    return loss_of(logits(m, input_ids, attn_mask=mask[:, None]), labels)


@row(EITHER, with_positions(padded))
def adv_a_mask_of_floats_by_where(m, input_ids, labels, attention_mask, position_ids):
    ok = (position_ids[:, :, None] >= position_ids[:, None, :]) & attention_mask[:, None, :].bool()
    ok = ok | torch.eye(ok.shape[-1]).bool()
    bias = torch.where(ok, 0.0, float("-inf"))
    return loss_of(logits(m, input_ids, attn_mask=bias[:, None]), labels)


@row(EITHER, placed, modules={"buckets": lambda: torch.randn(16, HEADS)})
def adv_relative_buckets_by_given_positions(m, input_ids, labels, position_ids):
    distance = (position_ids[:, :, None] - position_ids[:, None, :]).clamp(-8, 7) + 8
    bias = m.buckets[distance].permute(0, 3, 1, 2)
    return loss_of(logits(m, input_ids, attn_mask=bias), labels)


@row(EITHER, placed, modules={"buckets": lambda: nn.Embedding(16, HEADS)})
def adv_relative_buckets_by_an_embedding_shared_by_samples(m, input_ids, labels, position_ids):
    p = position_ids[0]
    distance = (p[:, None] - p[None, :]).clamp(-8, 7) + 8
    return loss_of(logits(m, input_ids, attn_mask=m.buckets(distance).permute(2, 0, 1)[None]), labels)


@row(EITHER, modules={"sink": lambda: torch.randn(HEADS)})
def adv_sinks_by_a_column_of_keys(m, input_ids, labels):
    x = m.embed(input_ids)
    q, k, v = (heads(part) for part in m.qkv(x).chunk(3, -1))
    k, v = functional.pad(k, (0, 0, 1, 0)), functional.pad(v, (0, 0, 1, 0))
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v)))), labels)


@row(EITHER, modules={"mix": lambda: torch.randn(HEADS, HEADS)})
def adv_talking_heads_of_values(m, input_ids, labels):
    x = m.embed(input_ids)
    q, k, v = (heads(part) for part in m.qkv(x).chunk(3, -1))
    q, v = torch.einsum("bhsd,hg->bgsd", q, m.mix), torch.einsum("bhsd,hg->bgsd", v, m.mix)
    y = torch.einsum("bhsd,gh->bgsd", functional.scaled_dot_product_attention(q, k, v, is_causal=True), m.mix)
    return loss_of(m.head(m.out(joined(y))), labels)


@row(EITHER)
def adv_joint_attention_of_two_streams(m, input_ids, labels):
    x, y = m.embed(input_ids), m.positions(input_ids)
    q, k, v = (heads(part) for part in m.qkv(torch.cat([x, y], 1)).chunk(3, -1))
    z = m.out(joined(functional.scaled_dot_product_attention(q, k, v)))
    a, b = z.chunk(2, 1)
    return loss_of(m.head(a), labels) + b.square().mean()


@row(EITHER)
def adv_windows_of_four_tokens_attend(m, input_ids, labels):
    x = m.embed(input_ids)
    w = x.reshape(-1, 4, HIDDEN)
    return loss_of(m.head((w + attend(m, w)).view(x.shape)), labels)


@row(EITHER)
def adv_windows_of_a_part_attend(m, input_ids, labels):
    x = m.embed(input_ids)
    w = x.reshape(-1, 12, HIDDEN)
    return loss_of(m.head((w + attend(m, w)).view(x.shape)), labels)


@sized(EITHER, B=4, S=24)
def adv_windows_as_long_as_the_sequence_attend(m, input_ids, labels):
    x = m.embed(input_ids)
    w = x.reshape(-1, 24, HIDDEN)
    return loss_of(m.head((w + sattend(m, w)).view(x.shape)), labels)


@sized(EITHER, B=4, S=24)
def adv_a_mean_of_windows_as_long_as_the_sequence(m, input_ids, labels):
    h = shidden(m, input_ids)
    return m.head(h.reshape(-1, 24, HIDDEN).mean(1)).square().mean()


@row(EITHER)
def adv_a_mean_of_windows_of_four(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(h.view(h.shape[0], -1, 4, HIDDEN).mean(2)).square().mean()


@row(EITHER)
def adv_a_mean_of_four_windows(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(h.view(h.shape[0], 4, -1, HIDDEN).mean(2)).square().mean()


@row(EITHER)
def adv_a_mean_of_every_fourth(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(h.view(h.shape[0], 4, -1, HIDDEN).mean(1)).square().mean()


@row(EITHER)
def adv_patches_merged_as_swin(m, input_ids, labels):
    h = hidden(m, input_ids)
    merged = torch.cat([h[:, 0::2], h[:, 1::2]], -1)
    return (merged @ torch.ones(2 * HIDDEN, 3)).square().mean()


@row(EITHER)
def adv_tokens_repeated(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(h.repeat_interleave(2, dim=1)).square().mean() + m.classes(h.repeat(1, 2, 1)[:, :3]).mean()


@row(EITHER)
def adv_a_mixer_of_tokens_by_the_part_s_length(m, input_ids, labels):
    h = hidden(m, input_ids)
    mixed = functional.linear(h.transpose(1, 2), m.positions.weight[:24, :20].T[:, :h.shape[1]][:h.shape[1]])
    return mixed.square().mean()


@row(EITHER, modules={"mixer": lambda: nn.Linear(LENGTH, LENGTH)})
def adv_a_mixer_of_tokens(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x + m.mixer(x.transpose(1, 2)).transpose(1, 2)), labels)


@row(EITHER, modules={"w": lambda: torch.randn(LENGTH)})
def adv_learned_weights_of_all_tokens(m, input_ids, labels):
    return m.classes(torch.einsum("bsd,s->bd", hidden(m, input_ids), m.w)).square().mean()


@row(EITHER, modules={"norm2": lambda: nn.LayerNorm((LENGTH, HIDDEN))})
def adv_layer_norm_of_tokens_and_features(m, input_ids, labels):
    return loss_of(m.head(m.norm2(m.embed(input_ids))), labels)


@row(REFUSED)
def adv_layer_norm_of_the_shape_of_a_sample(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(functional.layer_norm(x, x.shape[1:])), labels)


@row(REFUSED)
def adv_an_instance_norm_over_tokens(m, input_ids, labels):
    x = m.embed(input_ids).transpose(1, 2)
    return loss_of(m.head(functional.instance_norm(x).transpose(1, 2)), labels)


@row(REFUSED)
def adv_group_norm_over_tokens(m, input_ids, labels):
    x = m.embed(input_ids).transpose(1, 2)
    return loss_of(m.head(functional.group_norm(x, 4).transpose(1, 2)), labels)


@row(EITHER, modules={"bn": lambda: nn.BatchNorm1d(HIDDEN).eval()})
def adv_batch_norm_of_kept_statistics(m, input_ids, labels):
    x = m.embed(input_ids)
    m.bn.eval()
    return loss_of(m.head(m.bn(x.transpose(1, 2)).transpose(1, 2) + attend(m, m.bn(x.flatten(0, 1)).view(x.shape))), labels)


@row(EITHER)
def adv_mixing_by_fourier(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1).real), labels)


@row(EITHER)
def adv_fourier_of_features(m, input_ids, labels):
    x = m.embed(input_ids)
    y = torch.fft.irfft(torch.fft.rfft(x, dim=-1) * torch.polar(torch.ones(11), torch.arange(11) * 0.1), n=HIDDEN, dim=-1)
    return loss_of(m.head(y + attend(m, x)), labels)


@row(REFUSED)
def adv_a_recurrence_by_logcumsumexp(m, input_ids, labels):
    x = m.embed(input_ids)
    a = functional.logsigmoid(m.out(x)).cumsum(1)
    return loss_of(m.head((a + torch.logcumsumexp(x - a, 1)).tanh()), labels)


@row(EITHER)
def adv_a_recurrence_by_a_loop(m, input_ids, labels):
    x = m.embed(input_ids)
    state, found = torch.zeros(x.shape[0], HIDDEN), []
    for t in range(x.shape[1]):
        state = 0.8 * state + x[:, t]
        found.append(state)
    return loss_of(m.head(torch.stack(found, 1)), labels)


@row(EITHER)
def adv_a_recurrence_by_unbind(m, input_ids, labels):
    state, found = 0.0, []
    for token in m.embed(input_ids).unbind(1):
        state = torch.tanh(token + 0.5 * state)
        found.append(state)
    return loss_of(m.head(torch.stack(found, dim=1)), labels)


@row(EITHER)
def adv_a_recurrence_by_iterating_tokens_first(m, input_ids, labels):
    state, found = torch.zeros(input_ids.shape[0], HIDDEN), []
    for token in m.embed(input_ids).transpose(0, 1):
        state = torch.tanh(token + 0.5 * state)
        found.append(state)
    return loss_of(m.head(torch.stack(found).transpose(0, 1)), labels)


@row(EITHER)
def adv_a_recurrence_by_split_of_one(m, input_ids, labels):
    state, found = 0.0, []
    for token in m.embed(input_ids).split(1, 1):
        state = torch.tanh(token + 0.5 * state)
        found.append(state)
    return loss_of(m.head(torch.cat(found, 1)), labels)


@row(EITHER)
def adv_a_recurrence_written_into_empty(m, input_ids, labels):
    x = m.embed(input_ids)
    states, state = torch.empty_like(x), 0.0
    for t in range(x.size(1)):
        state = 0.5 * state + x[:, t]
        states[:, t] = state
    return loss_of(m.head(states), labels)


@row(EITHER)
def adv_a_scan_of_doubling_steps(m, input_ids, labels):
    x, step = m.embed(input_ids), 1
    while step < x.shape[1]:
        x = x + functional.pad(x, (0, 0, step, 0))[:, :x.shape[1]] * 0.5
        step *= 2
    return loss_of(m.head(x), labels)


@row(REFUSED, modules={"conv": lambda: nn.Conv1d(HIDDEN, HIDDEN, 3, padding=2, groups=HIDDEN)})
def adv_a_causal_convolution(m, input_ids, labels):
    x = m.embed(input_ids)
    y = m.conv(x.transpose(1, 2))[..., :x.shape[1]].transpose(1, 2)
    return loss_of(m.head(y), labels)


@row(EITHER, modules={"conv": lambda: nn.Conv2d(1, 3, (1, 3), padding=(0, 1))})
def adv_a_convolution_of_features_of_each_token(m, input_ids, labels):
    x = m.embed(input_ids)
    y = m.conv(x[:, None]).mean(1)
    return loss_of(m.head(x + y + attend(m, x)), labels)


@row(REFUSED, modules={"conv": lambda: nn.Conv2d(1, 3, (3, 1), padding=(1, 0))})
def adv_a_convolution_of_tokens_by_conv2d(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x + m.conv(x[:, None]).mean(1)), labels)


@row(EITHER, modules={"conv": lambda: nn.Conv1d(HIDDEN, HIDDEN, 1, stride=2)})
def adv_a_convolution_of_width_1_and_stride_2(m, input_ids, labels):
    return m.conv(hidden(m, input_ids).transpose(1, 2)).square().mean()


@row(EITHER, modules={"conv": lambda: nn.Conv1d(HIDDEN, HIDDEN, 1, padding=1)})
def adv_a_convolution_of_width_1_and_padding(m, input_ids, labels):
    return m.conv(hidden(m, input_ids).transpose(1, 2)).square().mean()


@sized(EITHER, S=12, D=6, H=3, B=3, modules={"conv": lambda: nn.Conv1d(6, 6, 3, padding=1)})
def adv_a_convolution_of_features_with_tokens_as_channels(m, input_ids, labels):
    x = m.embed(input_ids)
    y = torch.stack([functional.conv1d(x[i][:, None], m.conv.weight[:1, :1], padding=1)[:, 0] for i in range(3)])
    return loss_of(m.head(x + y), labels)


@row(EITHER, modules={"gru": lambda: nn.GRU(5, 5, batch_first=True)})
def adv_gru_of_features_of_each_token(m, input_ids, labels):
    x = m.embed(input_ids)
    y, _ = m.gru(x.reshape(-1, 4, 5))
    return loss_of(m.head(x + y.reshape(x.shape)), labels)


@row(EITHER, modules={"cell": lambda: nn.GRUCell(HIDDEN, HIDDEN)})
def adv_a_gru_cell_of_merged_tokens(m, input_ids, labels):
    x = m.embed(input_ids).flatten(0, 1)
    return loss_of(m.head(m.cell(x, m.norm(x)).view(*input_ids.shape, -1)), labels)


@row(REFUSED, modules={"gru": lambda: nn.GRU(HIDDEN, HIDDEN, batch_first=True)})
def adv_a_gru_of_tokens(m, input_ids, labels):
    return loss_of(m.head(m.gru(m.embed(input_ids))[0]), labels)


@row(REFUSED, modules={"lstm": lambda: nn.LSTM(HIDDEN, 10, bidirectional=True)})
def adv_an_lstm_of_tokens_first(m, input_ids, labels):
    return loss_of(m.head(m.lstm(m.embed(input_ids).transpose(0, 1))[0].transpose(0, 1)), labels)


def _decoder(**options):
    return lambda: nn.TransformerDecoderLayer(HIDDEN, HEADS, INNER_, dropout=0.0, batch_first=True, **options)


INNER_ = 28


@row(EITHER, modules={"layer": _decoder(norm_first=True)})
def adv_a_decoder_layer_of_pytorch_with_a_cut_memory(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(m.layer(x, m.norm(x))), labels)


@row(EITHER, lambda step: {**language(step), "whole_memory": floats(step, BATCH, 12, HIDDEN)}, modules={"layer": _decoder()})
def adv_a_decoder_layer_of_pytorch_with_a_whole_memory_of_the_part_s_length(m, input_ids, labels, whole_memory):
    x = m.embed(input_ids)
    return loss_of(m.head(m.layer(x, whole_memory)), labels)


@row(EITHER, lambda step: {**language(step), "whole_memory": floats(step, BATCH, 9, HIDDEN)}, modules={"layer": _decoder()}, stage=3)
def adv_a_decoder_layer_of_pytorch_with_a_whole_memory(m, input_ids, labels, whole_memory):
    x = m.embed(input_ids)
    return loss_of(m.head(m.layer(x, whole_memory, memory_key_padding_mask=torch.arange(9).expand(BATCH, -1) > 6)), labels)


@row(EITHER, modules={"layer": lambda: nn.TransformerEncoderLayer(HIDDEN, HEADS, 28, dropout=0.0, norm_first=True, activation="gelu")}, on_four=True)
def adv_an_encoder_layer_of_pytorch_with_tokens_first(m, input_ids, labels):
    x = m.embed(input_ids).transpose(0, 1)
    return loss_of(m.head(m.layer(x).transpose(0, 1)), labels)


@sized(EITHER, S=12, B=6, D=24, H=4, modules={"layer": lambda: nn.TransformerEncoderLayer(24, 4, 28, dropout=0.0)})
def adv_an_encoder_layer_with_tokens_first_of_as_many_samples_as_the_part(m, input_ids, labels):
    x = m.embed(input_ids).transpose(0, 1)
    return loss_of(m.head(m.layer(x).transpose(0, 1)), labels)


@sized(EITHER, S=12, B=6, D=24, H=4, modules={"layer": lambda: nn.TransformerEncoderLayer(24, 4, 28, dropout=0.0)})
def adv_samples_attend_to_each_other_by_mistake_of_tokens_first(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(m.layer(x)), labels)


@row(EITHER, modules={"attention": lambda: nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True, add_bias_kv=True)})
def adv_multihead_attention_of_pytorch_with_a_bias_token(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(m.attention(x, x, x, need_weights=False)[0]), labels)


@row(EITHER, modules={"attention": lambda: nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True, add_zero_attn=True)})
def adv_multihead_attention_of_pytorch_with_a_zero_token(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(m.attention(x, x, x, need_weights=False)[0]), labels)


@row(EITHER, padded, modules={"attention": lambda: nn.MultiheadAttention(HIDDEN, HEADS, kdim=HIDDEN, vdim=HIDDEN)})
def adv_multihead_attention_of_pytorch_tokens_first_and_padded(m, input_ids, labels, attention_mask):
    x = m.embed(input_ids).transpose(0, 1)
    y = m.attention(x, m.norm(x), x, need_weights=False, key_padding_mask=attention_mask == 0)[0]
    return loss_of(m.head(y.transpose(0, 1)), labels)


@row(EITHER, modules={"attention": lambda: nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)})
def adv_multihead_attention_of_pytorch_with_a_square_subsequent_mask(m, input_ids, labels):
    x = m.embed(input_ids)
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    return loss_of(m.head(m.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]), labels)


@row(EITHER, modules={"layer": lambda: nn.TransformerEncoderLayer(HIDDEN, HEADS, 28, dropout=0.0, batch_first=True)})
def adv_an_encoder_layer_with_a_causal_mask_evaluated(m, input_ids, labels):
    m.layer.eval()
    with torch.no_grad():
        y = m.layer(m.embed(input_ids), src_mask=nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1]), is_causal=True)
    return loss_of(m.head(y), labels)


# ---------------------------------------------------------------- writes and shapes
@row(EITHER)
def adv_strided_writes(m, input_ids, labels):
    x = m.embed(input_ids).clone()
    x[:, ::2] += m.positions.weight[0]
    x[:, 1::3] *= 2
    return loss_of(m.head(x + attend(m, x)), labels)


@row(EITHER)
def adv_the_first_three_tokens_added_to(m, input_ids, labels):
    x = m.embed(input_ids).clone()
    x[:, :3] += m.positions.weight[:3]
    x[:, -1] *= 0.0
    return loss_of(m.head(x + attend(m, x)), labels)


@row(EITHER)
def adv_tokens_zeroed_by_index_fill_and_scatter(m, input_ids, labels):
    x = m.embed(input_ids).index_fill(1, torch.tensor([2, 20]), 0.0)
    return loss_of(m.head(x + attend(m, x)), labels)


@row(EITHER)
def adv_a_token_written_at_a_place_of_each_sample(m, input_ids, labels):
    x = m.embed(input_ids).clone()
    x[torch.arange(BATCH), torch.tensor([3, 20, 11])] = m.positions.weight[0]
    return loss_of(m.head(x + attend(m, x)), labels)


@row(EITHER)
def adv_a_slice_scattered(m, input_ids, labels):
    x = m.embed(input_ids)
    x = torch.slice_scatter(x, m.positions.weight[:4].expand(BATCH, -1, -1), 1, 0, 4)
    return loss_of(m.head(x + attend(m, x)), labels)


@row(EITHER)
def adv_a_lower_triangle_of_tokens_and_features(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x + x.tril()), labels)


@row(EITHER)
def adv_a_diagonal_of_tokens_and_features(m, input_ids, labels):
    return hidden(m, input_ids).diagonal(dim1=1, dim2=2).square().mean()


@row(EITHER)
def adv_windows_by_unfold_and_as_strided(m, input_ids, labels):
    h = hidden(m, input_ids).contiguous()
    w = h.as_strided((h.shape[0], h.shape[1] - 2, 3, HIDDEN), (h.stride(0), HIDDEN, HIDDEN, 1))
    return m.classes(w.mean(2)).square().mean()


@row(EITHER)
def adv_windows_by_unfold(m, input_ids, labels):
    return m.classes(hidden(m, input_ids).unfold(1, 3, 1).mean(-1)).square().mean()


@row(EITHER)
def adv_a_diagonal_of_distances(m, input_ids, labels):
    h = hidden(m, input_ids)
    return torch.cdist(h, h).mean() * 0.1


@row(EITHER)
def adv_a_covariance_by_torch_cov(m, input_ids, labels):
    return torch.cov(m.classes(hidden(m, input_ids)).flatten(0, 1).T).square().mean()


@row(EITHER)
def adv_a_singular_value(m, input_ids, labels):
    h = hidden(m, input_ids)
    return torch.linalg.svdvals(h.flatten(0, 1)).sum() * 0.1 + torch.linalg.matrix_norm(h).mean()


@row(EITHER)
def adv_tokens_pruned_by_their_score(m, input_ids, labels):
    h = hidden(m, input_ids)
    kept = m.score(h)[..., 0].topk(6, dim=1).indices
    return m.classes(h.gather(1, kept[..., None].expand(-1, -1, HIDDEN))).square().mean()


@row(EITHER, lambda step: {**language(step), "noise": torch.rand(BATCH, LENGTH, generator=generator(step, 9))})
def adv_tokens_masked_by_sorted_noise_as_mae_does(m, input_ids, labels, noise):
    h = m.embed(input_ids)
    kept = noise.argsort(1)[:, :8]
    z = h.gather(1, kept[..., None].expand(-1, -1, HIDDEN))
    z = z + attend(m, z)
    return m.classes(z).square().mean()


@row(EITHER, lambda step: {**language(step), "whole_noise": torch.rand(BATCH, LENGTH, generator=generator(step, 9))})
def adv_tokens_masked_by_whole_sorted_noise(m, input_ids, labels, whole_noise):
    h = m.embed(input_ids)
    kept = whole_noise.argsort(1)[:, :12]
    z = h.gather(1, kept[..., None].expand(-1, -1, HIDDEN))
    return m.classes(z + attend(m, z)).square().mean()


@row(EITHER, lambda step: {**language(step), "noise": torch.rand(BATCH, LENGTH, generator=generator(step, 9))})
def adv_tokens_dropped_by_given_noise(m, input_ids, labels, noise):
    x = m.embed(input_ids) * (noise > 0.3).float()[..., None] / 0.7
    return loss_of(m.head(x + attend(m, x)), labels)


@row(EITHER)
def adv_a_decision_by_a_random_number(m, input_ids, labels):
    x = m.embed(input_ids)
    for _ in range(6):
        if torch.rand(1).item() < 0.5:
            x = x + attend(m, x) * 0.0
    return loss_of(m.head(x), labels)


@row(EITHER)
def adv_a_decision_by_a_random_tensor(m, input_ids, labels):
    x = m.embed(input_ids)
    for _ in range(6):
        if torch.rand([]) < 0.5:
            x = x + attend(m, x) * 0.0
    return loss_of(m.head(x), labels)


@row(EITHER)
def adv_a_decision_by_randint(m, input_ids, labels):
    x = m.embed(input_ids)
    for _ in range(int(torch.randint(1, 6, (1,)))):
        x = x + attend(m, x) * 0.0
    return loss_of(m.head(x), labels)


@row(EITHER)
def adv_a_decision_by_bernoulli_and_randperm(m, input_ids, labels):
    x = m.embed(input_ids)
    for layer in torch.randperm(5).tolist():
        if layer % 2 and torch.bernoulli(torch.tensor(0.5)):
            x = x + attend(m, x) * 0.0
        elif layer:
            x = x + hidden(m, input_ids).mean(1, keepdim=True) * 0.0
    return loss_of(m.head(x), labels)


@row(EITHER)
def adv_noise_of_a_sample_shared_by_tokens(m, input_ids, labels):
    noise = torch.randn(BATCH, 1, HIDDEN)
    x = m.embed(input_ids) + noise
    total = (x - m.embed(input_ids)).mean(1)
    return loss_of(m.head(m.embed(input_ids)), labels), {"zero": (total - noise[:, 0]).abs().max() > 1e-4}


# ---------------------------------------------------------------- images, other dims, steps
@program(EITHER, forward=lambda m, x: m.classes(m.out(x) + attend(m, m.out(x).flatten(0, 1)).view(x.shape)).square().mean())
def adv_axial_attention_along_columns_of_cut_rows(model, cut, step):
    x = cut(input_ids=floats(step, 3, 8, 7, HIDDEN))["input_ids"]
    return model(x)


def _rows_attend(m, x):
    y = m.out(x).transpose(1, 2)
    z = attend(m, y.reshape(-1, y.shape[2], HIDDEN)).view(y.shape)
    return m.classes(z).square().mean()


@program(EITHER, forward=_rows_attend)
def adv_axial_attention_along_cut_rows(model, cut, step):
    return model(cut(input_ids=floats(step, 3, 8, 7, HIDDEN))["input_ids"])


@program(EITHER, forward=_rows_attend)
def adv_axial_attention_along_cut_rows_of_a_square(model, cut, step):
    return model(cut(input_ids=floats(step, 3, 8, 8, HIDDEN))["input_ids"])


@program(EITHER, forward=_rows_attend)
def adv_axial_attention_along_cut_rows_where_columns_are_the_part(model, cut, step):
    return model(cut(input_ids=floats(step, 4, 8, 4, HIDDEN))["input_ids"])


@program(EITHER, forward=lambda m, x: m.classes(m.out(x) + attend(m, m.out(x).flatten(0, 1)).view(x.shape)).square().mean())
def adv_axial_attention_along_columns_where_columns_are_the_part(model, cut, step):
    return model(cut(input_ids=floats(step, 4, 8, 4, HIDDEN))["input_ids"])


@program(EITHER, forward=lambda m, x: m.classes(attend(m, m.out(x).flatten(1, 2))).square().mean())
def adv_images_of_cut_rows_flattened_and_attended(model, cut, step):
    return model(cut(input_ids=floats(step, 3, 4, 6, HIDDEN))["input_ids"])


@program(EITHER, forward=lambda m, x: m.classes(attend(m, m.patch(x).flatten(2).transpose(1, 2))).square().mean(),
         modules={"patch": lambda: nn.Conv2d(3, HIDDEN, 4, stride=4)})
def adv_patches_of_cut_rows(model, cut, step):
    return model(cut(input_ids=floats(step, 2, 3, 16, 8), dim=2)["input_ids"])


@program(EITHER, forward=lambda m, x: loss_of(m.head(m.embed(x).transpose(0, 1) + attend(m, m.embed(x).transpose(0, 1), is_causal=True)), x.t()))
def adv_tokens_first_cut_along_dim_0(model, cut, step):
    return model(cut(input_ids=tokens(step).t().contiguous(), dim=0)["input_ids"])


@program(EITHER, forward=lambda m, x, t: functional.cross_entropy(m.head(hidden(m, x)).permute(0, 2, 1), t) + m.score(hidden(m, x)).mean())
def adv_a_frozen_trunk_and_two_forwards(model, cut, step):
    model.embed.weight.requires_grad_(True)
    part = cut(**language(step))
    with torch.no_grad():
        before = model(part["input_ids"], part["labels"])
    return model(part["input_ids"], part["labels"]), {"before": before}


@program(EITHER, forward=lambda m, x: hidden(m, x), stage=1)
def adv_an_average_model_as_the_target(model, cut, step):
    part = cut(**language(step))
    with torch.no_grad():
        target = model(part["input_ids"]).detach().roll(1, -1)
    h = model(part["input_ids"])
    return 1 - functional.cosine_similarity(h, target, dim=-1).mean() + (h.mean((0, 1)) - target.mean((0, 1))).norm()


@program(EITHER, forward=lambda m, x, e: m.classes(m.embed(x) + e + attend(m, m.embed(x) + e)).square().mean())
def adv_adversarial_embeddings(model, cut, step):
    ids = cut(input_ids=tokens(step))["input_ids"]
    delta = torch.zeros(*ids.shape, HIDDEN, requires_grad=True)
    loss = model(ids, delta)
    return loss


@program(EITHER, forward=lambda m, **named: logits(m, named["input_ids"]))
def adv_labels_of_many_classes_by_the_engine_s_own_cut(model, cut, step):
    # multi-label: as many classes as tokens
    scores = model(input_ids=cut(input_ids=tokens(step))["input_ids"]).mean(1)[:, :LENGTH]
    return functional.binary_cross_entropy_with_logits(scores, (floats(step, BATCH, LENGTH) > 0).float())


def _own(m, input_ids, labels):
    return functional.binary_cross_entropy_with_logits(logits(m, input_ids).mean(1)[:, :LENGTH], labels)


@program(EITHER, forward=_own)
def adv_nothing_cut_and_labels_of_as_many_classes_as_tokens(model, cut, step):
    return model(input_ids=tokens(step), labels=(floats(step, BATCH, LENGTH) > 0).float())


@program(EITHER, forward=lambda m, input_ids, labels: functional.cross_entropy(m.classes(hidden(m, input_ids)[:, 0]), labels))
def adv_nothing_cut_and_labels_of_samples(model, cut, step):
    return model(input_ids=tokens(step), labels=torch.tensor([1, 0, 3]))


@program(EITHER, forward=lambda m, input_ids, labels, attention_mask: loss_of(logits(m, input_ids), labels))
def adv_nothing_cut_and_the_engine_cuts(model, cut, step):
    return model(**padded(step))


@program(EITHER, forward=lambda m, input_ids, labels, token_weights: (functional.cross_entropy(logits(m, input_ids).transpose(1, 2), labels, reduction="none") * token_weights).sum() / 30)
def adv_nothing_cut_and_a_tensor_of_another_name(model, cut, step):
    return model(**language(step), token_weights=torch.rand(BATCH, LENGTH, generator=generator(step, 5)))


@sized(EITHER, S=2, B=2)
def adv_placeholder_of_one_token_pooled(m, input_ids, labels):
    h = shidden(m, input_ids)
    return m.head(h.squeeze(1).mean(0) if h.shape[1] == 1 else h.mean((0, 1))).square().mean()


# ---------------------------------------------------------------- families of Hugging Face
from .families import _BERT, _GPT2, _LLAMA, _PLAIN, _model, _unavailable  # noqa: E402  pylint: disable=wrong-import-position

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}


def _family(name, model, config, inputs=placed, step_of=None, expected=EITHER, **options):
    def step_fn(m, cut, step):
        return (step_of or (lambda m, cut, step: m(**cut(**inputs(step))).loss))(m, cut, step)
    step_fn.__module__ = __name__
    program(expected, build=_model(model, config), name="adv " + name, unavailable=_unavailable(True), tolerance=3e-5, **options)(step_fn)


_family("OLMo", "OlmoForCausalLM", _LLAMA)
_family("Starcoder2", "Starcoder2ForCausalLM", {**_LLAMA, "sliding_window": 14, **_TOKENS})
_family("Starcoder2 without positions", "Starcoder2ForCausalLM", {**_LLAMA, **_TOKENS}, inputs=language)
_family("CodeGen", "CodeGenForCausalLM", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_ctx": 64, "rotary_dim": 4, "vocab_size": 37, "resid_pdrop": 0.0,
                                          "embd_pdrop": 0.0, "attn_pdrop": 0.0, **_TOKENS})
_family("GPT-BigCode", "GPTBigCodeForCausalLM", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 37, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
                                                "attn_pdrop": 0.0, "multi_query": True, **_TOKENS})
_family("GLM", "GlmForCausalLM", {**_LLAMA, "head_dim": 8, **_TOKENS})
_family("GPT-OSS", "GptOssForCausalLM", {**_LLAMA, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 14, "experts_implementation": "eager"})
_family("DeepSeek-V3", "DeepseekV3ForCausalLM", {**_PLAIN, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
                                                 "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 20,
                                                 "first_k_dense_replace": 1, "experts_implementation": "eager"})
_family("DeepSeek-V3 dense", "DeepseekV3ForCausalLM", {**_PLAIN, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
                                                       "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
                                                       "first_k_dense_replace": 2})
_family("Qwen2 with experts", "Qwen2MoeForCausalLM", {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
                                                      "shared_expert_intermediate_size": 20, "experts_implementation": "eager", "output_router_logits": True})
_family("OLMoE", "OlmoeForCausalLM", {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"})
_family("Cohere 2", "Cohere2ForCausalLM", {**_LLAMA, "sliding_window": 14, **_TOKENS})
_family("SmolLM3", "SmolLM3ForCausalLM", {**_LLAMA, **_TOKENS})
_family("Nemotron", "NemotronForCausalLM", {**_LLAMA, **_TOKENS})
_family("Helium", "HeliumForCausalLM", {**_LLAMA, "head_dim": 8})
_family("Persimmon", "PersimmonForCausalLM", {**_PLAIN, **_TOKENS})
_family("BioGPT", "BioGptForCausalLM", {**_PLAIN, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layerdrop": 0.0, **_TOKENS}, inputs=padded)
_family("XGLM", "XGLMForCausalLM", {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 44, "vocab_size": 37, "max_position_embeddings": 64, "dropout": 0.0,
                                    "attention_dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0})
_family("XLNet", "XLNetLMHeadModel", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 44, "vocab_size": 37, "dropout": 0.0}, inputs=language)
_family("FNet", "FNetForMaskedLM", {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 44, "vocab_size": 37, "hidden_dropout_prob": 0.0,
                                    "use_tpu_fourier_optimizations": False}, inputs=language)
_family("ConvBERT", "ConvBertForMaskedLM", {**_BERT, "embedding_size": 32}, inputs=padded)
_family("Longformer", "LongformerForMaskedLM", {**_BERT, "attention_window": 8, **_TOKENS}, inputs=padded)
_family("BigBird", "BigBirdForMaskedLM", {**_BERT, "attention_type": "original_full", **_TOKENS}, inputs=padded)
_family("Funnel", "FunnelForMaskedLM", {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 44, "block_sizes": [1, 1], "vocab_size": 37, "hidden_dropout": 0.0,
                                        "attention_dropout": 0.0}, inputs=padded)
_family("SqueezeBERT", "SqueezeBertForMaskedLM", {**_BERT, "embedding_size": 32}, inputs=padded)

_family("YOSO", "YosoForMaskedLM", {**_BERT, "use_expectation": True}, inputs=padded)
_family("Mamba 2", "Mamba2ForCausalLM", {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 1, "num_hidden_layers": 1, "vocab_size": 37, "state_size": 4, "chunk_size": 4},
        inputs=language)
_family("RecurrentGemma", "RecurrentGemmaForCausalLM", {**_LLAMA, "lru_width": 32, "attention_window_size": 14, "block_types": ["recurrent", "attention"]})
_family("Jamba", "JambaForCausalLM", {**_LLAMA, "num_experts": 2, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4})


def _classified(labels):
    return lambda m, cut, step: m(**cut(**padded_ids(step)), labels=labels).loss


def padded_ids(step):
    whole = with_positions(padded)(step)
    whole.pop("labels")
    whole["input_ids"] = whole["input_ids"] * whole["attention_mask"]
    return whole


def _asked(m, cut, step):
    part = cut(input_ids=tokens(step), attention_mask=padding(step), token_type_ids=torch.zeros(BATCH, LENGTH).long())
    return m(**part, start_positions=torch.tensor([2, 15, 20]), end_positions=torch.tensor([4, 17, 13])).loss


_family("Llama to classify samples", "LlamaForSequenceClassification", {**_LLAMA, "num_labels": 3}, step_of=_classified(torch.tensor([0, 2, 1])), stage=1)
_family("GPT-2 to classify samples", "GPT2ForSequenceClassification", {**_GPT2, "num_labels": 3, "pad_token_id": 0}, step_of=_classified(torch.tensor([0, 2, 1])))
_family("Qwen2 to regress samples", "Qwen2ForSequenceClassification", {**_LLAMA, "num_labels": 1}, step_of=_classified(torch.tensor([0.1, 2.0, -1.0])))
_family("BERT to classify samples", "BertForSequenceClassification", {**_BERT, "num_labels": 3}, step_of=_classified(torch.tensor([0, 2, 1])), on_four=True)
_family("Llama to label 24 classes", "LlamaForSequenceClassification", {**_LLAMA, "num_labels": 24, "problem_type": "multi_label_classification"},
        step_of=lambda m, cut, step: m(**cut(**padded_ids(step)), labels=(floats(step, BATCH, 24) > 0).float()).loss)
_family("Llama to label 24 classes, nothing cut", "LlamaForSequenceClassification", {**_LLAMA, "num_labels": 24, "problem_type": "multi_label_classification"},
        step_of=lambda m, cut, step: m(**padded_ids(step), labels=(floats(step, BATCH, 24) > 0).float()).loss)
_family("Llama to label 3 classes, nothing cut", "LlamaForSequenceClassification", {**_LLAMA, "num_labels": 3},
        step_of=lambda m, cut, step: m(**padded_ids(step), labels=torch.tensor([0, 2, 1])).loss)
_family("BERT to answer questions", "BertForQuestionAnswering", _BERT, step_of=_asked)
_family("BERT to answer questions, nothing cut", "BertForQuestionAnswering", _BERT, step_of=lambda m, cut, step: m(
    input_ids=tokens(step), attention_mask=padding(step), start_positions=torch.tensor([2, 15, 20]), end_positions=torch.tensor([4, 17, 13])).loss)
_family("Llama to answer questions", "LlamaForQuestionAnswering", _LLAMA, step_of=lambda m, cut, step: m(
    **cut(input_ids=tokens(step)), start_positions=torch.tensor([2, 15, 20]), end_positions=torch.tensor([4, 17, 13])).loss)
_family("BERT for pretraining", "BertForPreTraining", _BERT, step_of=lambda m, cut, step: m(
    **cut(**{**padded_ids(step), "labels": tokens(step)}), next_sentence_label=torch.tensor([0, 1, 1])).loss)
_family("ELECTRA's discriminator", "ElectraForPreTraining", {**_BERT, "embedding_size": 16}, step_of=lambda m, cut, step: m(
    **cut(**{**padded_ids(step), "labels": (tokens(step) % 2)})).loss)
_family("GPT-2 with two heads", "GPT2DoubleHeadsModel", _GPT2, step_of=lambda m, cut, step: m(**cut(**language(step)), mc_token_ids=torch.tensor([3, 20, 23])).loss)
_family("GPT-2 with uncut labels", "GPT2LMHeadModel", _GPT2, step_of=lambda m, cut, step: m(**cut(input_ids=tokens(step)), labels=tokens(step)).loss)
_VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 44, "image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0.0,
           "attention_probs_dropout_prob": 0.0}
_family("ViT of uncut images", "ViTForImageClassification", {**_VISION, "num_labels": 3},
        step_of=lambda m, cut, step: m(floats(step, 2, 3, 16, 16), labels=torch.tensor([0, 1])).loss)
_family("ViT of images cut along rows", "ViTForImageClassification", {**_VISION, "num_labels": 3},
        step_of=lambda m, cut, step: m(cut(input_ids=floats(step, 2, 3, 16, 16), dim=2)["input_ids"], labels=torch.tensor([0, 1])).loss)
_WHISPER = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 44, "decoder_ffn_dim": 44,
            "vocab_size": 37, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 64, "dropout": 0.0, "pad_token_id": 0, "decoder_start_token_id": 1, **_TOKENS}
_family("Whisper of uncut sounds", "WhisperForConditionalGeneration", _WHISPER, step_of=lambda m, cut, step: loss_of(m(
    input_features=floats(step, BATCH, 8, 24), decoder_input_ids=(ids := cut(input_ids=tokens(step))["input_ids"])).logits, ids))
_family("Whisper that shifts its cut labels", "WhisperForConditionalGeneration", _WHISPER, step_of=lambda m, cut, step: m(
    input_features=floats(step, BATCH, 8, 24), labels=cut(input_ids=tokens(step))["input_ids"]).loss)
_BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 44, "decoder_ffn_dim": 44,
         "vocab_size": 37, "max_position_embeddings": 64, "dropout": 0.0, "pad_token_id": 0, "decoder_start_token_id": 2, **_TOKENS}
for _kind in ("Pegasus", "Marian", "MBart", "M2M100", "Blenderbot"):
    _family(f"{_kind}, both sides cut", f"{_kind}{'MTModel' if _kind == 'Marian' else 'ForConditionalGeneration'}", _BART, step_of=lambda m, cut, step: m(
        **cut(input_ids=tokens(step), attention_mask=padding(step), labels=tokens(step, salt=3))).loss)
_family("BART with dropped layers", "BartForConditionalGeneration", {**_BART, "encoder_layers": 4, "encoder_layerdrop": 0.5}, step_of=lambda m, cut, step: (
    m(**cut(input_ids=tokens(step)), decoder_input_ids=tokens(step)[:, :3]).logits * 0.0).mean() + m.lm_head.weight.square().mean())
_CLIP = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 44, "vocab_size": 37, "max_position_embeddings": 64, "projection_dim": 16,
         "bos_token_id": 1, "eos_token_id": 36}
_family("CLIP's text model", "CLIPTextModelWithProjection", _CLIP, step_of=lambda m, cut, step: m(**cut(input_ids=tokens(step))).text_embeds.square().mean())
_family("CLIP's text model with position_ids and padding", "CLIPTextModelWithProjection", _CLIP, step_of=lambda m, cut, step: m(**cut(**padded_ids(step))).text_embeds.square().mean())
_family("XLM-RoBERTa", "XLMRobertaForMaskedLM", {**_BERT, "type_vocab_size": 1, "pad_token_id": 1}, inputs=padded)
_family("GPT-NeoX of length as wide", "GPTNeoXForCausalLM", {**_PLAIN, "hidden_size": 24, "num_attention_heads": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0})
_family("Llama whose part is its width", "LlamaForCausalLM", {**_LLAMA, "hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 24, "vocab_size": 37})
_family("Llama of 2 tokens each at stage 3", "LlamaForCausalLM", _LLAMA, inputs=with_positions(lambda step: language(step, length=4)), stage=3)
_family("Llama nothing cut", "LlamaForCausalLM", _LLAMA, step_of=lambda m, cut, step: m(**padded(step)).loss, expected=RIGHT, ring=EITHER)
_family("BERT nothing cut", "BertForMaskedLM", _BERT, step_of=lambda m, cut, step: m(**padded(step)).loss, expected=RIGHT, ring=EITHER)


# ---------------------------------------------------------------- second round: what the first one found, made small
@row(EITHER, placed, on_four=True)
def adv2_a_window_of_five_by_positions(m, input_ids, labels, position_ids):
    ahead = position_ids[:, :, None] - position_ids[:, None, :]
    return loss_of(logits(m, input_ids, attn_mask=((ahead >= 0) & (ahead < 5))[:, None]), labels)


@row(EITHER, placed, on_four=True)
def adv2_a_window_of_five_as_floats(m, input_ids, labels, position_ids):
    ahead = position_ids[:, :, None] - position_ids[:, None, :]
    bias = torch.zeros_like(ahead, dtype=torch.float32).masked_fill((ahead < 0) | (ahead >= 5), float("-inf"))
    return loss_of(logits(m, input_ids, attn_mask=bias[:, None]), labels)


@row(EITHER, lambda step: {**language(step), "attention_mask": (torch.arange(LENGTH)[None] < torch.tensor([24, 7, 20])[:, None]).long()}, on_four=True)
def adv2_a_sample_that_ends_in_the_first_part(m, input_ids, labels, attention_mask):
    return loss_of(logits(m, input_ids, attn_mask=attention_mask[:, None, None, :].bool()), labels)


@row(EITHER, lambda step: {**language(step), "attention_mask": (torch.arange(LENGTH)[None] >= torch.tensor([0, 14, 5])[:, None]).long()}, on_four=True)
def adv2_a_sample_padded_on_the_left_beyond_a_part(m, input_ids, labels, attention_mask):
    return loss_of(logits(m, input_ids, attn_mask=attention_mask[:, None, None, :].bool()), labels)


@row(EITHER, modules={"mix": lambda: torch.randn(HEADS, HEADS)})
def adv2_queries_mixed_over_heads(m, input_ids, labels):
    q, k, v = (heads(part) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    q = torch.einsum("bhsd,hg->bgsd", q, m.mix)
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v)))), labels)


@row(EITHER, modules={"mix": lambda: torch.randn(HEADS, HEADS)})
def adv2_queries_mixed_over_heads_causal(m, input_ids, labels):
    q, k, v = (heads(part) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    q = torch.einsum("bhsd,hg->bgsd", q, m.mix)
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v, is_causal=True)))), labels)


@row(EITHER, modules={"mix": lambda: torch.randn(HEADS, HEADS)})
def adv2_values_mixed_over_heads(m, input_ids, labels):
    q, k, v = (heads(part) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    v = torch.einsum("bhsd,hg->bgsd", v, m.mix)
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v, is_causal=True)))), labels)


@row(EITHER, modules={"mix": lambda: torch.randn(HEADS, HEADS)})
def adv2_results_mixed_over_heads(m, input_ids, labels):
    q, k, v = (heads(part) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return loss_of(m.head(m.out(joined(torch.einsum("bhsd,gh->bgsd", y, m.mix)))), labels)


@row(EITHER)
def adv2_queries_with_features_before_tokens(m, input_ids, labels):
    q, k, v = (heads(part).transpose(2, 3).contiguous().transpose(2, 3) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v, is_causal=True)))), labels)


@row(EITHER)
def adv2_queries_with_heads_last(m, input_ids, labels):
    q, k, v = (part.unflatten(-1, (5, 4)).permute(0, 3, 1, 2) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return loss_of(m.head(m.out(joined(y))), labels)


@row(EITHER)
def adv2_large_queries(m, input_ids, labels):
    q, k, v = (heads(part) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q * 60, k, v, is_causal=True)))), labels)


@row(EITHER, tolerance=2e-3)
def adv2_very_large_queries_of_all_tokens(m, input_ids, labels):
    q, k, v = (heads(part) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q * 400, k, v)))), labels)


@row(EITHER)
def adv2_vmapped_sum_of_samples(m, input_ids, labels):
    return torch.func.vmap(lambda one: one.square().sum())(hidden(m, input_ids)).mean() / 100


@row(EITHER)
def adv2_vmapped_mean_over_tokens(m, input_ids, labels):
    return m.classes(torch.func.vmap(lambda one: one.mean(0))(hidden(m, input_ids))).square().mean()


@row(EITHER)
def adv2_vmapped_attention(m, input_ids, labels):
    x = m.embed(input_ids)
    def of_one(one):
        q, k, v = (part.unflatten(-1, (HEADS, 5)).transpose(0, 1) for part in m.qkv(one).chunk(3, -1))
        return m.out(functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))
    return loss_of(m.head(torch.func.vmap(of_one)(x)), labels)


@row(EITHER)
def adv2_func_grad_of_a_sample_loss(m, input_ids, labels):
    h = hidden(m, input_ids)
    g = torch.func.grad(lambda y: m.score(y).square().mean())(h)
    return loss_of(m.head(h - g), labels)


@row(EITHER)
def adv2_func_vmap_of_grad(m, input_ids, labels):
    h = hidden(m, input_ids)
    g = torch.func.vmap(torch.func.grad(lambda y: m.score(y).square().sum()))(h)
    return loss_of(m.head(h - g), labels)


class _SumThenRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.square().sum().sqrt()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, d):
        x, y = ctx.saved_tensors
        return d * x / y


@row(EITHER)
def adv2_a_norm_with_a_backward_of_ones_own(m, input_ids, labels):
    return _SumThenRoot.apply(hidden(m, input_ids)) / 10


class _Entropy(torch.autograd.Function):
    """A mean of all tokens' entropies, with its gradient by hand."""

    @staticmethod
    def forward(ctx, x):
        p = x.softmax(-1)
        each = -(p * p.log()).sum(-1)
        ctx.save_for_backward(p, each)
        return each.mean()

    @staticmethod
    def backward(ctx, d):
        p, each = ctx.saved_tensors
        return -d * p * (p.log() + each[..., None]) / each.numel()


@row(EITHER)
def adv2_an_entropy_with_a_backward_of_ones_own(m, input_ids, labels):
    return _Entropy.apply(m.classes(hidden(m, input_ids)))


@row(EITHER, padded)
def adv2_pads_cut_off_by_the_longest_sample(m, input_ids, labels, attention_mask):
    n = int(attention_mask.sum(1).max()) - 4
    h = hidden(m, input_ids)
    return m.classes(h[:, :n]).square().mean()


@row(EITHER, padded)
def adv2_the_first_real_token_of_one_sample(m, input_ids, labels, attention_mask):
    h = hidden(m, input_ids)
    n = int(attention_mask[1].sum())
    return m.classes(h[1, :n]).square().mean() + m.classes(h[1, n - 1]).square().mean()


@row(EITHER)
def adv2_one_sample_s_first_seven_tokens(m, input_ids, labels):
    return m.classes(hidden(m, input_ids)[1, :7]).square().mean()


@row(EITHER)
def adv2_one_sample_s_first_fifteen_tokens(m, input_ids, labels):
    return m.classes(hidden(m, input_ids)[1, :15].mean(0)).square().mean()


@row(EITHER)
def adv2_one_sample_s_tokens_from_the_fifth_on(m, input_ids, labels):
    return m.classes(hidden(m, input_ids)[1][4:].mean(0)).square().mean()


@row(EITHER)
def adv2_all_samples_first_fifteen_tokens_pooled(m, input_ids, labels):
    return m.classes(hidden(m, input_ids)[:, :15].mean(1)).square().mean()


@row(EITHER)
def adv2_tokens_from_the_fifth_on_pooled(m, input_ids, labels):
    return m.classes(hidden(m, input_ids)[:, 4:].sum(1)).square().mean()


@row(EITHER)
def adv2_rows_of_eight_tokens_of_merged(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(h.reshape(-1, 18, HIDDEN).mean(1)).square().mean()


@row(EITHER)
def adv2_windows_of_twelve_attend(m, input_ids, labels):
    w = m.embed(input_ids).unflatten(1, (-1, 12)).flatten(0, 1)
    return loss_of(m.head((w + attend(m, w)).view(*input_ids.shape, -1)), labels)


@row(EITHER)
def adv2_losses_of_windows_of_twelve(m, input_ids, labels):
    losses = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), input_ids, reduction="none")
    return losses.view(-1, 12).mean(1).max() + losses.view(-1, 12).mean(1).square().mean()


@row(EITHER)
def adv2_logarithm_of_the_sum_over_the_length(m, input_ids, labels):
    h = hidden(m, input_ids)
    return h.exp().sum(1).log().sub(math.log(h.shape[1])).mean()


@row(EITHER)
def adv2_a_number_added_by_the_length(m, input_ids, labels):
    losses = loss_of(logits(m, input_ids), input_ids, reduction="sum")
    return losses * 0.01 + hidden(m, input_ids).sum() * (1 / (2 * input_ids.shape[1] + 1))


@row(EITHER)
def adv2_a_mean_back_to_a_sum_by_numel(m, input_ids, labels):
    return loss_of(logits(m, input_ids), input_ids) * input_ids.numel() / 50


@row(EITHER)
def adv2_selected_divided_by_size_zero(m, input_ids, labels):
    picked = logits(m, input_ids)[labels != -100]
    target = labels[labels != -100]
    return functional.cross_entropy(picked, target, reduction="sum") / target.size(0)


@row(EITHER)
def adv2_selected_divided_by_numel_of_labels(m, input_ids, labels):
    target = labels[labels > 0]
    return loss_of(logits(m, input_ids), labels, reduction="sum") / target.numel()


@row(EITHER)
def adv2_number_of_selected_labels(m, input_ids, labels):
    return loss_of(logits(m, input_ids), labels), {"targets": len(labels[labels > 0]), "numel": labels[labels > 0].numel()}


@row(EITHER)
def adv2_number_of_predictions(m, input_ids, labels):
    scores = logits(m, input_ids)
    guess = scores.argmax(-1)
    return loss_of(scores, labels), {"share": (guess == input_ids).sum().item() / guess.numel()}


@row(EITHER)
def adv2_share_by_the_shape(m, input_ids, labels):
    scores = logits(m, input_ids)
    b, s = input_ids.shape
    return loss_of(scores, labels), {"share": (scores.argmax(-1) == input_ids).sum().item() / (b * s)}


# ---------------------------------------------------------------- third round
@row(EITHER)
def adv3_loss_of_the_first_fifteen_tokens(m, input_ids, labels):
    return loss_of(logits(m, input_ids)[:, :15], input_ids[:, :15])


@row(EITHER)
def adv3_losses_of_the_first_fifteen_tokens(m, input_ids, labels):
    losses = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), input_ids, reduction="none")
    return losses[:, :15].mean()


@row(EITHER)
def adv3_losses_of_the_first_twelve_tokens(m, input_ids, labels):
    losses = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), input_ids, reduction="none")
    return losses[:, :12].sum() / 36.5


@row(EITHER)
def adv3_ids_of_the_first_fifteen_tokens(m, input_ids, labels):
    return loss_of(logits(m, input_ids[:, :15]), input_ids[:, :15])


@row(EITHER)
def adv3_a_sample_truncated_to_512(m, input_ids, labels):
    return loss_of(logits(m, input_ids[:, :20]), labels[:, :20])


@row(EITHER)
def adv3_the_first_of_a_split_of_fifteen(m, input_ids, labels):
    return m.classes(hidden(m, input_ids).split(15, 1)[0].mean(1)).square().mean()


@row(EITHER)
def adv3_narrowed_to_twelve(m, input_ids, labels):
    return m.classes(hidden(m, input_ids).narrow(1, 0, 12).mean(1)).square().mean()


@row(EITHER)
def adv3_all_but_the_last_fifteen(m, input_ids, labels):
    return m.classes(hidden(m, input_ids)[:, :-15].sum(1)).square().mean()


@row(EITHER)
def adv3_the_last_twenty_tokens(m, input_ids, labels):
    return m.classes(hidden(m, input_ids)[:, -20:].mean(1)).square().mean()


@row(EITHER)
def adv3_labels_from_minus_twenty_on(m, input_ids, labels):
    return loss_of(logits(m, input_ids)[:, -20:], input_ids[:, -20:])


@row(EITHER)
def adv3_the_first_fifteen_ids_marked(m, input_ids, labels):
    labels = input_ids.clone()
    labels[:, :15] = -100
    return loss_of(logits(m, input_ids), labels)


@row(EITHER)
def adv3_the_first_fifteen_tokens_zeroed(m, input_ids, labels):
    x = m.embed(input_ids).clone()
    x[:, :15] = 0.0
    return loss_of(m.head(x + attend(m, x)), labels)


@row(EITHER)
def adv3_a_softmax_of_scores_padded_with_fifteen(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(torch.cat([h[0, :15].sum(0, keepdim=True), h[1, :20].sum(0, keepdim=True)])).square().mean()


@row(EITHER, padded)
def adv3_binary_losses_of_selected_floats(m, input_ids, labels, attention_mask):
    scores = m.score(hidden(m, input_ids))[..., 0]
    kept = attention_mask == 1
    return functional.binary_cross_entropy_with_logits(scores[kept], (input_ids % 2)[kept].float())


@row(EITHER, padded)
def adv3_binary_losses_of_selected_floats_of_a_view(m, input_ids, labels, attention_mask):
    scores = m.score(hidden(m, input_ids)).squeeze(-1)
    kept = attention_mask.view(-1, scores.shape[1]) == 1
    return functional.binary_cross_entropy_with_logits(scores.view(-1, scores.shape[1])[kept], (input_ids % 2)[kept].float())


@row(EITHER, padded)
def adv3_mean_squares_of_selected_whole_floats(m, input_ids, labels, attention_mask):
    scores = m.score(hidden(m, input_ids)).squeeze(-1)
    kept = attention_mask.bool()
    return (scores[kept] - input_ids.float()[kept] / 37).square().mean()


@row(EITHER, padded)
def adv3_mask_viewed_by_the_length(m, input_ids, labels, attention_mask):
    losses = loss_of(logits(m, input_ids), input_ids, reduction="none").view(-1, input_ids.shape[1])
    return (losses * attention_mask.view(-1, input_ids.shape[1])).sum() / attention_mask.sum()


@row(EITHER)
def adv3_ids_viewed_in_rows_of_twelve(m, input_ids, labels):
    rows = input_ids.view(-1, 12)
    return loss_of(m.head(hidden(m, rows)), rows)


@row(EITHER)
def adv3_ids_reshaped_to_rows_of_eight(m, input_ids, labels):
    rows = input_ids.reshape(-1, 4)
    return loss_of(m.head(hidden(m, rows)), rows)


@row(EITHER, padded)
def adv3_ids_repacked_without_pads(m, input_ids, labels, attention_mask):
    flat = input_ids[attention_mask.bool()][None]
    return loss_of(m.head(hidden(m, flat)), flat)


@row(EITHER)
def adv3_vmapped_cosine_of_samples(m, input_ids, labels):
    h = hidden(m, input_ids)
    return torch.vmap(lambda a: a.sum(0))(h).square().mean() * 0.01


@row(EITHER)
def adv3_per_sample_losses_by_vmap_of_means(m, input_ids, labels):
    scores = logits(m, input_ids)
    return torch.vmap(lambda s, t: functional.cross_entropy(s, t))(scores, input_ids).max()


@row(EITHER)
def adv3_vmapped_softmax_over_tokens(m, input_ids, labels):
    s = m.score(hidden(m, input_ids))[..., 0]
    w = torch.vmap(lambda one: one.softmax(0))(s)
    return (w * s).mean()


@row(EITHER)
def adv3_vmapped_cumsum(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(torch.vmap(lambda one: one.cumsum(0))(x)), labels)


@row(EITHER)
def adv3_jvp_of_a_token_function(m, input_ids, labels):
    x = m.embed(input_ids)
    y, t = torch.func.jvp(lambda a: torch.tanh(m.out(a)), (x,), (torch.ones_like(x),))
    return loss_of(m.head(y + t), labels)


class _MaskedMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, losses, mask):
        ctx.save_for_backward(mask)
        return (losses * mask).sum() / mask.sum()

    @staticmethod
    def backward(ctx, d):
        mask, = ctx.saved_tensors
        return d * mask / mask.sum(), None


@row(EITHER)
def adv3_a_masked_mean_with_a_backward_of_ones_own(m, input_ids, labels):
    losses = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), labels, reduction="none")
    return _MaskedMean.apply(losses, (labels != -100).float())


class _ZLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores):
        lse = scores.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(scores, lse)
        return lse.square().mean()

    @staticmethod
    def backward(ctx, d):
        scores, lse = ctx.saved_tensors
        return d * 2 * lse * (scores - lse).exp() / (scores.shape[0] * scores.shape[1])


@row(EITHER)
def adv3_a_z_loss_with_a_backward_of_ones_own(m, input_ids, labels):
    return _ZLoss.apply(logits(m, input_ids))


class _PooledSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.like = x
        return x.sum(1)

    @staticmethod
    def backward(ctx, d):
        return d[:, None].expand_as(ctx.like)


@row(EITHER)
def adv3_a_sum_over_tokens_with_a_backward_of_ones_own(m, input_ids, labels):
    return m.classes(_PooledSum.apply(hidden(m, input_ids))).square().mean()


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d):
        return -0.5 * d


@row(RIGHT)
def adv3_a_gradient_reversed_of_pooled_tokens(m, input_ids, labels):
    return m.classes(_Reverse.apply(hidden(m, input_ids).mean(1))).square().mean() + m.score(_Reverse.apply(hidden(m, input_ids))).mean()


@row(EITHER)
def adv3_gradients_of_inputs_multiplied_by_a_hook_of_the_sum(m, input_ids, labels):
    total = hidden(m, input_ids).mean(1)
    if total.requires_grad:
        total.register_hook(lambda g: g * 0.5)
    return m.classes(total).square().mean()


_family("CLIP's text model with position_ids", "CLIPTextModelWithProjection", _CLIP, step_of=lambda m, cut, step: m(
    **cut(input_ids=tokens(step), position_ids=torch.arange(LENGTH).expand(BATCH, -1).contiguous())).text_embeds.square().mean())
_QA = lambda m, cut, step: m(**cut(input_ids=tokens(step), attention_mask=padding(step), token_type_ids=torch.zeros(BATCH, LENGTH).long(),
                                   position_ids=torch.arange(LENGTH).expand(BATCH, -1).contiguous()),
                             start_positions=torch.tensor([2, 15, 20]), end_positions=torch.tensor([4, 17, 13])).loss
_family("BERT to answer questions with all inputs", "BertForQuestionAnswering", _BERT, step_of=_QA)
_typed = lambda step: {**with_positions(padded)(step), "token_type_ids": torch.zeros(BATCH, LENGTH).long()}
for _name in ("BigBird", "Yoso", "SqueezeBert", "ConvBert", "FNet"):
    _config = {**_BERT, "embedding_size": 32, **({"attention_type": "original_full", **_TOKENS} if _name == "BigBird" else {"use_expectation": True} if _name == "Yoso" else {})}
    _family(f"{_name} with all inputs", f"{_name}ForMaskedLM", _config, inputs=(lambda step: {k: v for k, v in _typed(step).items() if k != "attention_mask"}) if _name == "FNet" else _typed)
_family("GPT-2 with two heads and position_ids", "GPT2DoubleHeadsModel", _GPT2, step_of=lambda m, cut, step: m(**cut(**placed(step)), mc_token_ids=torch.tensor([3, 20, 23])).loss)
_family("GPT-2 with uncut labels and position_ids", "GPT2LMHeadModel", _GPT2, step_of=lambda m, cut, step: m(
    **cut(input_ids=tokens(step), position_ids=torch.arange(LENGTH).expand(BATCH, -1).contiguous()), labels=tokens(step)).loss)
_family("Whisper of uncut sounds of another length", "WhisperForConditionalGeneration", {**_WHISPER, "max_source_positions": 9}, step_of=lambda m, cut, step: loss_of(m(
    input_features=floats(step, BATCH, 8, 18), decoder_input_ids=(part := cut(input_ids=tokens(step), position_ids=torch.arange(LENGTH).expand(BATCH, -1).contiguous()))["input_ids"],
    decoder_position_ids=part["position_ids"]).logits, part["input_ids"]))
_family("Mistral in a window smaller than a part", "MistralForCausalLM", {**_LLAMA, "sliding_window": 5}, on_four=True)


# ---------------------------------------------------------------- fixes that refusals advise
@row(EITHER, padded)
def adv4_fix_a_middle_token_by_whole_lengths(m, input_ids, labels, attention_mask):
    h = hidden(m, input_ids)
    return m.classes(h[torch.arange(BATCH), attention_mask.sum(1) // 2]).square().mean()


@row(EITHER, lambda step: {**padded(step), "whole_places": torch.tensor([3, 20, 11])})
def adv4_fix_given_places_plus_nothing_of_a_whole(m, input_ids, labels, attention_mask, whole_places):
    h = hidden(m, input_ids)
    return m.classes(h[torch.arange(BATCH), whole_places + 0 * attention_mask.sum(1)]).square().mean()


@row(EITHER, placed)
def adv4_fix_sinusoids_of_given_positions_where_features_are_as_many_as_the_part(m, input_ids, labels, position_ids):
    features = torch.arange(HIDDEN)
    x = m.embed(input_ids) + torch.sin(position_ids[..., None] / 10 ** (features / HIDDEN))
    return loss_of(m.head(x), labels)


@row(EITHER, placed)
def adv4_fix_weights_by_given_positions(m, input_ids, labels, position_ids):
    losses = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), input_ids, reduction="none")
    return (losses * (1 + 0.1 * position_ids)).sum() / 50


@row(EITHER, placed)
def adv4_fix_a_mask_of_the_first_fifteen(m, input_ids, labels, position_ids):
    return loss_of(logits(m, input_ids), input_ids.masked_fill(position_ids >= 15, -100))


@row(EITHER)
def adv4_fix_heads_last_made_contiguous(m, input_ids, labels):
    q, k, v = (part.unflatten(-1, (5, 4)).permute(0, 3, 1, 2).contiguous() for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v, is_causal=True)))), labels)


@row(EITHER)
def adv4_keys_alone_with_features_before_tokens(m, input_ids, labels):
    q, k, v = (heads(part) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    k = k.transpose(2, 3).contiguous().transpose(2, 3)
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v)))), labels)


@row(EITHER)
def adv4_queries_of_heads_before_samples(m, input_ids, labels):
    q, k, v = (heads(part).transpose(0, 1).contiguous().transpose(0, 1) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v)))), labels)


@row(EITHER)
def adv4_means_for_a_share_of_predictions(m, input_ids, labels):
    scores = logits(m, input_ids)
    return loss_of(scores, labels), {"share": (scores.argmax(-1) == input_ids).float().mean()}


@sized(EITHER, S=12, D=8, H=2)
def adv5_sinusoids_where_no_sizes_are_equal(m, input_ids, labels):
    x = m.embed(input_ids)
    places, features = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[2])[None, :]
    x = x + torch.sin(places / 10 ** (features / x.shape[2]))
    return loss_of(m.head(x + sattend(m, x, is_causal=True)), labels)


@row(EITHER, padded)
def adv5_cross_entropy_of_selected_tokens(m, input_ids, labels, attention_mask):
    kept = attention_mask == 1
    return functional.cross_entropy(logits(m, input_ids)[kept], input_ids[kept])


@row(EITHER, modules={"latents": lambda: torch.randn(9, HIDDEN)})
def adv5_latents_of_another_number_attend_and_are_attended(m, input_ids, labels):
    x = m.embed(input_ids)
    k = v = heads(m.latents.expand(BATCH, -1, -1))
    return loss_of(m.head(x + joined(functional.scaled_dot_product_attention(heads(x), k, v))), labels)
