"""Tokens that are selected by masks, places and constant slices."""
import torch
from torch.nn import functional

from .table import BATCH, HIDDEN, REFUSED, RIGHT, attend, hidden, logits, loss_of, padded, placed, row, tokens


@row(RIGHT, tolerance=1e-4)
def mean_of_selected_activations_in_python(m, input_ids, labels):
    h = hidden(m, input_ids)
    picked = h[labels != -100]
    return picked.sum() / picked.shape[0] * 0.1


@row(RIGHT, tolerance=1e-4)
def mean_of_few_selected_activations_in_python(m, input_ids, labels):
    h = hidden(m, input_ids)
    picked = h[input_ids == 5]
    return picked.sum() / max(len(picked), 1) * 0.1


@row(RIGHT)
def the_first_of_the_selected(m, input_ids, labels):
    picked = hidden(m, input_ids)[labels != -100]
    return m.classes(picked[0]).square().mean() + m.classes(picked[-1]).square().mean()


@row(RIGHT)
def the_first_ten_of_the_selected(m, input_ids, labels):
    picked = hidden(m, input_ids)[labels != -100]
    return m.classes(picked[:10]).square().mean()


@row(RIGHT, lambda step: {"input_ids": tokens(step), "labels": functional.one_hot(torch.tensor([2, 0, 4]), 6).repeat(1, 4)})
def masked_tokens_of_each_sample_by_a_view(m, input_ids, labels):
    picked = hidden(m, input_ids)[labels == 1].view(input_ids.shape[0], -1, HIDDEN)
    return m.classes(picked.mean(1)).square().mean()


@row(REFUSED)
def deviation_of_the_selected(m, input_ids, labels):
    picked = m.score(hidden(m, input_ids))[labels != -100]
    return picked.std() + picked.var(0).mean()


@row(REFUSED)
def largest_of_the_selected(m, input_ids, labels):
    picked = m.score(hidden(m, input_ids))[labels != -100]
    return picked.max() + picked.logsumexp(0).sum()


@row(REFUSED)
def two_selections_joined(m, input_ids, labels):
    h = hidden(m, input_ids)
    both = torch.cat([h[input_ids < 15], h[input_ids >= 15]])
    return m.classes(both).square().mean() + both.norm()


@row(RIGHT)
def selected_of_each_sample_meaned_in_a_list(m, input_ids, labels):
    h = hidden(m, input_ids)
    means = torch.stack([h[i][labels[i] != -100].mean(0) for i in range(h.shape[0])])
    return m.classes(means).square().mean()


@row(RIGHT, padded)
def real_tokens_of_each_sample_by_a_python_length(m, input_ids, labels, attention_mask):
    h = hidden(m, input_ids)
    lengths = attention_mask.sum(1).tolist()
    return sum(m.classes(h[i, :n].mean(0)).square().mean() for i, n in enumerate(lengths))


@row(REFUSED, padded)
def nested_tensors_of_real_tokens(m, input_ids, labels, attention_mask):
    h = hidden(m, input_ids)
    nested = torch.nested.nested_tensor([h[i, :n] for i, n in enumerate(attention_mask.sum(1).tolist())])
    return m.classes(nested.to_padded_tensor(0.0).sum(1)).square().mean()


@row(RIGHT, padded)
def pads_cut_off_by_the_longest_sample(m, input_ids, labels, attention_mask):
    n = int(attention_mask.sum(1).max()) - 4
    h = hidden(m, input_ids)
    return m.classes(h[:, :n]).square().mean()


@row(RIGHT, padded)
def the_first_real_token_of_one_sample(m, input_ids, labels, attention_mask):
    h = hidden(m, input_ids)
    n = int(attention_mask[1].sum())
    return m.classes(h[1, :n]).square().mean() + m.classes(h[1, n - 1]).square().mean()


row(RIGHT, name="one sample s first seven tokens")(lambda m, input_ids, labels: m.classes(hidden(m, input_ids)[1, :7]).square().mean())
row(RIGHT, name="one sample s first fifteen tokens")(lambda m, input_ids, labels: m.classes(hidden(m, input_ids)[1, :15].mean(0)).square().mean())
row(RIGHT, name="one sample s tokens from the fifth on")(
    lambda m, input_ids, labels: m.classes(hidden(m, input_ids)[1][4:].mean(0)).square().mean())
row(RIGHT, name="all samples first fifteen tokens pooled")(
    lambda m, input_ids, labels: m.classes(hidden(m, input_ids)[:, :15].mean(1)).square().mean())
row(RIGHT, name="tokens from the fifth on pooled")(lambda m, input_ids, labels: m.classes(hidden(m, input_ids)[:, 4:].sum(1)).square().mean())


@row(RIGHT)
def rows_of_eighteen_merged_tokens(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(h.reshape(-1, 18, HIDDEN).mean(1)).square().mean()


@row(RIGHT)
def selected_divided_by_size_zero(m, input_ids, labels):
    picked = logits(m, input_ids)[labels != -100]
    target = labels[labels != -100]
    return functional.cross_entropy(picked, target, reduction="sum") / target.size(0)


@row(RIGHT)
def selected_divided_by_numel_of_labels(m, input_ids, labels):
    target = labels[labels > 0]
    return loss_of(logits(m, input_ids), labels, reduction="sum") / target.numel()


row(RIGHT, name="loss of the first fifteen tokens")(lambda m, input_ids, labels: loss_of(logits(m, input_ids)[:, :15], input_ids[:, :15]))


@row(RIGHT)
def losses_of_the_first_fifteen_tokens(m, input_ids, labels):
    losses = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), input_ids, reduction="none")
    return losses[:, :15].mean()


@row(RIGHT)
def losses_of_the_first_twelve_tokens(m, input_ids, labels):
    losses = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), input_ids, reduction="none")
    return losses[:, :12].sum() / 36.5


row(RIGHT, name="ids of the first fifteen tokens")(lambda m, input_ids, labels: loss_of(logits(m, input_ids[:, :15]), input_ids[:, :15]))
row(RIGHT, name="samples truncated to twenty tokens")(lambda m, input_ids, labels: loss_of(logits(m, input_ids[:, :20]), labels[:, :20]))
row(RIGHT, name="the first of a split of fifteen")(
    lambda m, input_ids, labels: m.classes(hidden(m, input_ids).split(15, 1)[0].mean(1)).square().mean())
row(RIGHT, name="narrowed to twelve")(lambda m, input_ids, labels: m.classes(hidden(m, input_ids).narrow(1, 0, 12).mean(1)).square().mean())
row(RIGHT, name="all but the last fifteen")(lambda m, input_ids, labels: m.classes(hidden(m, input_ids)[:, :-15].sum(1)).square().mean())
row(RIGHT, name="the last twenty tokens")(lambda m, input_ids, labels: m.classes(hidden(m, input_ids)[:, -20:].mean(1)).square().mean())
row(RIGHT, name="labels from minus twenty on")(lambda m, input_ids, labels: loss_of(logits(m, input_ids)[:, -20:], input_ids[:, -20:]))


@row(RIGHT)
def the_first_fifteen_ids_marked(m, input_ids, labels):
    labels = input_ids.clone()
    labels[:, :15] = -100
    return loss_of(logits(m, input_ids), labels)


@row(RIGHT)
def the_first_fifteen_tokens_zeroed(m, input_ids, labels):
    x = m.embed(input_ids).clone()
    x[:, :15] = 0.0
    return loss_of(m.head(x + attend(m, x)), labels)


@row(RIGHT)
def sums_of_two_samples_first_tokens(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(torch.cat([h[0, :15].sum(0, keepdim=True), h[1, :20].sum(0, keepdim=True)])).square().mean()


@row(RIGHT, padded)
def binary_losses_of_selected_floats(m, input_ids, labels, attention_mask):
    scores = m.score(hidden(m, input_ids))[..., 0]
    kept = attention_mask == 1
    return functional.binary_cross_entropy_with_logits(scores[kept], (input_ids % 2)[kept].float())


@row(RIGHT, padded)
def binary_losses_of_selected_floats_of_a_view(m, input_ids, labels, attention_mask):
    scores = m.score(hidden(m, input_ids)).squeeze(-1)
    kept = attention_mask.view(-1, scores.shape[1]) == 1
    return functional.binary_cross_entropy_with_logits(scores.view(-1, scores.shape[1])[kept], (input_ids % 2)[kept].float())


@row(RIGHT, padded)
def mean_squares_of_selected_whole_floats(m, input_ids, labels, attention_mask):
    scores = m.score(hidden(m, input_ids)).squeeze(-1)
    kept = attention_mask.bool()
    return (scores[kept] - input_ids.float()[kept] / 37).square().mean()


@row(RIGHT, padded)
def mask_viewed_by_the_length(m, input_ids, labels, attention_mask):
    losses = loss_of(logits(m, input_ids), input_ids, reduction="none").view(-1, input_ids.shape[1])
    return (losses * attention_mask.view(-1, input_ids.shape[1])).sum() / attention_mask.sum()


@row(RIGHT)
def ids_viewed_in_rows_of_twelve(m, input_ids, labels):
    rows = input_ids.view(-1, 12)
    return loss_of(m.head(hidden(m, rows)), rows)


@row(RIGHT)
def ids_reshaped_to_rows_of_four(m, input_ids, labels):
    rows = input_ids.reshape(-1, 4)
    return loss_of(m.head(hidden(m, rows)), rows)


@row(RIGHT, padded)
def ids_repacked_without_pads(m, input_ids, labels, attention_mask):
    flat = input_ids[attention_mask.bool()][None]
    return loss_of(m.head(hidden(m, flat)), flat)


@row(RIGHT, padded)
def a_middle_token_by_whole_lengths(m, input_ids, labels, attention_mask):
    h = hidden(m, input_ids)
    return m.classes(h[torch.arange(BATCH), attention_mask.sum(1) // 2]).square().mean()


@row(RIGHT, lambda step: {**padded(step), "whole_places": torch.tensor([3, 20, 11])})
def given_places_plus_nothing_of_a_sum(m, input_ids, labels, attention_mask, whole_places):
    h = hidden(m, input_ids)
    return m.classes(h[torch.arange(BATCH), whole_places + 0 * attention_mask.sum(1)]).square().mean()


row(RIGHT, placed, name="a mask of the first fifteen")(
    lambda m, input_ids, labels, position_ids: loss_of(logits(m, input_ids), input_ids.masked_fill(position_ids >= 15, -100)))


@row(RIGHT, padded)
def cross_entropy_of_selected_tokens(m, input_ids, labels, attention_mask):
    kept = attention_mask == 1
    return functional.cross_entropy(logits(m, input_ids)[kept], input_ids[kept])
