"""Losses as papers and trainers write them, and states that are kept between steps."""
import torch
from torch import nn
from torch.nn import functional

from .table import CLASSES, HIDDEN, REFUSED, RIGHT, VOCABULARY, heads, hidden, joined, logits, loss_of, row, words


@row(RIGHT)
def mean_of_means_of_chunks(m, input_ids, labels):
    h = hidden(m, input_ids)
    losses = [loss_of(m.head(a), b) for a, b in zip(h.chunk(3, 1), input_ids.chunk(3, 1))]
    losses[0] = losses[0] * 2
    return sum(losses) / 3


@row(RIGHT)
def mean_of_means_of_splits_of_ignored_labels(m, input_ids, labels):
    scores = logits(m, input_ids)
    parts = list(zip(scores.split(8, dim=1), labels.split(8, dim=1)))
    return torch.stack([loss_of(a, b.masked_fill(b < 0, 1)) for a, b in parts]).mean()


@row(RIGHT)
def loss_of_each_sample_in_a_loop(m, input_ids, labels):
    scores = logits(m, input_ids)
    return sum(functional.cross_entropy(scores[i], labels[i]) for i in range(scores.shape[0])) / scores.shape[0]


@row(RIGHT)
def loss_of_each_sample_s_selected_tokens(m, input_ids, labels):
    scores = logits(m, input_ids)
    total = 0.0
    for i in range(scores.shape[0]):
        kept = labels[i] != -100
        total = total + functional.cross_entropy(scores[i][kept], labels[i][kept])
    return total / scores.shape[0]


@row(RIGHT)
def loss_of_each_sample_then_worst_sample(m, input_ids, labels):
    each = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), labels, reduction="none")
    kept = (labels != -100).float()
    return ((each * kept).sum(1) / kept.sum(1)).max()


@row(RIGHT, modules={"w": lambda: torch.rand(VOCABULARY)})
def label_smoothing_with_class_weights(m, input_ids, labels):
    weight = torch.linspace(0.1, 2, VOCABULARY)
    return loss_of(logits(m, input_ids), labels, weight=weight, label_smoothing=0.1)


@row(RIGHT)
def label_smoothing_without_reduction(m, input_ids, labels):
    losses = loss_of(logits(m, input_ids), labels, label_smoothing=0.2, reduction="none")
    return losses[labels.flatten() != -100].mean()


@row(RIGHT)
def selected_losses_topk_of_a_sample(m, input_ids, labels):
    losses = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), input_ids, reduction="none")
    return losses.topk(5, dim=1).values.mean()


@row(RIGHT)
def clipped_ratio_with_whole_old_log_probabilities(m, input_ids, labels):
    logp = logits(m, input_ids).log_softmax(-1).gather(-1, input_ids[..., None])[..., 0]
    ratio = (logp - logp.detach() + 0.05).exp()
    advantage = torch.tensor([1.0, -1.0, 0.5])[:, None]
    mask = (labels != -100).float()
    loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.02) * advantage)
    return ((loss * mask).sum(1) / mask.sum(1)).mean(), {"clipped": ((ratio > 1.02).float() * mask).sum() / mask.sum()}


@row(REFUSED)
def advantages_whitened_in_no_grad(m, input_ids, labels):
    h = hidden(m, input_ids)
    values = m.score(h)[..., 0]
    mask = (labels != -100)
    with torch.no_grad():
        advantage = input_ids.float() - values
        advantage = (advantage - advantage[mask].mean()) / (advantage[mask].std() + 1e-6)
    return -(advantage * values * mask).sum() / mask.sum()


@row(RIGHT, tolerance=2e-4)
def advantages_whitened_by_sums_in_no_grad(m, input_ids, labels):
    values = m.score(hidden(m, input_ids))[..., 0]
    mask = (labels != -100).float()
    with torch.no_grad():
        a = input_ids.float() - values
        mean = (a * mask).sum() / mask.sum()
        a = (a - mean) * (((a - mean).square() * mask).sum() / (mask.sum() - 1)).rsqrt()
    return -(a * values * mask).sum() / mask.sum(), {"mean": mean}


@row(REFUSED, words)
def span_extraction(m, input_ids):
    scores = m.score(hidden(m, input_ids))[..., 0]
    return functional.cross_entropy(scores, torch.tensor([3, 20, 14]))


@row(REFUSED, words)
def span_extraction_as_transformers_write_it(m, input_ids):
    scores = m.score(hidden(m, input_ids))[..., 0]
    ignored = scores.size(1)
    return functional.cross_entropy(scores, torch.tensor([3, 20, 14]).clamp(0, ignored), ignore_index=ignored)


@row(REFUSED, words)
def a_pointer_by_log_softmax_of_merged_tokens(m, input_ids):
    scores = m.score(hidden(m, input_ids)).flatten()
    return -scores.log_softmax(0)[5]


@row(RIGHT, words)
def binary_relevance_of_tokens_then_noisy_or(m, input_ids):
    p = torch.sigmoid(m.score(hidden(m, input_ids))[..., 0])
    none = (1 - p).log().sum(1).exp()
    return functional.binary_cross_entropy(1 - none * 0.999, torch.tensor([1.0, 0.0, 1.0]))


@row(RIGHT)
def totals_weighted_by_themselves(m, input_ids, labels):
    h = hidden(m, input_ids)
    totals = torch.stack([loss_of(m.head(h), labels), h.square().mean(), m.score(h).mean()])
    return (totals * totals.softmax(0)).sum() + totals.exp().mean().log()


@row(RIGHT)
def total_normalized_by_itself_detached(m, input_ids, labels):
    loss = loss_of(logits(m, input_ids), labels)
    other = hidden(m, input_ids).abs().mean()
    return loss / loss.detach() + other * (loss.detach() / other.detach()) + loss.exp().log1p()


@row(RIGHT)
def cosine_similarity_of_tokens_with_merged_targets(m, input_ids, labels):
    h = hidden(m, input_ids)
    e = m.embed(input_ids)
    flat = functional.cosine_embedding_loss(h.flatten(0, 1), e.flatten(0, 1), torch.ones(h.shape[0] * h.shape[1]))
    return flat


@row(RIGHT)
def margins_of_tokens(m, input_ids, labels):
    h = hidden(m, input_ids)
    a, b = m.score(h)[..., 0], m.score(m.embed(input_ids))[..., 0]
    target = (input_ids % 2 * 2 - 1).float()
    all_classes = torch.ones(CLASSES).expand(h.shape[0] * h.shape[1], -1)
    return (functional.margin_ranking_loss(a, b, target, margin=0.3) + functional.hinge_embedding_loss(a, target) + functional.huber_loss(a, b, delta=0.4) +
            functional.triplet_margin_loss(h, m.embed(input_ids), m.out(h)) + functional.multilabel_soft_margin_loss(m.classes(h).flatten(0, 1), all_classes))


row(REFUSED, modules={"adaptive": lambda: nn.AdaptiveLogSoftmaxWithLoss(HIDDEN, VOCABULARY, [10, 20])}, name="an adaptive softmax of tokens")(
    lambda m, input_ids, labels: m.adaptive(hidden(m, input_ids).flatten(0, 1), input_ids.flatten()).loss)


@row(RIGHT)
def a_balancing_loss_and_the_variation_of_importance(m, input_ids, labels):
    h = hidden(m, input_ids)
    p = m.classes(h).softmax(-1)
    importance = p.sum((0, 1))
    load = functional.one_hot(p.argmax(-1), CLASSES).sum((0, 1)).float()
    cv = importance.var() / importance.mean().square() + load.var() / load.mean().square()
    aux = (p.mean((0, 1)) * load / load.sum()).sum() * CLASSES
    return loss_of(m.head(h), labels) + 0.1 * cv + 0.1 * aux + 0.01 * m.classes(h).logsumexp(-1).square().mean()


@row(RIGHT)
def entropy_of_the_mean_of_probabilities(m, input_ids, labels):
    p = m.classes(hidden(m, input_ids)).softmax(-1).view(-1, CLASSES)
    mean = p.mean(0)
    return (mean * mean.log()).sum() - (p * p.log()).sum(-1).mean()


@row(RIGHT)
def barlow_twins_of_tokens(m, input_ids, labels):
    h = hidden(m, input_ids).flatten(0, 1)
    a, b = m.classes(h), m.classes(m.norm(h))
    a, b = a - a.mean(0), b - b.mean(0)
    a, b = a / a.square().mean(0).sqrt(), b / b.square().mean(0).sqrt()
    c = a.T @ b / a.shape[0]
    return (c - torch.eye(CLASSES)).square().sum()


@row(RIGHT, tolerance=2e-4)
def vicreg_of_pooled_tokens(m, input_ids, labels):
    h = hidden(m, input_ids)
    z = m.classes(h.mean(1))
    z = z - z.mean(0)
    cov = z.T @ z / (z.shape[0] - 1)
    return functional.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() + cov.square().sum() - cov.diagonal().square().sum()


@row(RIGHT, four=REFUSED)
def info_nce_of_each_token_against_all_of_its_sample(m, input_ids, labels):
    h = functional.normalize(hidden(m, input_ids), dim=-1)
    sim = torch.bmm(h, h.transpose(1, 2))
    return functional.cross_entropy(sim.flatten(0, 1), torch.arange(h.shape[1]).repeat(h.shape[0]))


@row(RIGHT, modules={"queue_": lambda: torch.zeros(1)}, on_four=False, keeps_state=True)
def a_queue_that_is_a_buffer(m, input_ids, labels):
    if not hasattr(m, "queue"):
        m.queue = torch.ones(8, CLASSES)
    z = functional.normalize(m.classes(hidden(m, input_ids).mean(1)), dim=-1)
    loss = (z @ m.queue.T).logsumexp(-1).mean()
    m.queue = torch.cat([z.detach(), m.queue])[:8]
    return loss + m.queue_.sum(), {"queue": m.queue.sum()}


@row(RIGHT, keeps_state=True)
def hidden_states_of_the_step_before(m, input_ids, labels):
    h = hidden(m, input_ids)
    before = getattr(m, "memory", None)
    m.memory = h.detach()
    loss = loss_of(m.head(h), labels)
    return loss + ((h - before).square().mean() if before is not None else 0.0)


@row(RIGHT)
def a_transformer_xl_memory_of_the_step_before(m, input_ids, labels):
    x = m.embed(input_ids)
    before = getattr(m, "memory", None)
    m.memory = x.detach()
    keys = x if before is None else torch.cat([before, x], 1)
    q, k, v = m.qkv(x).chunk(3, -1)[0], *m.qkv(keys).chunk(3, -1)[1:]
    y = functional.scaled_dot_product_attention(heads(q), heads(k), heads(v))
    return loss_of(m.head(x + m.out(joined(y))), labels)
