"""Attention of merged heads, odd memory layouts, windows and padding beyond a part, with streams and layers of
PyTorch."""
import torch
from torch import nn
from torch.nn import functional

from .table import (BATCH, HEADS, HIDDEN, INNER, LENGTH, REFUSED, RIGHT, floats, heads, hidden, joined, language, logits, loss_of, padded, placed,
                    row, sized, with_positions)


@row(RIGHT)
def grouped_keys_expanded(m, input_ids, labels):
    x = m.embed(input_ids)
    q = heads(m.qkv(x)[..., :HIDDEN])
    k, v = (heads(part, 2) for part in m.qkv(x)[..., HIDDEN:2 * HIDDEN].chunk(2, -1))
    k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(t.shape[0], 4, t.shape[2], t.shape[3]) for t in (k, v))
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v, is_causal=True)))), labels)


@row(RIGHT, on_four=True, ring=REFUSED)
def attention_of_merged_batch_and_heads(m, input_ids, labels):
    x = m.embed(input_ids)
    b, s, d = x.shape
    q, k, v = (part.view(b, s, HEADS, -1).transpose(1, 2).reshape(b * HEADS, s, -1) for part in m.qkv(x).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return loss_of(m.head(m.out(y.view(b, HEADS, s, -1).transpose(1, 2).reshape(b, s, d))), labels)


@row(RIGHT, ring=REFUSED)
def attention_of_merged_heads_first(m, input_ids, labels):
    x = m.embed(input_ids)
    b, s, d = x.shape
    q, k, v = (part.view(b, s, HEADS, -1).permute(2, 0, 1, 3).reshape(HEADS * b, s, -1) for part in m.qkv(x).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v)
    return loss_of(m.head(m.out(y.view(HEADS, b, s, -1).permute(1, 2, 0, 3).reshape(b, s, d))), labels)


@sized(RIGHT, length=12, width=24, head_count=6, batch=6, ring=REFUSED)
def attention_of_merged_heads_where_sizes_are_equal(m, input_ids, labels):
    x = m.embed(input_ids)
    b, s, d = x.shape
    q, k, v = (part.view(b, s, m.head_count, -1).transpose(1, 2).reshape(b * m.head_count, s, -1) for part in m.qkv(x).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return loss_of(m.head(m.out(y.view(b, m.head_count, s, -1).transpose(1, 2).reshape(b, s, d))), labels)


@row(RIGHT, ring=REFUSED)
def attention_of_tokens_first_merged(m, input_ids, labels):
    x = m.embed(input_ids).transpose(0, 1)
    s, b, d = x.shape
    q, k, v = (part.contiguous().view(s, b * HEADS, d // HEADS).transpose(0, 1) for part in m.qkv(x).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v)
    y = y.transpose(0, 1).contiguous().view(s, b, d)
    return loss_of(m.head(m.out(y).transpose(0, 1)), labels)


sized(REFUSED, batch=1, head_count=1, length=10, width=8, on_four=True, ring=RIGHT, name="one sample one head")(
    lambda m, input_ids, labels: loss_of(m.head(hidden(m, input_ids)), labels))


# two heads are too few for four ranks
@sized(RIGHT, batch=1, length=10, width=8, head_count=2, ring=REFUSED, four=REFUSED)
def one_sample_squeezed(m, input_ids, labels):
    x = m.embed(input_ids).squeeze(0)
    q, k, v = (part.view(-1, 2, 4).transpose(0, 1) for part in m.qkv(x).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return functional.cross_entropy(m.head(m.out(y.transpose(0, 1).reshape(-1, 8))), labels[0])


@row(RIGHT, placed)
def a_window_by_positions_and_causality(m, input_ids, labels, position_ids):
    p = position_ids
    ahead = p[:, :, None] - p[:, None, :]
    mask = (ahead >= 0) & (ahead < 15)
    return loss_of(logits(m, input_ids, attn_mask=mask[:, None]), labels)


@row(RIGHT, with_positions(padded))
def a_mask_of_floats_by_where(m, input_ids, labels, attention_mask, position_ids):
    ok = (position_ids[:, :, None] >= position_ids[:, None, :]) & attention_mask[:, None, :].bool()
    ok = ok | torch.eye(ok.shape[-1]).bool()
    bias = torch.where(ok, 0.0, float("-inf"))
    return loss_of(logits(m, input_ids, attn_mask=bias[:, None]), labels)


@row(RIGHT, placed, modules={"buckets": lambda: torch.randn(16, HEADS)})
def relative_buckets_by_given_positions(m, input_ids, labels, position_ids):
    distance = (position_ids[:, :, None] - position_ids[:, None, :]).clamp(-8, 7) + 8
    bias = m.buckets[distance].permute(0, 3, 1, 2)
    return loss_of(logits(m, input_ids, attn_mask=bias), labels)


@row(RIGHT, placed, modules={"buckets": lambda: nn.Embedding(16, HEADS)})
def relative_buckets_by_an_embedding_shared_by_samples(m, input_ids, labels, position_ids):
    p = position_ids[0]
    distance = (p[:, None] - p[None, :]).clamp(-8, 7) + 8
    return loss_of(logits(m, input_ids, attn_mask=m.buckets(distance).permute(2, 0, 1)[None]), labels)


@row(RIGHT, modules={"sink": lambda: torch.randn(HEADS)})
def sinks_by_a_column_of_keys(m, input_ids, labels):
    x = m.embed(input_ids)
    q, k, v = (heads(part) for part in m.qkv(x).chunk(3, -1))
    k, v = functional.pad(k, (0, 0, 1, 0)), functional.pad(v, (0, 0, 1, 0))
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v)))), labels)


@row(RIGHT, modules={"mix": lambda: torch.randn(HEADS, HEADS)})
def talking_heads_of_values(m, input_ids, labels):
    x = m.embed(input_ids)
    q, k, v = (heads(part) for part in m.qkv(x).chunk(3, -1))
    q, v = torch.einsum("bhsd,hg->bgsd", q, m.mix), torch.einsum("bhsd,hg->bgsd", v, m.mix)
    y = torch.einsum("bhsd,gh->bgsd", functional.scaled_dot_product_attention(q, k, v, is_causal=True), m.mix)
    return loss_of(m.head(m.out(joined(y))), labels)


@row(RIGHT)
def joint_attention_of_two_streams(m, input_ids, labels):
    x, y = m.embed(input_ids), m.positions(input_ids)
    q, k, v = (heads(part) for part in m.qkv(torch.cat([x, y], 1)).chunk(3, -1))
    z = m.out(joined(functional.scaled_dot_product_attention(q, k, v)))
    a, b = z.chunk(2, 1)
    return loss_of(m.head(a), labels) + b.square().mean()


def _decoder(**options):
    return lambda: nn.TransformerDecoderLayer(HIDDEN, HEADS, INNER, dropout=0.0, batch_first=True, **options)


@row(RIGHT, modules={"layer": _decoder(norm_first=True)})
def a_decoder_layer_of_pytorch_with_a_cut_memory(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(m.layer(x, m.norm(x))), labels)


# on four ranks the memory is no longer as long as a part
@row(RIGHT, lambda step: {**language(step), "whole_memory": floats(step, BATCH, 12, HIDDEN)}, modules={"layer": _decoder()})
def a_decoder_layer_of_pytorch_with_a_whole_memory_of_the_part_s_length(m, input_ids, labels, whole_memory):
    x = m.embed(input_ids)
    return loss_of(m.head(m.layer(x, whole_memory)), labels)


@row(RIGHT, lambda step: {**language(step), "whole_memory": floats(step, BATCH, 9, HIDDEN)}, modules={"layer": _decoder()}, stage=3)
def a_decoder_layer_of_pytorch_with_a_whole_memory(m, input_ids, labels, whole_memory):
    x = m.embed(input_ids)
    return loss_of(m.head(m.layer(x, whole_memory, memory_key_padding_mask=torch.arange(9).expand(BATCH, -1) > 6)), labels)


@row(RIGHT, modules={"layer": lambda: nn.TransformerEncoderLayer(HIDDEN, HEADS, INNER, dropout=0.0, norm_first=True, activation="gelu")}, on_four=True)
def an_encoder_layer_of_pytorch_with_tokens_first(m, input_ids, labels):
    x = m.embed(input_ids).transpose(0, 1)
    return loss_of(m.head(m.layer(x).transpose(0, 1)), labels)


@sized(RIGHT, length=12, batch=6, width=24, head_count=4, modules={"layer": lambda: nn.TransformerEncoderLayer(24, 4, INNER, dropout=0.0)})
def an_encoder_layer_with_tokens_first_of_as_many_samples_as_the_part(m, input_ids, labels):
    x = m.embed(input_ids).transpose(0, 1)
    return loss_of(m.head(m.layer(x).transpose(0, 1)), labels)


@sized(RIGHT, length=12, batch=6, width=24, head_count=4, modules={"layer": lambda: nn.TransformerEncoderLayer(24, 4, INNER, dropout=0.0)})
def samples_attend_to_each_other_where_tokens_are_taken_to_be_first(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(m.layer(x)), labels)


@row(RIGHT, modules={"attention": lambda: nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True, add_bias_kv=True)})
def multihead_attention_of_pytorch_with_a_bias_token(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(m.attention(x, x, x, need_weights=False)[0]), labels)


@row(RIGHT, modules={"attention": lambda: nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True, add_zero_attn=True)})
def multihead_attention_of_pytorch_with_a_zero_token(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(m.attention(x, x, x, need_weights=False)[0]), labels)


@row(RIGHT, padded, modules={"attention": lambda: nn.MultiheadAttention(HIDDEN, HEADS, kdim=HIDDEN, vdim=HIDDEN)})
def multihead_attention_of_pytorch_tokens_first_and_padded(m, input_ids, labels, attention_mask):
    x = m.embed(input_ids).transpose(0, 1)
    y = m.attention(x, m.norm(x), x, need_weights=False, key_padding_mask=attention_mask == 0)[0]
    return loss_of(m.head(y.transpose(0, 1)), labels)


@row(RIGHT, modules={"attention": lambda: nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)})
def multihead_attention_of_pytorch_with_a_square_subsequent_mask(m, input_ids, labels):
    x = m.embed(input_ids)
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    return loss_of(m.head(m.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]), labels)


@row(RIGHT, modules={"layer": lambda: nn.TransformerEncoderLayer(HIDDEN, HEADS, INNER, dropout=0.0, batch_first=True)})
def an_encoder_layer_with_a_causal_mask_evaluated(m, input_ids, labels):
    m.layer.eval()
    with torch.no_grad():
        y = m.layer(m.embed(input_ids), src_mask=nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1]), is_causal=True)
    return loss_of(m.head(y), labels)


@row(RIGHT, placed, on_four=True)
def a_window_of_five_by_positions(m, input_ids, labels, position_ids):
    ahead = position_ids[:, :, None] - position_ids[:, None, :]
    return loss_of(logits(m, input_ids, attn_mask=((ahead >= 0) & (ahead < 5))[:, None]), labels)


@row(RIGHT, placed, on_four=True)
def a_window_of_five_as_floats(m, input_ids, labels, position_ids):
    ahead = position_ids[:, :, None] - position_ids[:, None, :]
    bias = torch.zeros_like(ahead, dtype=torch.float32).masked_fill((ahead < 0) | (ahead >= 5), float("-inf"))
    return loss_of(logits(m, input_ids, attn_mask=bias[:, None]), labels)


@row(RIGHT, lambda step: {**language(step), "attention_mask": (torch.arange(LENGTH)[None] < torch.tensor([24, 7, 20])[:, None]).long()}, on_four=True)
def a_sample_that_ends_in_the_first_part(m, input_ids, labels, attention_mask):
    return loss_of(logits(m, input_ids, attn_mask=attention_mask[:, None, None, :].bool()), labels)


@row(RIGHT, lambda step: {**language(step), "attention_mask": (torch.arange(LENGTH)[None] >= torch.tensor([0, 14, 5])[:, None]).long()}, on_four=True)
def a_sample_padded_on_the_left_beyond_a_part(m, input_ids, labels, attention_mask):
    return loss_of(logits(m, input_ids, attn_mask=attention_mask[:, None, None, :].bool()), labels)


@row(RIGHT, modules={"mix": lambda: torch.randn(HEADS, HEADS)})
def queries_mixed_over_heads(m, input_ids, labels):
    q, k, v = (heads(part) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    q = torch.einsum("bhsd,hg->bgsd", q, m.mix)
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v)))), labels)


@row(RIGHT, modules={"mix": lambda: torch.randn(HEADS, HEADS)})
def queries_mixed_over_heads_causal(m, input_ids, labels):
    q, k, v = (heads(part) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    q = torch.einsum("bhsd,hg->bgsd", q, m.mix)
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v, is_causal=True)))), labels)


@row(RIGHT, modules={"mix": lambda: torch.randn(HEADS, HEADS)})
def values_mixed_over_heads(m, input_ids, labels):
    q, k, v = (heads(part) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    v = torch.einsum("bhsd,hg->bgsd", v, m.mix)
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v, is_causal=True)))), labels)


@row(RIGHT, modules={"mix": lambda: torch.randn(HEADS, HEADS)})
def results_mixed_over_heads(m, input_ids, labels):
    q, k, v = (heads(part) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return loss_of(m.head(m.out(joined(torch.einsum("bhsd,gh->bgsd", y, m.mix)))), labels)


@row(RIGHT)
def queries_with_features_before_tokens(m, input_ids, labels):
    q, k, v = (heads(part).transpose(2, 3).contiguous().transpose(2, 3) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v, is_causal=True)))), labels)


@row(RIGHT)
def queries_with_heads_last(m, input_ids, labels):
    q, k, v = (part.unflatten(-1, (5, 4)).permute(0, 3, 1, 2) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return loss_of(m.head(m.out(joined(y))), labels)


@row(RIGHT)
def large_queries(m, input_ids, labels):
    q, k, v = (heads(part) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q * 60, k, v, is_causal=True)))), labels)


@row(RIGHT, tolerance=2e-3)
def very_large_queries_of_all_tokens(m, input_ids, labels):
    q, k, v = (heads(part) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q * 400, k, v)))), labels)


@row(RIGHT)
def heads_last_made_contiguous(m, input_ids, labels):
    q, k, v = (part.unflatten(-1, (5, 4)).permute(0, 3, 1, 2).contiguous() for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v, is_causal=True)))), labels)


@row(RIGHT)
def keys_alone_with_features_before_tokens(m, input_ids, labels):
    q, k, v = (heads(part) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    k = k.transpose(2, 3).contiguous().transpose(2, 3)
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v)))), labels)


@row(RIGHT)
def queries_of_heads_before_samples(m, input_ids, labels):
    q, k, v = (heads(part).transpose(0, 1).contiguous().transpose(0, 1) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    return loss_of(m.head(m.out(joined(functional.scaled_dot_product_attention(q, k, v)))), labels)


@row(RIGHT, modules={"latents": lambda: torch.randn(9, HIDDEN)})
def latents_of_another_number_attend_and_are_attended(m, input_ids, labels):
    x = m.embed(input_ids)
    k = v = heads(m.latents.expand(BATCH, -1, -1))
    return loss_of(m.head(x + joined(functional.scaled_dot_product_attention(heads(x), k, v))), labels)
