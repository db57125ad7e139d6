"""Attention of all kinds, without masks: heads, layouts, caches, layers of PyTorch."""
import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .table import (BATCH, HEADS, HIDDEN, LENGTH, REFUSED, RIGHT, VOCABULARY, attend, floats, heads, hidden, joined, language, logits, loss_of, mlp,
                    program, row, tokens)

sdpa = functional.scaled_dot_product_attention
SIZE = HIDDEN // HEADS


def _qkv(m, x):
    return [heads(part) for part in m.qkv(x).chunk(3, -1)]


def _finish(m, x, attended, labels):
    return loss_of(m.head(m.last_norm(x + m.out(joined(attended)))), labels)


@row(RIGHT, on_four=True)
def attention_without_causality(m, input_ids, labels):
    x = m.embed(input_ids)
    return _finish(m, x, sdpa(*_qkv(m, x)), labels)


@row(RIGHT)
def attention_with_a_scale(m, input_ids, labels):
    x = m.embed(input_ids)
    return _finish(m, x, sdpa(*_qkv(m, x), is_causal=True, scale=0.3), labels)


@row(RIGHT, modules={"q": lambda: nn.Linear(HIDDEN, HIDDEN), "kv": lambda: nn.Linear(HIDDEN, 2 * 2 * SIZE)}, on_four=True)
def grouped_queries(m, input_ids, labels):
    x = m.embed(input_ids)
    key, value = (heads(part, 2) for part in m.kv(x).chunk(2, -1))
    return _finish(m, x, sdpa(heads(m.q(x)), key, value, is_causal=True, enable_gqa=True), labels)


@row(RIGHT, modules={"q": lambda: nn.Linear(HIDDEN, HIDDEN), "kv": lambda: nn.Linear(HIDDEN, 2 * 2 * SIZE)})
def grouped_queries_with_repeated_keys(m, input_ids, labels):
    x = m.embed(input_ids)
    key, value = (heads(part, 2)[:, :, None].expand(-1, -1, 2, -1, -1).reshape(x.shape[0], HEADS, -1, SIZE) for part in m.kv(x).chunk(2, -1))
    return _finish(m, x, sdpa(heads(m.q(x)), key, value, is_causal=True), labels)


@row(RIGHT, modules={"q": lambda: nn.Linear(HIDDEN, HIDDEN), "kv": lambda: nn.Linear(HIDDEN, 2 * SIZE)})
def one_key_head_repeat_interleaved(m, input_ids, labels):
    x = m.embed(input_ids)
    key, value = (heads(part, 1).repeat_interleave(HEADS, dim=1) for part in m.kv(x).chunk(2, -1))
    return _finish(m, x, sdpa(heads(m.q(x)), key, value, is_causal=True), labels)


@row(RIGHT)
def packed_qkv_by_a_view(m, input_ids, labels):
    x = m.embed(input_ids)
    query, key, value = m.qkv(x).view(x.shape[0], -1, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
    return _finish(m, x, sdpa(query, key, value, is_causal=True), labels)


@row(RIGHT)
def packed_qkv_by_unbind(m, input_ids, labels):
    x = m.embed(input_ids)
    query, key, value = m.qkv(x).view(*x.shape[:2], HEADS, 3 * SIZE).transpose(1, 2).unflatten(-1, (3, SIZE)).unbind(-2)
    return _finish(m, x, sdpa(query, key, value, is_causal=True), labels)


@row(RIGHT)
def packed_qkv_by_split(m, input_ids, labels):
    x = m.embed(input_ids)
    query, key, value = (heads(part) for part in m.qkv(x).split(HIDDEN, dim=2))
    return _finish(m, x, sdpa(query, key, value, is_causal=True), labels)


@row(RIGHT)
def packed_qkv_by_slices(m, input_ids, labels):
    x = m.embed(input_ids)
    both = m.qkv(x)
    query, key, value = both[..., :HIDDEN], both[..., HIDDEN:2 * HIDDEN], both[:, :, 2 * HIDDEN:]
    return _finish(m, x, sdpa(heads(query), heads(key), heads(value)), labels)


@row(RIGHT)
def packed_qkv_of_tokens_first(m, input_ids, labels):
    """[S, B, heads, 3 * size], as Megatron has it."""
    x = m.embed(input_ids).transpose(0, 1).contiguous()
    both = m.qkv(x).view(*x.shape[:2], HEADS, 3 * SIZE)
    query, key, value = (part.permute(1, 2, 0, 3) for part in both.chunk(3, -1))
    attended = sdpa(query, key, value, is_causal=True).permute(2, 0, 1, 3).flatten(2)
    return loss_of(m.head(m.last_norm(x + m.out(attended))).transpose(0, 1), labels)


@row(RIGHT, modules={"q_norm": lambda: nn.RMSNorm(SIZE), "k_norm": lambda: nn.RMSNorm(SIZE)})
def norms_of_queries_and_keys(m, input_ids, labels):
    x = m.embed(input_ids)
    query, key, value = _qkv(m, x)
    return _finish(m, x, sdpa(m.q_norm(query), m.k_norm(key), value, is_causal=True), labels)


@row(RIGHT)
def cosine_attention(m, input_ids, labels):
    x = m.embed(input_ids)
    query, key, value = _qkv(m, x)
    return _finish(m, x, sdpa(functional.normalize(query, dim=-1), functional.normalize(key, dim=-1), value, scale=2.0), labels)


@row(RIGHT, on_four=True)
def attention_written_out(m, input_ids, labels):
    x = m.embed(input_ids)
    query, key, value = _qkv(m, x)
    weights = (query @ key.transpose(-1, -2) / math.sqrt(SIZE)).softmax(-1)
    return _finish(m, x, weights @ value, labels)


@row(RIGHT)
def causal_attention_written_out(m, input_ids, labels):
    x = m.embed(input_ids)
    query, key, value = _qkv(m, x)
    scores = query @ key.transpose(-1, -2) / math.sqrt(SIZE)
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -1e9)
    return _finish(m, x, scores.softmax(-1) @ value, labels)


@row(RIGHT)
def attention_by_einsum(m, input_ids, labels):
    x = m.embed(input_ids)
    query, key, value = _qkv(m, x)
    weights = torch.einsum("bhqd,bhkd->bhqk", query, key).softmax(-1)
    return _finish(m, x, torch.einsum("bhqk,bhkd->bhqd", weights, value), labels)


@row(RIGHT)
def attention_by_bmm(m, input_ids, labels):
    x = m.embed(input_ids)
    query, key, value = (part.flatten(0, 1) for part in _qkv(m, x))
    attended = torch.bmm(torch.bmm(query, key.transpose(1, 2)).softmax(-1), value)
    return _finish(m, x, attended.view(x.shape[0], HEADS, -1, SIZE), labels)


@row(RIGHT)
def attention_by_baddbmm(m, input_ids, labels):
    """BLOOM's."""
    x = m.embed(input_ids)
    query, key, value = (part.flatten(0, 1) for part in _qkv(m, x))
    slopes = torch.arange(key.shape[1]).float().view(1, 1, -1).expand(key.shape[0], -1, -1) * 0.1
    weights = slopes.baddbmm(query, key.transpose(1, 2), beta=1.0, alpha=0.3).softmax(-1)
    return _finish(m, x, torch.bmm(weights, value).view(x.shape[0], HEADS, -1, SIZE), labels)


@row(RIGHT)
def linear_attention(m, input_ids, labels):
    x = m.embed(input_ids)
    query, key, value = _qkv(m, x)
    state = key.softmax(-2).transpose(-1, -2) @ value
    return _finish(m, x, query.softmax(-1) @ state, labels)


@row(RIGHT)
def linear_attention_by_running_sums(m, input_ids, labels):
    x = m.embed(input_ids)
    query, key, value = _qkv(m, x)
    state = (functional.elu(key).unsqueeze(-1) * value.unsqueeze(-2)).cumsum(2)
    return _finish(m, x, (query.unsqueeze(-2) @ state).squeeze(-2), labels)


@row(RIGHT)
def attention_over_heads_by_mistake(m, input_ids, labels):
    """Queries [B, S, heads, size], not transposed: each token attends over its own heads, which is right on one rank
    and on all."""
    x = m.embed(input_ids)
    query, key, value = (part.unflatten(-1, (HEADS, SIZE)) for part in m.qkv(x).chunk(3, -1))
    return loss_of(m.head(x + sdpa(query, key, value).flatten(2)), labels)


@row(RIGHT, on_four=True)
def attention_with_five_dims(m, input_ids, labels):
    x = m.embed(input_ids)
    query, key, value = (part.unsqueeze(1) for part in _qkv(m, x))
    return _finish(m, x, sdpa(query, key, value, is_causal=True).squeeze(1), labels)


@row(RIGHT, ring=REFUSED)
def attention_with_three_dims(m, input_ids, labels):
    """Heads merged with samples, as nn.MultiheadAttention has them."""
    x = m.embed(input_ids)
    query, key, value = (part.flatten(0, 1) for part in _qkv(m, x))
    return _finish(m, x, sdpa(query, key, value, is_causal=True).view(x.shape[0], HEADS, -1, SIZE), labels)


# samples are taken for heads; three of them are too few for four ranks
@row(RIGHT, ring=REFUSED, four=REFUSED)
def attention_of_one_head_without_its_dim(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x + m.out(sdpa(*m.qkv(x).chunk(3, -1), is_causal=True))), labels)


@row(RIGHT)
def chunked_attention_by_a_view(m, input_ids, labels):
    """Chunks of four tokens by a view: no chunk is on two ranks, but the view merges and splits tokens."""
    x = m.embed(input_ids)
    query, key, value = (part.reshape(x.shape[0], HEADS, -1, 4, SIZE) for part in _qkv(m, x))
    return _finish(m, x, sdpa(query, key, value, is_causal=True).flatten(2, 3), labels)


@row(RIGHT)
def dilated_attention_by_a_view(m, input_ids, labels):
    x = m.embed(input_ids)
    query, key, value = (part.unflatten(2, (-1, 2)).transpose(2, 3) for part in _qkv(m, x))
    return _finish(m, x, sdpa(query, key, value).transpose(2, 3).flatten(2, 3), labels)


@row(RIGHT, modules={"memory": lambda: floats(0, 5, HIDDEN)})
def cross_attention_to_learned_memory(m, input_ids, labels):
    """Every rank has all keys."""
    x = m.embed(input_ids)
    key, value = (heads(part.expand(x.shape[0], -1, -1)) for part in (m.memory, m.memory * 2))
    return _finish(m, x, sdpa(heads(m.out(x)), key, value), labels)


@row(RIGHT, modules={"memory": lambda: floats(0, LENGTH, HIDDEN)})
def cross_attention_to_as_many_learned_tokens(m, input_ids, labels):
    x = m.embed(input_ids)
    key, value = (heads(part.expand(x.shape[0], -1, -1)) for part in (m.memory, m.memory * 2))
    return _finish(m, x, sdpa(heads(m.out(x)), key, value), labels)


@row(RIGHT, modules={"queries": lambda: floats(0, 5, HIDDEN)}, on_four=True)
def learned_queries_attend_to_all_tokens(m, input_ids, labels):
    """A perceiver: queries that are not cut, of keys that are."""
    x = m.embed(input_ids)
    key, value = (heads(part) for part in m.qkv(x).chunk(3, -1)[1:])
    pooled = joined(sdpa(heads(m.queries.expand(x.shape[0], -1, -1)), key, value)).mean(1)
    return functional.cross_entropy(m.head(pooled), torch.tensor([4, 7, 9])) + 0 * labels.sum()


@row(RIGHT, modules={"sink_key": lambda: floats(0, 1, HEADS, 1, SIZE), "sink_value": lambda: floats(1, 1, HEADS, 1, SIZE)})
def learned_sinks_before_the_keys(m, input_ids, labels):
    x = m.embed(input_ids)
    query, key, value = _qkv(m, x)
    key, value = (torch.cat([sink.expand(x.shape[0], -1, -1, -1), part], dim=2) for sink, part in ((m.sink_key, key), (m.sink_value, value)))
    return _finish(m, x, sdpa(query, key, value), labels)


@row(RIGHT)
def keys_and_values_shared_by_layers(m, input_ids, labels):
    x = m.embed(input_ids)
    query, key, value = _qkv(m, x)
    x = x + m.out(joined(sdpa(query, key, value, is_causal=True)))
    x = x + m.out(joined(sdpa(heads(m.down(m.up(x))), key, value, is_causal=True)))
    return loss_of(m.head(x), labels)


@row(RIGHT)
def three_layers_of_one_weight(m, input_ids, labels):
    x = m.embed(input_ids)
    for _ in range(3):
        x = x + attend(m, m.norm(x), is_causal=True)
        x = x + mlp(m, x)
    return loss_of(m.head(m.last_norm(x)), labels)


@row(RIGHT)
def recomputed_layers(m, input_ids, labels):
    x = m.embed(input_ids)
    for _ in range(2):
        x = checkpoint(lambda x: m.last_norm(x + attend(m, m.norm(x), is_causal=True) + mlp(m, x)), x, use_reentrant=False)
    return loss_of(m.head(x), labels)


@row(RIGHT)
def recomputed_layers_reentrant(m, input_ids, labels):
    x = m.embed(input_ids)
    x = checkpoint(lambda x: m.last_norm(x + attend(m, m.norm(x), is_causal=True) + mlp(m, x)), x, use_reentrant=True)
    return loss_of(m.head(x), labels)


@row(RIGHT, tolerance=0.1)
def autocast_to_bf16(m, input_ids, labels):
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(logits(m, input_ids).float(), labels)


@row(RIGHT)
def a_cache_of_one_forward(m, input_ids, labels):
    """Keys and values go through an empty cache, as by use_cache=True."""
    x = m.embed(input_ids)
    query, key, value = _qkv(m, x)
    cache_key, cache_value = (torch.tensor([], dtype=part.dtype) for part in (key, value))
    key, value = torch.cat([cache_key, key], dim=-2), torch.cat([cache_value, value], dim=-2)
    return _finish(m, x, sdpa(query, key, value, is_causal=True), labels)


@row(RIGHT)
def a_cache_written_in_place(m, input_ids, labels):
    """A static cache, as long as this rank's tokens."""
    x = m.embed(input_ids)
    query, key, value = _qkv(m, x)
    cache = torch.zeros(2, *key.shape)
    cache[0, :, :, :key.shape[2]] = key
    cache[1, :, :, :key.shape[2]] = value
    return _finish(m, x, sdpa(query, cache[0], cache[1], is_causal=True), labels)


@row(RIGHT)
def a_longer_cache_written_in_place(m, input_ids, labels):
    x = m.embed(input_ids)
    query, key, value = _qkv(m, x)
    cache = torch.zeros(2, BATCH, HEADS, LENGTH, SIZE)
    cache[0, :, :, :key.shape[2]] = key
    cache[1, :, :, :key.shape[2]] = value
    return _finish(m, x, sdpa(query, cache[0, :, :, :key.shape[2]], cache[1, :, :, :key.shape[2]], is_causal=True), labels)


@row(RIGHT)
def a_cache_in_two_forwards(m, input_ids, labels):
    """The second half of the tokens attends to the first half's keys."""
    half = input_ids.shape[1] // 2
    x = m.embed(input_ids)
    query, key, value = _qkv(m, x)
    first = sdpa(query[:, :, :half], key[:, :, :half], value[:, :, :half], is_causal=True)
    second = sdpa(query[:, :, half:], key, value, attn_mask=torch.ones(half, 2 * half, dtype=torch.bool).tril(half))
    return _finish(m, x, torch.cat([first, second], dim=2), labels)


@row(RIGHT, modules={"mha": lambda: nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)})
def multihead_attention_of_pytorch(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x + m.mha(x, x, x, need_weights=False)[0]), labels)


@row(RIGHT, modules={"mha": lambda: nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)})
def multihead_attention_of_pytorch_with_weights(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x + m.mha(x, x, x)[0]), labels)


@row(RIGHT, modules={"mha": lambda: nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)}, on_four=True)
def multihead_attention_of_pytorch_causal(m, input_ids, labels):
    x = m.embed(input_ids)
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    return loss_of(m.head(x + m.mha(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]), labels)


def _encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(HIDDEN, HEADS, 28, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False)


row(RIGHT, modules={"encoder": _encoder}, on_four=True, name="transformer encoder of pytorch")(
    lambda m, input_ids, labels: loss_of(m.head(m.encoder(m.embed(input_ids))), labels))


@program(RIGHT, modules={"encoder": _encoder}, forward=lambda m, ids: m.head(m.encoder(m.embed(ids))))
def transformer_encoder_evaluated_without_gradients(model, cut, step):
    whole = language(step)
    ids, labels = cut(**whole).values()
    model.eval()
    with torch.no_grad():
        return loss_of(model(ids), labels)


@program(RIGHT, modules={"mha": lambda: nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)},
         forward=lambda m, ids: m.head(m.mha(*[m.embed(ids)] * 3, need_weights=False)[0]))
def multihead_attention_evaluated_without_gradients(model, cut, step):
    ids, labels = cut(**language(step)).values()
    model.eval()
    with torch.no_grad():
        return loss_of(model(ids), labels)


# on four ranks 6 is a part's length there by chance
@row(RIGHT, modules={"encoder": _encoder}, on_four=True)
def transformer_encoder_with_a_padding_mask(m, input_ids, labels):
    x = m.encoder(m.embed(input_ids), src_key_padding_mask=input_ids < 6)
    return loss_of(m.head(x), labels)


@row(RIGHT, modules={"encoder": _encoder})
def transformer_encoder_with_a_causal_mask(m, input_ids, labels):
    mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
    return loss_of(m.head(m.encoder(m.embed(input_ids), mask=mask, is_causal=True)), labels)


@row(RIGHT, modules={"transformer": lambda: nn.Transformer(HIDDEN, HEADS, 1, 1, 28, dropout=0.0, batch_first=True)})
def transformer_of_pytorch(m, input_ids, labels):
    x = m.embed(input_ids)
    mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
    return loss_of(m.head(m.transformer(x, x * 0.5, tgt_mask=mask, tgt_is_causal=True)), labels)


@row(RIGHT)
def queries_out_of_a_part_of_the_tokens(m, input_ids, labels):
    """The last token alone asks."""
    x = m.embed(input_ids)
    query, key, value = _qkv(m, x)
    last = joined(sdpa(query[:, :, -1:], key, value)).squeeze(1)
    return functional.cross_entropy(m.head(last), torch.tensor([4, 7, 9])) + 0 * labels.sum()


@row(REFUSED)
def attention_of_a_tensor_that_numpy_has_held(m, input_ids, labels):
    """Values of other storage: nothing says any more that they are parts."""
    x = m.embed(input_ids)
    query, key, value = _qkv(m, x)
    frozen = torch.from_numpy(value.detach().numpy().copy())
    return _finish(m, x, sdpa(query, key, frozen), labels)


@row(REFUSED)
def attention_of_a_list_made_a_tensor(m, input_ids, labels):
    x = torch.tensor(m.embed(input_ids).tolist())
    return loss_of(m.head(x + attend(m, x, is_causal=True)), labels)


@row(RIGHT, modules={"q": lambda: nn.Linear(HIDDEN, HIDDEN), "latent": lambda: nn.Linear(HIDDEN, 8), "open": lambda: nn.Linear(8, 2 * HIDDEN)})
def latent_keys_and_values(m, input_ids, labels):
    x = m.embed(input_ids)
    key, value = (heads(part) for part in m.open(functional.rms_norm(m.latent(x), (8,))).split([HIDDEN, HIDDEN], -1))
    return _finish(m, x, sdpa(heads(m.q(x)), key, value, is_causal=True), labels)


@row(RIGHT, modules={"gates": lambda: nn.Linear(HIDDEN, HEADS)})
def gated_heads(m, input_ids, labels):
    x = m.embed(input_ids)
    attended = sdpa(*_qkv(m, x), is_causal=True) * m.gates(x).sigmoid().transpose(1, 2).unsqueeze(-1)
    return _finish(m, x, attended, labels)


@row(RIGHT)
def differential_attention(m, input_ids, labels):
    x = m.embed(input_ids)
    query, key, value = _qkv(m, x)
    difference = sdpa(query, key, value, is_causal=True) - 0.3 * sdpa(key, query, value, is_causal=True)
    return _finish(m, x, difference, labels)


row(RIGHT, stage=3, name="a language model at stage 3")(lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels))
row(RIGHT, stage=2, name="tied weights at stage 2")(lambda m, input_ids, labels: loss_of(hidden(m, input_ids) @ m.embed.weight.T, labels))


@row(RIGHT, stage=1, inputs=lambda step: {"input_ids": tokens(step, batch=1), "labels": tokens(step, 5, batch=1) % VOCABULARY})
def one_sample_at_stage_1(m, input_ids, labels):
    return loss_of(logits(m, input_ids), labels)


