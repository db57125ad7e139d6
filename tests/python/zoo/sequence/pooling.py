"""Samples' features out of their tokens'."""
import torch
from torch import nn
from torch.nn import functional

from .table import BATCH, CLASSES, HIDDEN, LENGTH, REFUSED, RIGHT, classified, floats, generator, hidden, padding, row, tokens


def _loss(m, pooled, classes):
    return functional.cross_entropy(m.classes(pooled), classes)


def padded_classes(step):
    return {**classified(step), "attention_mask": padding(step)}


row(RIGHT, inputs=classified, on_four=True, name="mean over tokens")(
    lambda m, input_ids, whole_classes: _loss(m, hidden(m, input_ids).mean(1), whole_classes))
row(RIGHT, inputs=classified, name="sum over tokens")(lambda m, input_ids, whole_classes: _loss(m, hidden(m, input_ids).sum(dim=-2), whole_classes))
row(RIGHT, inputs=classified, name="mean over tokens of unequal parts")(
    lambda m, input_ids, whole_classes: _loss(m, hidden(m, input_ids).mean(1, keepdim=True).squeeze(1), whole_classes))
row(RIGHT, inputs=lambda step: {**classified(step), "input_ids": tokens(step, length=23)}, on_four=True, name="mean over an odd number of tokens")(
    lambda m, input_ids, whole_classes: _loss(m, hidden(m, input_ids).mean(1), whole_classes))
row(RIGHT, inputs=classified, name="mean by a sum and the length")(
    lambda m, input_ids, whole_classes: _loss(m, hidden(m, input_ids).sum(1) / input_ids.shape[1], whole_classes))


@row(RIGHT, inputs=padded_classes, on_four=True)
def masked_mean_over_tokens(m, input_ids, attention_mask, whole_classes):
    mask = attention_mask.unsqueeze(-1)
    return _loss(m, (hidden(m, input_ids) * mask).sum(1) / mask.sum(1), whole_classes)


@row(RIGHT, inputs=padded_classes)
def masked_mean_over_tokens_as_sentence_transformers_write_it(m, input_ids, attention_mask, whole_classes):
    x = hidden(m, input_ids)
    mask = attention_mask.unsqueeze(-1).expand(x.size()).float()
    return _loss(m, torch.sum(x * mask, 1) / torch.clamp(mask.sum(1), min=1e-9), whole_classes)


row(RIGHT, inputs=classified, name="largest over tokens")(
    lambda m, input_ids, whole_classes: _loss(m, hidden(m, input_ids).max(dim=1).values, whole_classes))
row(RIGHT, inputs=classified, name="amax over tokens")(lambda m, input_ids, whole_classes: _loss(m, hidden(m, input_ids).amax(1), whole_classes))
row(RIGHT, inputs=classified, name="logsumexp over tokens")(
    lambda m, input_ids, whole_classes: _loss(m, hidden(m, input_ids).logsumexp(1), whole_classes))
row(RIGHT, inputs=classified, on_four=True, name="first token")(
    lambda m, input_ids, whole_classes: _loss(m, hidden(m, input_ids)[:, 0], whole_classes))
row(RIGHT, inputs=classified, name="last token")(lambda m, input_ids, whole_classes: _loss(m, hidden(m, input_ids)[:, -1], whole_classes))
row(RIGHT, inputs=classified, name="last token kept as a dim")(
    lambda m, input_ids, whole_classes: _loss(m, hidden(m, input_ids)[:, -1:].squeeze(1), whole_classes))


@row(RIGHT, inputs=classified)
def first_and_last_token_by_select(m, input_ids, whole_classes):
    x = hidden(m, input_ids)
    return _loss(m, x.select(1, 0) + torch.select(x, 1, -1), whole_classes)


@row(RIGHT, inputs=padded_classes, on_four=True)
def last_token_of_each_sample(m, input_ids, attention_mask, whole_classes):
    """Reward models, classification with one label."""
    last = attention_mask.sum(1) - 1
    return _loss(m, hidden(m, input_ids)[torch.arange(input_ids.shape[0]), last], whole_classes)


@row(RIGHT, inputs=padded_classes)
def last_token_of_each_sample_by_argmax(m, input_ids, attention_mask, whole_classes):
    last = (torch.arange(LENGTH) * padding(0)).argmax(-1)
    return _loss(m, hidden(m, input_ids)[torch.arange(BATCH), last], whole_classes)


@row(RIGHT, inputs=padded_classes)
def last_token_of_each_sample_as_transformers_write_it(m, input_ids, attention_mask, whole_classes):
    scores = m.classes(hidden(m, input_ids))
    indices = torch.arange(input_ids.shape[-1], dtype=torch.int32)
    last = (indices * (attention_mask == 1)).argmax(-1)
    return functional.cross_entropy(scores[torch.arange(input_ids.shape[0]), last], whole_classes)


@row(RIGHT, inputs=padded_classes)
def last_token_of_each_sample_by_gather(m, input_ids, attention_mask, whole_classes):
    last = attention_mask.sum(1) - 1
    return _loss(m, hidden(m, input_ids).gather(1, last.view(-1, 1, 1).expand(-1, 1, HIDDEN)).squeeze(1), whole_classes)


@row(RIGHT, inputs=classified)
def token_by_the_largest_id(m, input_ids, whole_classes):
    """CLIP's text encoder."""
    return _loss(m, hidden(m, input_ids)[torch.arange(input_ids.shape[0]), input_ids.argmax(-1)], whole_classes)


row(RIGHT, inputs=classified, name="tokens picked by index select")(
    lambda m, input_ids, whole_classes: _loss(m, hidden(m, input_ids).index_select(1, torch.tensor([1, 5])).mean(1), whole_classes))
row(RIGHT, inputs=classified, name="tokens picked by a list")(
    lambda m, input_ids, whole_classes: _loss(m, hidden(m, input_ids)[:, [0, 3, 7]].mean(1), whole_classes))


@row(RIGHT, inputs=classified)
def attention_pooling(m, input_ids, whole_classes):
    x = hidden(m, input_ids)
    return _loss(m, (m.score(x).softmax(1) * x).sum(1), whole_classes)


@row(RIGHT, inputs=classified, on_four=True, four=REFUSED)
def attention_pooling_by_a_product(m, input_ids, whole_classes):
    x = hidden(m, input_ids)
    return _loss(m, (m.score(x).softmax(1).transpose(1, 2) @ x).squeeze(1), whole_classes)


@row(RIGHT, inputs=classified)
def weights_of_features_pooled(m, input_ids, whole_classes):
    x = hidden(m, input_ids)
    return _loss(m, (m.score(x).sigmoid() * x).mean(1), whole_classes)


@row(RIGHT, inputs=classified)
def mean_of_masked_tokens_over_all(m, input_ids, whole_classes):
    """`x[mask].mean(0)`."""
    x = hidden(m, input_ids)
    return _loss(m, x[input_ids < 20].mean(0, keepdim=True).expand(BATCH, -1), whole_classes)


row(RIGHT, inputs=classified, name="adaptive pool")(
    lambda m, input_ids, whole_classes: _loss(m, functional.adaptive_avg_pool1d(hidden(m, input_ids).transpose(1, 2), 1).squeeze(-1), whole_classes))
row(REFUSED, inputs=classified, name="adaptive max pool")(
    lambda m, input_ids, whole_classes: _loss(m, functional.adaptive_max_pool1d(hidden(m, input_ids).transpose(1, 2), 1).squeeze(-1), whole_classes))


@row(RIGHT, inputs=classified)
def statistics_of_tokens(m, input_ids, whole_classes):
    x = hidden(m, input_ids)
    return _loss(m, x.mean(1) + x.std(1), whole_classes)


@row(RIGHT, inputs=classified)
def variance_and_mean_of_tokens(m, input_ids, whole_classes):
    x = hidden(m, input_ids)
    variance, mean = torch.var_mean(x, dim=1)
    return _loss(m, variance + mean, whole_classes)


row(RIGHT, inputs=classified, name="norm over tokens")(
    lambda m, input_ids, whole_classes: _loss(m, hidden(m, input_ids).norm(dim=1), whole_classes))


@row(RIGHT, inputs=classified)
def a_global_feature_given_back_to_tokens(m, input_ids, whole_classes):
    """Squeeze and excite: a mean over tokens scales each token."""
    x = hidden(m, input_ids)
    return _loss(m, (x * m.out(x.mean(1, keepdim=True)).sigmoid()).mean(1), whole_classes)


@row(RIGHT, inputs=lambda step: {"input_ids": tokens(step), "labels": tokens(step, 3)})
def tokens_without_their_mean(m, input_ids, labels):
    x = hidden(m, input_ids)
    return functional.cross_entropy(m.head(x - x.mean(1, keepdim=True)).flatten(0, 1), labels.flatten())


@row(RIGHT, inputs=lambda step: {"input_ids": tokens(step), "whole_classes": torch.randint(0, CLASSES, (BATCH,), generator=generator(step, 2))},
     modules={"token": lambda: floats(2, 1, 1, HIDDEN)})
def a_class_token_before_all(m, input_ids, whole_classes):
    x = torch.cat([m.token.expand(input_ids.shape[0], -1, -1), m.embed(input_ids)], dim=1)
    return _loss(m, x[:, 0] + x.mean(1), whole_classes)


@row(RIGHT, inputs=lambda step: {**classified(step), "spans": torch.arange(LENGTH).div(6, rounding_mode="floor").repeat(BATCH, 1)})
def means_of_spans_by_scatter(m, input_ids, spans, whole_classes):
    x = hidden(m, input_ids)
    sums = torch.zeros(BATCH, 4, HIDDEN).scatter_add(1, spans.unsqueeze(-1).expand(-1, -1, HIDDEN), x)
    return _loss(m, sums.relu().mean(1), whole_classes)


@row(RIGHT, inputs=lambda step: {**classified(step), "spans": torch.arange(LENGTH).div(6, rounding_mode="floor").repeat(BATCH, 1)})
def means_of_spans_by_one_hot(m, input_ids, spans, whole_classes):
    x = hidden(m, input_ids)
    sums = functional.one_hot(spans, 4).float().transpose(1, 2) @ x
    return _loss(m, sums.relu().mean(1), whole_classes)


row(RIGHT, inputs=classified, name="embedding bag of a sample")(
    lambda m, input_ids, whole_classes: _loss(m, functional.embedding_bag(input_ids, m.embed.weight, mode="mean"), whole_classes))
row(REFUSED, inputs=classified, modules={"gru": lambda: nn.GRU(HIDDEN, HIDDEN, batch_first=True)}, name="last state of a recurrence")(
    lambda m, input_ids, whole_classes: _loss(m, m.gru(m.embed(input_ids))[1].squeeze(0), whole_classes))


@row(RIGHT, inputs=classified)
def flattened_tokens_into_features(m, input_ids, whole_classes):
    """`flatten(1)`: tokens become features."""
    return _loss(m, hidden(m, input_ids).flatten(1).unflatten(1, (HIDDEN, -1)).sum(-1), whole_classes)


@row(RIGHT, inputs=classified)
def sum_of_flattened_samples(m, input_ids, whole_classes):
    """`flatten(1).sum(1)`."""
    pooled = hidden(m, input_ids).square().flatten(1).sum(1)
    return _loss(m, pooled[:, None] * m.out.bias, whole_classes)


@row(RIGHT, inputs=classified)
def mean_of_flattened_samples(m, input_ids, whole_classes):
    pooled = hidden(m, input_ids).square().reshape(BATCH, -1).mean(1)
    return _loss(m, pooled[:, None] * m.out.bias, whole_classes)


row(RIGHT, inputs=classified, name="largest of flattened samples")(
    lambda m, input_ids, whole_classes: _loss(m, hidden(m, input_ids).flatten(1).amax(1)[:, None] * m.out.bias, whole_classes))
