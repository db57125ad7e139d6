"""Sizes that coincide with a length or a part's, and sequences of few tokens."""
import torch
from torch.nn import functional

from .table import (BATCH, HIDDEN, LENGTH, REFUSED, RIGHT, VOCABULARY, attend, floats, heads, hidden, joined, language, loss_of, placed, program, row,
                    sized, tokens, with_positions)


sized(RIGHT, length=24, width=24, head_count=4, name="length is hidden size")(
    lambda m, input_ids, labels: loss_of(m.head(hidden(m, input_ids)), labels))


# three heads are too few for four ranks of Ulysses
sized(RIGHT, length=24, width=12, head_count=3, stage=1, on_four=False, name="part is hidden size")(
    lambda m, input_ids, labels: loss_of(m.head(hidden(m, input_ids)), labels))

sized(RIGHT, length=8, width=16, head_count=4, batch=4, on_four=True, name="part is batch and heads and head size")(
    lambda m, input_ids, labels: loss_of(m.head(hidden(m, input_ids)), labels))
sized(RIGHT, length=12, width=12, head_count=12, vocabulary=12, batch=6, name="everything is the length")(
    lambda m, input_ids, labels: loss_of(m.head(hidden(m, input_ids)), input_ids))
sized(RIGHT, length=12, width=6, head_count=6, vocabulary=6, batch=6, stage=2, name="everything is the part")(
    lambda m, input_ids, labels: loss_of(m.head(hidden(m, input_ids)), input_ids))


@sized(RIGHT, length=16, width=8, head_count=8, batch=8, vocabulary=8, stage=3)
def tokens_first_of_equal_sizes(m, input_ids, labels):
    x = m.embed(input_ids).transpose(0, 1).contiguous()
    y = m.norm(x).transpose(0, 1)
    y = y + attend(m, y, is_causal=True)
    z = y.transpose(0, 1)
    return loss_of(m.head(z).transpose(0, 1), labels)


@sized(RIGHT, length=12, width=24, head_count=6, on_four=True)
def packed_qkv_by_a_view_where_heads_are_the_part(m, input_ids, labels):
    x = m.embed(input_ids)
    q, k, v = m.qkv(x).view(x.shape[0], x.shape[1], 3, m.head_count, -1).permute(2, 0, 3, 1, 4)
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return loss_of(m.head(m.out(y.permute(0, 2, 1, 3).reshape(x.shape))), labels)


@sized(RIGHT, length=12, width=24, head_count=6)
def attention_over_heads_of_each_token_of_as_many_heads_as_the_part(m, input_ids, labels):
    x = m.embed(input_ids)
    q, k, v = (part.view(*x.shape[:2], m.head_count, -1) for part in m.qkv(x).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v)
    return loss_of(m.head(m.out(y.flatten(2))), labels)


@sized(RIGHT, length=12, width=24, head_count=6)
def attention_over_features_of_merged_tokens(m, input_ids, labels):
    x = m.embed(input_ids)
    q, k, v = (part.reshape(-1, m.head_count, 24 // m.head_count) for part in m.qkv(x).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v)
    return loss_of(m.head(m.out(y.reshape(x.shape))), labels)


@sized(RIGHT, length=12, batch=6, width=20)
def in_batch_contrast_where_the_batch_is_the_part(m, input_ids, labels):
    h = hidden(m, input_ids)
    a, b = functional.normalize(h.mean(1), dim=-1), functional.normalize(m.embed(input_ids).mean(1), dim=-1)
    return functional.cross_entropy(a @ b.T * 5, torch.arange(a.shape[0]))


@sized(RIGHT, length=12, batch=6, width=20)
def last_tokens_by_arange_where_the_batch_is_the_part(m, input_ids, labels):
    h = hidden(m, input_ids)
    last = (input_ids > 18).long().sum(1)
    return m.head(h[torch.arange(h.shape[0]), last]).square().mean()


# on four ranks the batch is no part's length
@sized(RIGHT, length=12, batch=6, width=20, on_four=True)
def siglip_where_the_batch_is_the_part(m, input_ids, labels):
    h = hidden(m, input_ids)
    a, b = functional.normalize(h[:, 0], dim=-1), functional.normalize(h[:, -1], dim=-1)
    signs = 2 * torch.eye(a.shape[0]) - torch.ones(a.shape[0], a.shape[0])
    return -functional.logsigmoid(signs * (a @ b.T)).sum() / a.shape[0]


@sized(RIGHT, length=12, width=6, head_count=3)
def sinusoids_where_features_are_as_many_as_the_part(m, input_ids, labels):
    x = m.embed(input_ids)
    places, features = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[2])[None, :]
    x = x + torch.sin(places / 10 ** (features / x.shape[2]))
    return loss_of(m.head(x + attend(m, x, is_causal=True)), labels)


# three heads are too few for four ranks of Ulysses
@sized(RIGHT, on_four=False, length=12, width=6, head_count=3, inputs=with_positions(lambda step: language(step, length=12)))
def rotary_of_given_positions_where_features_are_as_many_as_the_part(m, input_ids, labels, position_ids):
    x = m.embed(input_ids)
    inverse = 1.0 / (10 ** (torch.arange(6).float() / 6))
    angles = position_ids[:, :, None].float() * inverse
    x = x * angles.cos() + x.roll(1, -1) * angles.sin()
    return loss_of(m.head(x + attend(m, x, is_causal=True)), labels)


# three heads are too few for four ranks of Ulysses
@sized(RIGHT, on_four=False, length=24, width=12, head_count=3, modules={"w": lambda: torch.randn(12, 12)})
def weights_made_orthogonal_of_the_part_s_size(m, input_ids, labels):
    skew = m.w.triu(1) - m.w.triu(1).T
    rotation = torch.linalg.solve(torch.eye(12) + skew, torch.eye(12) - skew)
    x = m.embed(input_ids) @ rotation
    return loss_of(m.head(x + attend(m, x)), labels)


@sized(RIGHT, length=24, width=12, head_count=3, modules={"w": lambda: torch.randn(12, 12)})
def a_masked_autoregressive_weight_of_the_part_s_size(m, input_ids, labels):
    x = functional.linear(m.embed(input_ids), m.w * torch.ones(12, 12).tril())
    return loss_of(m.head(x), labels)


# three heads are too few for four ranks of Ulysses
@sized(RIGHT, on_four=False, length=24, width=12, head_count=3, modules={"w": lambda: torch.randn(12, 12)})
def a_weight_softmaxed_of_the_part_s_size(m, input_ids, labels):
    x = m.embed(input_ids) @ m.w.softmax(0) + torch.arange(12) * 0.1
    return loss_of(m.head(x + attend(m, x)), labels)


@sized(RIGHT, length=8, width=16, head_count=4, modules={"slopes": lambda: torch.randn(4)})
def alibi_of_given_positions_where_heads_are_the_part(m, input_ids, labels):
    places = torch.ones_like(input_ids).cumsum(1) - 1
    bias = (places[:, None, None, :] - places[:, None, :, None]).abs() * -torch.pow(2.0, -torch.arange(1, m.head_count + 1))[None, :, None, None]
    return loss_of(m.head(hidden(m, input_ids, attn_mask=bias.float())), labels)


# on four ranks the memory is no longer as long as a part
@sized(RIGHT, length=24, width=24, head_count=2, modules={"memory": lambda: torch.randn(12, 24)})
def cross_attention_to_a_memory_of_the_part_s_length(m, input_ids, labels):
    x = m.embed(input_ids)
    q = heads(x, m.head_count)
    k = v = heads(m.memory.expand(x.shape[0], -1, -1), m.head_count)
    y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
    return loss_of(m.head(x + m.out(y)), labels)


@sized(RIGHT, length=24, width=24, head_count=2, modules={"latents": lambda: torch.randn(12, 24)}, on_four=False)
def a_perceiver_of_as_many_latents_as_the_part(m, input_ids, labels):
    x = m.embed(input_ids)
    z = m.latents.expand(x.shape[0], -1, -1)
    z = z + functional.scaled_dot_product_attention(heads(z, m.head_count), heads(x, m.head_count), heads(x, m.head_count)).transpose(1, 2).reshape(z.shape)
    z = z + attend(m, z)
    x = x + functional.scaled_dot_product_attention(heads(x, m.head_count), heads(z, m.head_count), heads(z, m.head_count)).transpose(1, 2).reshape(x.shape)
    return loss_of(m.head(x), labels)


# on four ranks the memory is no longer as long as a part
@sized(RIGHT, length=24, width=20, inputs=lambda step: {"input_ids": tokens(step), "whole_memory": floats(step, BATCH, 12, HIDDEN)})
def cross_attention_to_uncut_states_of_the_part_s_length(m, input_ids, whole_memory):
    x = m.embed(input_ids)
    keys = heads(whole_memory, m.head_count)
    y = joined(functional.scaled_dot_product_attention(heads(x, m.head_count), keys, keys))
    return loss_of(m.head(x + y), input_ids)


@sized(RIGHT, length=24, width=20, inputs=lambda step: {"input_ids": tokens(step), "whole_bias": floats(step, BATCH, 12, HIDDEN)})
def uncut_states_of_the_part_s_length(m, input_ids, whole_bias):
    x = m.embed(input_ids)
    x = x + whole_bias.mean(1, keepdim=True)
    return loss_of(m.head(x + attend(m, x)), input_ids) + (whole_bias @ m.head.weight.T).square().mean() * 0.01


@sized(RIGHT, length=24, width=20, inputs=lambda step: {"input_ids": tokens(step), "labels": tokens(step),
                                                         "whole_teacher": floats(step, BATCH, LENGTH, VOCABULARY)})
def uncut_teacher_logits(m, input_ids, labels, whole_teacher):
    scores = m.head(hidden(m, input_ids))
    return functional.kl_div(scores.log_softmax(-1), whole_teacher.softmax(-1), reduction="batchmean")


@sized(RIGHT, length=24, width=20, vocabulary=12)
def classes_as_many_as_the_part_in_dim_1(m, input_ids, labels):
    scores = m.head(hidden(m, input_ids)).transpose(1, 2)
    return functional.cross_entropy(scores, input_ids) + functional.nll_loss(scores.log_softmax(1), input_ids)


@sized(RIGHT, length=24, width=20, vocabulary=24)
def soft_targets_of_as_many_classes_as_tokens(m, input_ids, labels):
    scores = m.head(hidden(m, input_ids)).transpose(1, 2)
    soft = functional.one_hot(input_ids, 24).float().transpose(1, 2) * 0.9 + 0.1 / 24
    return functional.cross_entropy(scores, soft)


@sized(RIGHT, length=24, width=12, head_count=3, four=REFUSED)
def gram_of_features_where_they_are_as_many_as_the_part(m, input_ids, labels):
    h = hidden(m, input_ids)
    gram = h.transpose(1, 2) @ h
    return (gram - torch.eye(12)).square().mean()


@sized(RIGHT, length=12, width=6, head_count=3)
def each_token_attends_with_its_features(m, input_ids, labels):
    x = m.embed(input_ids)
    scores = torch.einsum("bsi,bsj->bsij", x, x).softmax(-1)
    return loss_of(m.head(torch.einsum("bsij,bsj->bsi", scores, x)), labels)


@sized(RIGHT, length=12, width=6, head_count=3)
def cross_covariance_attention_as_xcit_writes_it(m, input_ids, labels):
    x = m.embed(input_ids)
    q, k, v = (part.transpose(1, 2) for part in m.qkv(x).chunk(3, -1))
    weights = (functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).transpose(-2, -1)).softmax(-1)
    return loss_of(m.head((weights @ v).transpose(1, 2)), labels)


@sized(RIGHT, length=12, width=6, head_count=3, four=REFUSED)
def channels_attend_by_sdpa(m, input_ids, labels):
    x = m.embed(input_ids)
    q, k, v = (part.transpose(1, 2) for part in m.qkv(x).chunk(3, -1))
    return loss_of(m.head(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)), labels)


sized(REFUSED, length=2, batch=2, on_four=False, name="one token for each rank")(
    lambda m, input_ids, labels: loss_of(m.head(hidden(m, input_ids)), labels))


@sized(REFUSED, length=4, batch=1, width=4, head_count=1, on_four=True, stage=3, ring=RIGHT)
def one_sample_of_four_tokens_one_head(m, input_ids, labels):
    h = hidden(m, input_ids)
    return loss_of(m.head(h)[:, :-1], labels[:, 1:])


@sized(REFUSED, length=2, batch=2, modules={"pos": lambda: torch.randn(1, 2, HIDDEN)})
def a_table_of_two_positions_added_to_one_token(m, input_ids, labels):
    x = m.embed(input_ids) + m.pos
    return m.head(x + m.down(torch.relu(m.up(x)))).square().mean()


@sized(REFUSED, length=2, batch=2, inputs=lambda step: {"input_ids": tokens(step, batch=2, length=2), "whole_mask": torch.tensor([[1.0, 0.5], [1.0, 2.0]])})
def a_whole_mask_times_one_token(m, input_ids, whole_mask):
    losses = hidden(m, input_ids).square().sum(-1)
    return (losses * whole_mask).sum() / 4.5


@sized(RIGHT, length=4, batch=3, inputs=lambda step: {"input_ids": tokens(step, length=4), "labels": tokens(step, length=4)}, on_four=True, four=REFUSED)
def first_and_last_of_few_tokens(m, input_ids, labels):
    h = hidden(m, input_ids)
    return (h[:, 0] * h[:, -1]).mean() + h[:, -1:].square().mean() + h[:, :1].mean() + m.head(h[:, 1]).square().mean()


@sized(REFUSED, length=3, batch=2, on_four=False)
def three_tokens_on_two_ranks(m, input_ids, labels):
    h = hidden(m, input_ids)
    return loss_of(m.head(h), labels) + h.mean(1).square().mean()


# five tokens are fewer than two for each of four ranks
@sized(RIGHT, length=5, batch=2, four=REFUSED)
def five_tokens(m, input_ids, labels):
    h = hidden(m, input_ids)
    return loss_of(m.head(h), input_ids) + h[:, -1].square().mean()


sized(REFUSED, length=1, batch=2, name="one token in all")(lambda m, input_ids, labels: loss_of(m.head(hidden(m, input_ids)), labels))


@sized(RIGHT, length=8, batch=3, on_four=True)
def targets_three_tokens_on_where_parts_are_short(m, input_ids, labels):
    h = hidden(m, input_ids)
    total = 0
    for k in (1, 2, 3):
        total = total + loss_of(m.head(h)[:, :-k], input_ids[:, k:])
    return total / 3


@sized(RIGHT, length=8, batch=3, on_four=True)
def targets_three_tokens_on_by_pad(m, input_ids, labels):
    scores = m.head(hidden(m, input_ids))
    total = 0
    for k in (1, 3, 5):
        total = total + loss_of(scores, functional.pad(input_ids, (0, k), value=-100)[:, k:])
    return total


@sized(RIGHT, length=10, batch=2, on_four=True)
def a_constant_slice_longer_than_a_part(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.head(h[:, :7]).square().mean() + m.head(h[:, 7:]).mean()


@program(RIGHT, on_four=True)
def lengths_that_go_down_to_the_part(model, cut, step):
    whole = language(step, length=(24, 12)[step % 2])
    part = cut(**whole)
    return loss_of(model(part["input_ids"]), part["labels"])


@program(RIGHT, accumulation=2, stage=2, on_four=True)
def lengths_that_differ_in_each_micro_batch(model, cut, step):
    part = cut(**language(step, length=(23, 10, 17, 40)[step % 4]))
    return loss_of(model(part["input_ids"]), part["labels"])


@sized(REFUSED, length=2, batch=2)
def one_token_squeezed_where_it_is_alone(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.head(h.squeeze(1).mean(0) if h.shape[1] == 1 else h.mean((0, 1))).square().mean()


@row(RIGHT, placed)
def sinusoids_of_given_positions_where_features_are_as_many_as_the_part(m, input_ids, labels, position_ids):
    features = torch.arange(HIDDEN)
    x = m.embed(input_ids) + torch.sin(position_ids[..., None] / 10 ** (features / HIDDEN))
    return loss_of(m.head(x), labels)


@sized(RIGHT, length=12, width=8, head_count=2)
def sinusoids_where_no_sizes_are_equal(m, input_ids, labels):
    x = m.embed(input_ids)
    places, features = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[2])[None, :]
    x = x + torch.sin(places / 10 ** (features / x.shape[2]))
    return loss_of(m.head(x + attend(m, x, is_causal=True)), labels)
