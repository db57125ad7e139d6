"""Attention's masks, whole and of the length that a rank sees."""
import math

import torch
from torch.nn import functional

from .table import (BATCH, DOCUMENTED, HEADS, LENGTH, REFUSED, RIGHT, attend, floats, heads, joined, language, logits, loss_of, padded, padding,
                    program, row, with_positions)


def _masked(m, input_ids, labels, mask):
    return loss_of(logits(m, input_ids, attn_mask=mask), labels)


# --- made of the length that the model sees ---

@row(RIGHT, on_four=True)
def a_causal_mask_of_booleans(m, input_ids, labels):
    length = input_ids.shape[1]
    return _masked(m, input_ids, labels, torch.ones(length, length, dtype=torch.bool).tril())


@row(RIGHT)
def a_causal_mask_of_infinities(m, input_ids, labels):
    length = input_ids.shape[1]
    return _masked(m, input_ids, labels, torch.full((length, length), -math.inf).triu(1))


@row(RIGHT)
def a_causal_mask_by_aranges(m, input_ids, labels):
    at = torch.arange(input_ids.shape[1])
    return _masked(m, input_ids, labels, at[None, :] <= at[:, None])


@row(RIGHT, on_four=True)
def a_sliding_window_smaller_than_a_part(m, input_ids, labels):
    at = torch.arange(input_ids.shape[1])
    return _masked(m, input_ids, labels, (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - 4))


@row(RIGHT, on_four=True)
def a_sliding_window_larger_than_a_part(m, input_ids, labels):
    """A window that looks like plain causality within one part's length."""
    at = torch.arange(input_ids.shape[1])
    return _masked(m, input_ids, labels, (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - 14))


@row(DOCUMENTED)
def a_sliding_window_dropped_where_it_is_longer(m, input_ids, labels):
    """A program that leaves the mask out where it sees too few tokens for the window."""
    length, window = input_ids.shape[1], 14
    if length <= window:
        return loss_of(logits(m, input_ids, is_causal=True), labels)
    at = torch.arange(length)
    return _masked(m, input_ids, labels, (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - window))


@row(RIGHT)
def attention_in_both_directions_in_a_window(m, input_ids, labels):
    at = torch.arange(input_ids.shape[1])
    return _masked(m, input_ids, labels, (at[None, :] - at[:, None]).abs() < 5)


@row(RIGHT)
def a_chunked_mask(m, input_ids, labels):
    at = torch.arange(input_ids.shape[1])
    return _masked(m, input_ids, labels, (at[None, :] // 8 == at[:, None] // 8) & (at[None, :] <= at[:, None]))


@row(RIGHT)
def a_prefix_mask(m, input_ids, labels):
    at = torch.arange(input_ids.shape[1])
    return _masked(m, input_ids, labels, (at[None, :] <= at[:, None]) | (at[None, :] < 5))


@row(RIGHT)
def a_mask_that_sees_all(m, input_ids, labels):
    length = input_ids.shape[1]
    return _masked(m, input_ids, labels, torch.ones(length, length, dtype=torch.bool))


@row(RIGHT)
def an_additive_mask_of_zeros(m, input_ids, labels):
    length = input_ids.shape[1]
    return _masked(m, input_ids, labels, torch.zeros(length, length))


@row(RIGHT, on_four=True)
def alibi_of_the_local_length(m, input_ids, labels):
    at = torch.arange(input_ids.shape[1])
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(HEADS, 1, 1)
    bias = slopes * (at[None, :] - at[:, None]) + torch.full((len(at), len(at)), -math.inf).triu(1)
    return _masked(m, input_ids, labels, bias[None].expand(input_ids.shape[0], -1, -1, -1))


@row(RIGHT, modules={"bias": lambda: floats(0, HEADS, 64)}, ring=REFUSED)
def relative_bias_of_the_local_length(m, input_ids, labels):
    """T5's: learned numbers of distances."""
    at = torch.arange(input_ids.shape[1])
    return _masked(m, input_ids, labels, m.bias[:, (at[None, :] - at[:, None]) + 32][None])


@row(RIGHT, modules={"bias": lambda: floats(0, 1, 1, LENGTH, LENGTH)}, ring=REFUSED)
def a_learned_bias_sliced_to_the_local_length(m, input_ids, labels):
    length = input_ids.shape[1]
    return _masked(m, input_ids, labels, m.bias[:, :, :length, :length])


@row(RIGHT)
def a_causal_buffer_sliced_to_the_local_length(m, input_ids, labels):
    length = input_ids.shape[1]
    whole = torch.ones(64, 64, dtype=torch.bool).tril()[None, None]
    return _masked(m, input_ids, labels, whole[:, :, :length, :length])


row(RIGHT, inputs=padded, name="a padding mask of keys")(
    lambda m, input_ids, labels, attention_mask: _masked(m, input_ids, labels, attention_mask[:, None, None, :].bool()))


@row(RIGHT, inputs=padded, on_four=True)
def a_padding_mask_expanded_over_queries(m, input_ids, labels, attention_mask):
    mask = attention_mask[:, None, None, :].expand(-1, 1, input_ids.shape[1], -1).bool()
    return _masked(m, input_ids, labels, mask)


@row(RIGHT, inputs=padded)
def an_additive_padding_mask(m, input_ids, labels, attention_mask):
    mask = (1.0 - attention_mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
    return _masked(m, input_ids, labels, mask)


@row(RIGHT, inputs=padded, on_four=True)
def padding_and_causality_in_one_mask(m, input_ids, labels, attention_mask):
    length = input_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return _masked(m, input_ids, labels, causal[None, None] & attention_mask[:, None, None, :].bool())


@row(RIGHT, inputs=padded)
def padding_and_causality_added(m, input_ids, labels, attention_mask):
    length, least = input_ids.shape[1], torch.finfo(torch.float32).min
    causal = torch.full((length, length), least).triu(1)[None, None].expand(input_ids.shape[0], -1, -1, -1).clone()
    causal = causal.masked_fill((attention_mask == 0)[:, None, None, :], least)
    return _masked(m, input_ids, labels, causal)


@row(RIGHT, inputs=padded)
def local_queries_times_local_keys(m, input_ids, labels, attention_mask):
    """A mask that is sharded in two dims: `mask[:, :, None] * mask[:, None, :]`."""
    mask = (attention_mask[:, :, None] * attention_mask[:, None, :]).bool() | torch.eye(input_ids.shape[1], dtype=torch.bool)
    return _masked(m, input_ids, labels, mask[:, None])


@row(RIGHT, inputs=padded)
def a_window_with_padding(m, input_ids, labels, attention_mask):
    at = torch.arange(input_ids.shape[1])
    window = (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - 14)
    return _masked(m, input_ids, labels, window[None, None] & attention_mask[:, None, None, :].bool())


@row(RIGHT, inputs=padded)
def a_padding_mask_that_the_model_leaves_out_where_all_are_true(m, input_ids, labels, attention_mask):
    """transformers does so by its length alone; this one by its values."""
    if attention_mask.all():
        return loss_of(logits(m, input_ids), labels)
    return _masked(m, input_ids, labels, attention_mask[:, None, None, :].bool())


@row(RIGHT, inputs=padded)
def a_padding_mask_that_nobody_uses(m, input_ids, labels, attention_mask):
    """The batch has one, the model computes without it."""
    return loss_of(logits(m, input_ids), labels)


@row(RIGHT, inputs=with_positions(), on_four=True)
def a_mask_of_positions_that_are_cut(m, input_ids, labels, position_ids):
    """Causality by position_ids of queries and keys."""
    return _masked(m, input_ids, labels, (position_ids[:, None, :] <= position_ids[:, :, None])[:, None])


def _documents(step):
    documents = torch.tensor([[0] * 7 + [1] * 11 + [2] * 6, [0] * 15 + [1] * 9, [0] * 24])
    return {**language(step), "documents": documents}


@row(RIGHT, inputs=_documents, on_four=True)
def packed_documents_by_a_cut_tensor(m, input_ids, labels, documents):
    length = input_ids.shape[1]
    mask = (documents[:, :, None] == documents[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
    return _masked(m, input_ids, labels, mask[:, None])


row(RIGHT, inputs=_documents, name="packed documents in both directions")(
    lambda m, input_ids, labels, documents: _masked(m, input_ids, labels, (documents[:, :, None] == documents[:, None, :])[:, None]))


@row(RIGHT)
def packed_documents_by_a_separator_and_cumsum(m, input_ids, labels):
    documents = (input_ids == 7).cumsum(1)
    mask = documents[:, :, None] == documents[:, None, :]
    return _masked(m, input_ids, labels, mask[:, None])


@row(RIGHT)
def causality_by_cumsum_of_ones(m, input_ids, labels):
    at = torch.ones_like(input_ids).cumsum(-1)
    return _masked(m, input_ids, labels, (at[:, None, :] <= at[:, :, None])[:, None])


@row(RIGHT, four=REFUSED)
def a_mask_that_activations_decide(m, input_ids, labels):
    x = m.embed(input_ids)
    mask = (m.score(x) > -0.3).squeeze(-1)[:, None, None, :].expand(-1, 1, x.shape[1], -1) | torch.eye(x.shape[1], dtype=torch.bool)
    return loss_of(m.head(x + attend(m, x, attn_mask=mask)), labels)


@row(RIGHT)
def a_bias_that_activations_make(m, input_ids, labels):
    x = m.embed(input_ids)
    bias = m.score(x).squeeze(-1)[:, None, None, :].expand(-1, 1, x.shape[1], -1)
    return loss_of(m.head(x + attend(m, x, attn_mask=bias)), labels)


@row(RIGHT)
def a_forgetting_bias_by_cumsum(m, input_ids, labels):
    """Gates of each token, added up along the sequence."""
    x = m.embed(input_ids)
    run = functional.logsigmoid(m.score(x)).squeeze(-1).cumsum(1)
    bias = (run[:, :, None] - run[:, None, :])[:, None]
    return loss_of(m.head(x + attend(m, x, attn_mask=bias)), labels)


# --- of all tokens, made outside ---

def _outside(mask):
    return lambda step: {**language(step), "whole_mask": mask}


_AT = torch.arange(LENGTH)


row(RIGHT, inputs=_outside(_AT[None, :] <= _AT[:, None]), name="a whole causal mask")(
    lambda m, input_ids, labels, whole_mask: _masked(m, input_ids, labels, whole_mask))
row(RIGHT, inputs=_outside((_AT[None, :] <= _AT[:, None]) & (_AT[None, :] > _AT[:, None] - 14)), on_four=True, name="a whole window")(
    lambda m, input_ids, labels, whole_mask: _masked(m, input_ids, labels, whole_mask))
row(RIGHT, inputs=_outside(floats(0, 1, HEADS, LENGTH, LENGTH)), name="a whole bias by heads")(
    lambda m, input_ids, labels, whole_mask: _masked(m, input_ids, labels, whole_mask))
row(RIGHT, inputs=_outside(floats(0, BATCH, 1, LENGTH, LENGTH) > -1), name="a whole mask by samples")(
    lambda m, input_ids, labels, whole_mask: _masked(m, input_ids, labels, whole_mask))
row(RIGHT, inputs=_outside(padding(0)[:, None, None, :].bool()), name="a whole padding mask of keys")(
    lambda m, input_ids, labels, whole_mask: _masked(m, input_ids, labels, whole_mask))


@row(RIGHT, inputs=_outside(torch.zeros(1)), modules={"bias": lambda: floats(0, 1, HEADS, LENGTH, LENGTH)}, ring=REFUSED)
def a_whole_bias_that_is_trained(m, input_ids, labels, whole_mask):
    return _masked(m, input_ids, labels, m.bias)


@row(RIGHT, inputs=_outside(floats(0, LENGTH, LENGTH)[:, :12]))
def a_mask_of_neither_length(m, input_ids, labels, whole_mask):
    """Half the keys, which are as many as one of two ranks has: plain PyTorch needs all."""
    return _masked(m, input_ids, labels, torch.cat([whole_mask, whole_mask], 1))


def _cut_rows(step):
    return {**language(step), "rows": floats(step, BATCH, LENGTH, LENGTH)}


@row(RIGHT, inputs=_cut_rows)
def a_bias_cut_along_its_queries(m, input_ids, labels, rows):
    """[B, local queries, all keys]."""
    return _masked(m, input_ids, labels, rows[:, None])


@row(RIGHT)
def hidden_states_zeroed_by_a_padding_mask(m, input_ids, labels):
    x = m.embed(input_ids) * (input_ids > 5).unsqueeze(-1)
    return loss_of(m.head(x + attend(m, x, is_causal=True)), labels)


@program(RIGHT, on_four=True)
def a_mask_given_whole_for_all_to_see(model, cut, step):
    """The mask stays as it is, the ids are cut."""
    whole = padded(step)
    mask = whole.pop("attention_mask")
    ids, labels = cut(**whole).values()
    return loss_of(model(ids, attn_mask=mask[:, None, None, :].bool()), labels)


@row(RIGHT, ring=REFUSED)
def causal_with_fewer_keys_than_queries(m, input_ids, labels):
    """Keys without their last tokens."""
    x = m.embed(input_ids)
    query, key, value = (heads(part) for part in m.qkv(x).chunk(3, -1))
    attended = functional.scaled_dot_product_attention(query, key[:, :, :-3], value[:, :, :-3], is_causal=True)
    return loss_of(m.head(x + m.out(joined(attended))), labels)


row(RIGHT, name="dropout inside attention of probability 0")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids, is_causal=True, dropout_p=0.0), labels))


