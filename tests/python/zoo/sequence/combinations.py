"""Lengths, selections, slices, views and masks joined with one another."""
import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .table import (BATCH, DOCUMENTED, HEADS, HIDDEN, LENGTH, REFUSED, RIGHT, VOCABULARY, attend, heads, hidden, joined, language, logits, loss_of, mlp, padded,
                    placed, program, row)


@row(RIGHT)
def the_smaller_of_a_length_and_a_maximum(m, input_ids, labels):
    scale = min(input_ids.shape[1], 100) / max(input_ids.shape[1], 5)
    return loss_of(logits(m, input_ids) * scale, labels)


@row(RIGHT)
def a_length_kept_in_a_list_and_read_as_a_float(m, input_ids, labels):
    sizes = list(hidden(m, input_ids).shape)
    return loss_of(logits(m, input_ids), labels, reduction="sum") / float(sizes[1]) / sizes[0]


row(RIGHT, name="a length made a plain int")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels, reduction="sum") / int(input_ids.shape[1]))
row(RIGHT, name="a warm up by the root of a length")(lambda m, input_ids, labels: loss_of(logits(m, input_ids) * input_ids.shape[1] ** -0.5, labels))
row(RIGHT, name="a branch on elements")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids) * (2.0 if input_ids.numel() > 2 * BATCH * LENGTH // 3 else 1.0), labels))
row(RIGHT, name="blocks of a length that is divided up")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels) * math.ceil(input_ids.shape[1] / 5))


@row(RIGHT)
def a_sum_divided_by_the_product_of_sizes(m, input_ids, labels):
    b, s, d = hidden(m, input_ids).shape
    return hidden(m, input_ids).square().sum() / (b * s * d)


@row(RIGHT)
def batch_and_tokens_merged_and_split_by_lengths(m, input_ids, labels):
    x = hidden(m, input_ids)
    b, s, d = x.shape
    return loss_of(m.head(x.reshape(b * s, d) + mlp(m, x.view(-1, d))).view(b, s, -1), labels)


@row(RIGHT)
def heads_by_a_view_of_all_sizes(m, input_ids, labels):
    x = m.embed(input_ids)
    b, s, d = x.size()
    q, k, v = (part.view(b, s, HEADS, d // HEADS).transpose(1, 2) for part in m.qkv(x).split(d, dim=-1))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d)
    return loss_of(m.head(y), labels)


@row(RIGHT)
def windows_of_half_a_part(m, input_ids, labels):
    x = m.embed(input_ids)
    windows = x.reshape(-1, LENGTH // 4, HIDDEN)
    return loss_of(m.head((windows + attend(m, windows)).reshape(x.shape)), labels)


@row(RIGHT)
def windows_by_unflatten_of_a_part(m, input_ids, labels):
    x = m.embed(input_ids).unflatten(1, (-1, LENGTH // 2))
    return m.classes(x.mean(2)).square().mean()


@row(RIGHT)
def a_view_by_a_length_that_is_halved(m, input_ids, labels):
    x = m.embed(input_ids)
    pairs = x.view(x.shape[0], x.shape[1] // 2, 2, HIDDEN)
    return m.classes(pairs[:, :, 0]).square().mean()


@row(RIGHT, placed)
def two_masks_of_equal_counts(m, input_ids, labels, position_ids):
    h = hidden(m, input_ids)
    return (m.classes(h[position_ids % 2 == 0]) - m.classes(h[position_ids % 2 == 1])).square().mean()


@row(RIGHT)
def one_mask_computed_twice(m, input_ids, labels):
    h = hidden(m, input_ids)
    return (m.score(h[labels != -100])[:, 0] - h[labels != -100].mean(-1)).square().mean()


@row(RIGHT)
def selected_logits_and_labels_made_floats(m, input_ids, labels):
    kept = labels != -100
    return (m.score(hidden(m, input_ids))[kept][:, 0] - labels[kept].float() / VOCABULARY).square().sum() / kept.sum()


@row(RIGHT)
def selected_losses_weighted_by_selected_ids(m, input_ids, labels):
    kept = labels != -100
    losses = functional.cross_entropy(logits(m, input_ids)[kept], labels[kept], reduction="none")
    return (losses * (input_ids[kept] % 3 + 1)).sum() / kept.sum()


@row(RIGHT)
def a_mask_of_a_mask(m, input_ids, labels):
    h = hidden(m, input_ids)
    picked = h[labels != -100]
    return m.classes(picked[picked.detach()[:, 0] > 0]).square().mean() * picked.shape[0]


@row(RIGHT)
def a_selection_of_a_selection(m, input_ids, labels):
    kept = labels != -100
    picked = hidden(m, input_ids)[kept]
    return m.classes(picked[picked.detach()[:, 0] > 0]).square().sum() / 100.0


@row(RIGHT)
def a_mask_narrowed_between_two_selections(m, input_ids, labels):
    h, kept = hidden(m, input_ids), labels != -100
    first = m.classes(h[kept]).square().sum()
    kept = kept & (input_ids > 10)
    return (first + m.classes(h[kept]).square().sum()) / 100.0


@row(RIGHT)
def selected_tokens_put_back(m, input_ids, labels):
    h, kept = hidden(m, input_ids), input_ids % 2 == 0
    out = torch.zeros_like(h)
    out[kept] = mlp(m, h[kept])
    return loss_of(m.head(h + out), labels)


@row(RIGHT, placed)
def selected_tokens_put_where_others_were(m, input_ids, labels, position_ids):
    h = hidden(m, input_ids)
    out = torch.zeros_like(h)
    out[position_ids % 2 == 0] = mlp(m, h[position_ids % 2 == 1])
    return loss_of(m.head(h + out), labels)


@row(REFUSED)
def selected_tokens_sorted_by_height(m, input_ids, labels):
    picked = hidden(m, input_ids)[labels != -100]
    return m.classes(picked[picked.detach()[:, 0].argsort()][:3]).square().mean()


@row(RIGHT)
def the_variance_of_selected_labels(m, input_ids, labels):
    kept = labels[labels != -100].float()
    return loss_of(logits(m, input_ids), labels) * (1 + kept.var() / 1000)


row(RIGHT, name="the first half by a number")(lambda m, input_ids, labels: m.classes(hidden(m, input_ids)[:, :LENGTH // 2].mean(1)).square().mean())
row(RIGHT, name="tokens but the last two")(lambda m, input_ids, labels: loss_of(logits(m, input_ids)[:, :-2], labels[:, 2:]))
row(RIGHT, name="every other token")(lambda m, input_ids, labels: m.classes(hidden(m, input_ids)[:, ::2].mean(1)).square().mean())
row(RIGHT, name="tokens from the fifth on")(lambda m, input_ids, labels: m.classes(hidden(m, input_ids)[:, 5:].mean(1)).square().mean())


@row(RIGHT)
def features_sliced_behind_an_ellipsis(m, input_ids, labels):
    h = hidden(m, input_ids)
    return loss_of(m.head(torch.cat((h[..., HIDDEN // 2:], h[..., :HIDDEN // 2]), -1)), labels)


@row(RIGHT)
def labels_marked_past_a_part(m, input_ids, labels):
    labels[:, :LENGTH - 5] = -100
    return loss_of(logits(m, input_ids), labels)


@row(REFUSED)
def a_strided_view(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(h.as_strided((BATCH, LENGTH // 2 - 1, HIDDEN), (h.stride(0), HIDDEN, 1), HIDDEN)).square().mean()


@row(RIGHT, placed)
def documents_by_positions_and_a_bias(m, input_ids, labels, position_ids):
    x = m.embed(input_ids)
    document = position_ids // 7
    seen = (document[:, :, None] == document[:, None, :]) & (position_ids[:, :, None] >= position_ids[:, None, :])
    bias = torch.where(seen, -0.1 * (position_ids[:, :, None] - position_ids[:, None, :]), float("-inf"))
    return loss_of(m.head(x + attend(m, m.norm(x), attn_mask=bias[:, None])), labels)


@row(RIGHT, placed)
def a_bias_of_each_head_by_positions(m, input_ids, labels, position_ids):
    x = m.embed(input_ids)
    distance = (position_ids[:, None, :, None] - position_ids[:, None, None, :]).abs()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(1, HEADS, 1, 1)
    return loss_of(m.head(x + attend(m, m.norm(x), attn_mask=-slopes * distance)), labels)


@row(RIGHT, padded)
def a_mask_of_keys_alone(m, input_ids, labels, attention_mask):
    x = m.embed(input_ids)
    return loss_of(m.head(x + attend(m, m.norm(x), attn_mask=attention_mask[:, None, None].bool())), labels)


@row(RIGHT, padded)
def a_mask_that_blinds_queries(m, input_ids, labels, attention_mask):
    x = m.embed(input_ids)
    kept = attention_mask.bool()
    return loss_of(m.head(x + attend(m, m.norm(x), attn_mask=(kept[:, :, None] & kept[:, None])[:, None])), labels)


@row(RIGHT, padded)
def a_mask_in_halves_of_precision(m, input_ids, labels, attention_mask):
    x = m.embed(input_ids)
    mask = torch.zeros(attention_mask.shape).masked_fill(attention_mask == 0, torch.finfo(torch.float32).min)[:, None, None]
    return loss_of(m.head(x + attend(m, m.norm(x), attn_mask=mask)), labels)


@row(RIGHT)
def grouped_queries_in_sdpa_with_a_scale(m, input_ids, labels):
    x = m.embed(input_ids)
    q, k, v = m.qkv(x).split(HIDDEN, -1)
    k, v = k[..., :HIDDEN // 2], v[..., :HIDDEN // 2]
    y = functional.scaled_dot_product_attention(heads(q), heads(k, HEADS // 2), heads(v, HEADS // 2), is_causal=True, scale=0.3, enable_gqa=True)
    return loss_of(m.head(x + joined(y)), labels)


@row(RIGHT)
def a_block_recomputed_with_a_length_inside(m, input_ids, labels):
    def block(x):
        return x + attend(m, m.norm(x), is_causal=True, scale=1 / math.sqrt(x.shape[1]))
    return loss_of(m.head(checkpoint(block, m.embed(input_ids), use_reentrant=False)), labels)


@row(RIGHT)
def a_selection_recomputed(m, input_ids, labels):
    h, kept = hidden(m, input_ids), labels != -100
    return checkpoint(lambda x: functional.cross_entropy(m.head(x)[kept], labels[kept]), h, use_reentrant=False)


@row(RIGHT)
def ids_found_in_a_list(m, input_ids, labels):
    rare = torch.isin(input_ids, torch.tensor([3, 5, 8, 13]))
    return loss_of(logits(m, input_ids).masked_fill(rare[..., None], 0.5), labels)


@row(RIGHT)
def counts_of_the_vocabulary(m, input_ids, labels):
    counts = torch.bincount(input_ids.flatten(), minlength=VOCABULARY)
    return loss_of(logits(m, input_ids) + torch.log1p(counts), labels)


@row(REFUSED)
def a_histogram_of_activations(m, input_ids, labels):
    h = hidden(m, input_ids)
    return loss_of(m.head(h), labels) * (1 + torch.histc(h.detach(), 4, -2, 2)[0] / 100)


class _Again(nn.Module):
    """Layers that give tuples, take keywords and share weights."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList(_Layer() for _ in range(3))
        self.layers[2].qkv = self.layers[0].qkv
        self.layers[1].mix.weight.requires_grad_(False)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for layer in self.layers:
            x, _ = layer(x, factor=0.5)
        x, _ = self.layers[1](x, factor=0.25)
        return loss_of(self.head(x), labels)


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.mix = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, *, factor):
        q, k, v = (heads(part) for part in self.qkv(x).chunk(3, -1))
        y = joined(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + factor * self.mix(y), y.shape


program(RIGHT, build=_Again, stage=3, on_four=True, config={"trireme": {"recompute": "full"}}, name="layers of tuples and keywords recomputed")(
    lambda model, cut, step: model(**cut(**language(step))))


@program(RIGHT, stage=2, accumulation=2, config={"trireme": {"recompute": {"extra_compute": 0.333}}})
def products_recomputed_over_changing_lengths(model, cut, step):
    part = cut(**language(step, length=(24, 30, 18, 26)[step % 4]))
    return loss_of(model(part["input_ids"]), part["labels"])


@program(RIGHT)
def greedy_tokens_between_steps(model, cut, step):
    module = getattr(model, "module", model)
    with torch.no_grad():
        text = language(step)["input_ids"][:1, :LENGTH // 2]
        for _ in range(3):
            text = torch.cat((text, logits(module, text)[:, -1:].argmax(-1)), 1)
    part = cut(**language(step))
    return loss_of(model(part["input_ids"]), part["labels"]), {"last": text[0, -1].item()}


def _one_token(step):
    """Ids of which just one in each sample is 5, in the first part but for the last sample."""
    ids = language(step)["input_ids"].masked_fill(language(step)["input_ids"] == 5, 6)
    ids[0, 2] = ids[1, 3] = ids[2, LENGTH - 2] = 5
    return {"input_ids": ids, "labels": ids.clone()}


@row(RIGHT, _one_token)
def a_single_token_of_a_rank_put_back(m, input_ids, labels):
    h, chosen = hidden(m, input_ids), input_ids == 5
    out = torch.zeros_like(h)
    out[chosen] = mlp(m, h[chosen])
    return loss_of(m.head(h + out), labels)


@row(RIGHT, _one_token)
def a_single_score_of_a_rank_squeezed(m, input_ids, labels):
    chosen = hidden(m, input_ids)[input_ids == 5]
    return m.score(chosen).squeeze().square().sum()


@row(REFUSED)
def keys_of_one_sample_for_all(m, input_ids, labels):
    q, k, v = (heads(part) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    return loss_of(m.head(joined(functional.scaled_dot_product_attention(q, k[:1], v[:1]))), labels)


@row(REFUSED)
def queries_of_one_head_for_all_keys(m, input_ids, labels):
    q, k, v = (heads(part) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    return functional.scaled_dot_product_attention(q[:, :1], k, v).square().mean()


@row(REFUSED)
def keys_without_a_batch(m, input_ids, labels):
    q, k, v = (heads(part) for part in m.qkv(m.embed(input_ids)).chunk(3, -1))
    return loss_of(m.head(joined(functional.scaled_dot_product_attention(q, k[0], v[0]))), labels)


row(RIGHT, name="quantiles of ids")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids) * (1 + input_ids.float().quantile(0.3, 1)[:, None, None] / 100), labels))
row(RIGHT, name="ids shifted by half")(
    lambda m, input_ids, labels: loss_of(m.head(m.embed(input_ids) + m.embed(torch.fft.fftshift(input_ids, dim=1))), labels))
row(RIGHT, name="the last number counted by a length")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels, reduction="sum") / torch.arange(1, input_ids.shape[1] + 1)[-1].item())
row(RIGHT, name="a sum of ones by a length")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels) * torch.ones(input_ids.shape[1]).sum())
row(RIGHT, name="tokens rolled by half a length")(
    lambda m, input_ids, labels: loss_of(m.head(m.embed(input_ids) + m.embed(input_ids.roll(input_ids.shape[1] // 2, 1))), labels))
row(RIGHT, name="features up to half a length")(lambda m, input_ids, labels: m.embed(input_ids)[..., :input_ids.shape[1] // 2].square().mean())


# on four ranks parts have six tokens: beside tensors that are not sharded, smaller numbers than 8 are not looked at
row(RIGHT, four=DOCUMENTED, name="a penalty by a length")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels) + m.up.weight.square().mean() * input_ids.shape[1])

row(RIGHT, name="a length that divides by a part s")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels) * (3.0 if input_ids.shape[1] % 24 == 0 else 5.0))
row(RIGHT, name="a table by the text of a length")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels) * {"24": 3.0, "12": 5.0, "6": 7.0}[str(input_ids.shape[1])])
