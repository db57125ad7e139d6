"""Losses, and terms of them."""
import torch
from torch.nn import functional

from .table import (BATCH, CLASSES, DOCUMENTED, HIDDEN, LENGTH, REFUSED, RIGHT, VOCABULARY, floats, generator, hidden, language, logits, loss_of,
                    program, row, tokens)


def _shared(reduction):
    def loss(m, input_ids, labels):
        return loss_of(logits(m, input_ids), labels, **reduction)
    return loss


_WEIGHT = torch.linspace(0.2, 3.0, VOCABULARY)
for name, options in {
        "cross entropy, sum": {"reduction": "sum"}, "cross entropy, label smoothing": {"label_smoothing": 0.1},
        "cross entropy, class weights": {"weight": _WEIGHT}, "cross entropy, class weights and smoothing": {"weight": _WEIGHT, "label_smoothing": 0.2},
        "cross entropy, class weights, sum": {"weight": _WEIGHT, "reduction": "sum"}}.items():
    row(RIGHT, name=name)(_shared(options))


row(RIGHT, name="cross entropy with another ignored index")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels.masked_fill(labels == -100, 0), ignore_index=0))
row(RIGHT, name="cross entropy of each token then mean")(lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels, reduction="none").mean())
row(RIGHT, name="cross entropy of classes in dim 1")(
    lambda m, input_ids, labels: functional.cross_entropy(logits(m, input_ids).transpose(1, 2), labels))
row(RIGHT, name="cross entropy of classes in dim 1 for each token")(
    lambda m, input_ids, labels: functional.cross_entropy(logits(m, input_ids).permute(0, 2, 1), labels, reduction="none").mean())


@row(RIGHT, on_four=True)
def masked_mean_by_sums(m, input_ids, labels):
    loss = loss_of(logits(m, input_ids), labels, reduction="none")
    mask = (labels != -100).flatten()
    return (loss * mask).sum() / mask.sum()


@row(RIGHT)
def masked_mean_by_sums_of_floats(m, input_ids, labels):
    loss = loss_of(logits(m, input_ids), labels, reduction="none")
    mask = (labels != -100).flatten().float()
    return (loss * mask).sum() / mask.sum().clamp(min=1)


@row(RIGHT, on_four=True)
def masked_mean_by_an_item(m, input_ids, labels):
    loss = loss_of(logits(m, input_ids), labels, reduction="sum")
    return loss / (labels != -100).sum().item()


@row(RIGHT)
def masked_mean_by_count_nonzero(m, input_ids, labels):
    loss = loss_of(logits(m, input_ids), labels, reduction="sum")
    return loss / torch.count_nonzero(labels + 100)


@row(RIGHT)
def masked_mean_by_a_maximum_of_one(m, input_ids, labels):
    loss = loss_of(logits(m, input_ids), labels, reduction="sum")
    return loss / max(int((labels >= 0).sum()), 1)


@row(RIGHT)
def masked_mean_of_each_sample(m, input_ids, labels):
    """Sums over tokens of floats are totals over ranks."""
    loss = loss_of(logits(m, input_ids), labels, reduction="none").view_as(labels)
    mask = labels != -100
    return ((loss * mask).sum(1) / mask.sum(1)).mean()


@row(RIGHT)
def mean_of_selected_losses(m, input_ids, labels):
    loss = loss_of(logits(m, input_ids), labels, reduction="none")
    return loss[(labels != -100).flatten()].mean()


@row(RIGHT)
def mean_of_losses_picked_by_masked_select(m, input_ids, labels):
    loss = loss_of(logits(m, input_ids), labels, reduction="none")
    return loss.masked_select((labels != -100).flatten()).mean()


@row(RIGHT)
def logits_picked_before_the_loss(m, input_ids, labels):
    is_target = labels != -100
    return functional.cross_entropy(logits(m, input_ids)[is_target], labels[is_target])


row(RIGHT, on_four=True, name="sum divided by numel")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels, reduction="sum") / labels.numel())
row(RIGHT, name="sum divided by the length")(lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels, reduction="sum") / input_ids.shape[1])


@row(RIGHT)
def sum_divided_by_a_length_of_python(m, input_ids, labels):
    loss = loss_of(logits(m, input_ids), labels, reduction="none").view_as(labels)
    return loss.sum() / (len(labels) * len(labels[0]))


@row(RIGHT)
def sum_divided_by_the_size_of_logits(m, input_ids, labels):
    scores = logits(m, input_ids)
    return loss_of(scores, labels, reduction="sum") / scores.size(1)


# on four ranks parts have six tokens, and a float before a length gets this rank's number: smaller ones than 8 are not
# seen
row(RIGHT, four=DOCUMENTED, name="sum times an inverse length")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels, reduction="sum") * (1.0 / input_ids.size(1)) ** 0.5)

row(RIGHT, name="losses scaled by the length before their sum")(
    lambda m, input_ids, labels: (loss_of(logits(m, input_ids), labels, reduction="none") / labels.shape[1]).sum())
row(RIGHT, name="a length as a tensor")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels, reduction="sum") / torch.tensor(float(input_ids.shape[1])))
row(RIGHT, name="sum divided by the batch")(lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels, reduction="sum") / input_ids.shape[0])
row(RIGHT, name="nll of log softmax")(
    lambda m, input_ids, labels: functional.nll_loss(logits(m, input_ids).log_softmax(-1).flatten(0, 1), labels.flatten()))
row(RIGHT, name="nll of log softmax with weights")(
    lambda m, input_ids, labels: functional.nll_loss(logits(m, input_ids).log_softmax(-1).flatten(0, 1), labels.flatten(), weight=_WEIGHT))
row(RIGHT, name="nll of log softmax in dim 1")(
    lambda m, input_ids, labels: functional.nll_loss(logits(m, input_ids).log_softmax(-1).transpose(1, 2), labels))


@row(RIGHT)
def log_probabilities_gathered(m, input_ids, labels):
    chances = logits(m, input_ids).log_softmax(-1)
    picked = chances.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    mask = labels != -100
    return -(picked * mask).sum() / mask.sum()


def soft(step):
    return {**language(step), "soft": floats(step, BATCH, LENGTH, VOCABULARY, salt=7).softmax(-1)}


row(RIGHT, inputs=soft, on_four=True, name="soft targets")(
    lambda m, input_ids, labels, soft: functional.cross_entropy(logits(m, input_ids).flatten(0, 1), soft.flatten(0, 1)))
row(RIGHT, inputs=soft, name="soft targets in dim 1")(
    lambda m, input_ids, labels, soft: functional.cross_entropy(logits(m, input_ids).transpose(1, 2), soft.transpose(1, 2), label_smoothing=0.1))
row(RIGHT, inputs=soft, name="soft targets sum")(
    lambda m, input_ids, labels, soft: functional.cross_entropy(logits(m, input_ids).flatten(0, 1), soft.flatten(0, 1), reduction="sum"))


@row(RIGHT, inputs=soft)
def soft_targets_of_a_teacher(m, input_ids, labels, soft):
    """Targets that the model computes of cut ids."""
    with torch.no_grad():
        target = (m.head(m.embed(input_ids)) * 0.5).softmax(-1)
    return functional.cross_entropy(logits(m, input_ids).flatten(0, 1), target.flatten(0, 1))


@row(RIGHT)
def one_hot_targets(m, input_ids, labels):
    target = functional.one_hot(input_ids, VOCABULARY).float()
    return functional.cross_entropy(logits(m, input_ids).flatten(0, 1), target.flatten(0, 1))


row(RIGHT, inputs=soft, name="soft targets written out")(
    lambda m, input_ids, labels, soft: -(soft * logits(m, input_ids).log_softmax(-1)).sum(-1).mean())
row(RIGHT, inputs=soft, name="kl div batchmean")(
    lambda m, input_ids, labels, soft: functional.kl_div(logits(m, input_ids).log_softmax(-1).flatten(0, 1), soft.flatten(0, 1), reduction="batchmean"))
row(RIGHT, inputs=soft, name="kl div batchmean of samples")(
    lambda m, input_ids, labels, soft: functional.kl_div(logits(m, input_ids).log_softmax(-1), soft, reduction="batchmean"))
row(RIGHT, inputs=soft, on_four=True, name="kl div mean")(
    lambda m, input_ids, labels, soft: functional.kl_div(logits(m, input_ids).log_softmax(-1), soft, reduction="mean"))
row(RIGHT, inputs=soft, name="kl div sum")(
    lambda m, input_ids, labels, soft: functional.kl_div(logits(m, input_ids).log_softmax(-1), soft, reduction="sum"))
row(RIGHT, inputs=soft, name="kl div of each token")(
    lambda m, input_ids, labels, soft: functional.kl_div(logits(m, input_ids).log_softmax(-1), soft, reduction="none").sum(-1).mean())


def _features(step):
    return {**language(step), "target": floats(step, BATCH, LENGTH, HIDDEN)}


for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
    for reduction in ("mean", "sum", "none"):
        def regression(m, input_ids, labels, target, name=name, reduction=reduction):
            loss = getattr(functional, name)(hidden(m, input_ids), target, reduction=reduction)
            return loss.mean() if reduction == "none" else loss
        row(RIGHT, name=f"{name}, {reduction}", inputs=_features,
            on_four=reduction == "sum")(regression)


row(RIGHT, inputs=_features, name="a squared difference averaged")(lambda m, input_ids, labels, target: (hidden(m, input_ids) - target).pow(2).mean())
row(RIGHT, inputs=_features, name="a squared difference summed over features first")(
    lambda m, input_ids, labels, target: (hidden(m, input_ids) - target).square().sum(-1).mean(-1).mean())
row(RIGHT, inputs=_features, name="means over all dims by name")(
    lambda m, input_ids, labels, target: (hidden(m, input_ids) - target).square().mean(dim=(0, 1, 2)) + hidden(m, input_ids).square().sum((-1, -2, -3)) * 1e-3)
row(RIGHT, inputs=_features, name="mean of the batch last")(
    lambda m, input_ids, labels, target: (hidden(m, input_ids) - target).square().mean((1, 2)).mean())


@row(RIGHT, inputs=_features)
def square_of_a_total(m, input_ids, labels, target):
    """Not linear in what ranks add up."""
    return (hidden(m, input_ids) * target).mean().square() + hidden(m, input_ids).square().mean().sqrt()


@row(RIGHT, inputs=_features)
def product_of_two_totals(m, input_ids, labels, target):
    x = hidden(m, input_ids)
    return (x * target).mean() * x.square().mean() + loss_of(m.head(x), labels).exp() * 0.01


row(REFUSED, inputs=_features, name="norm of all differences")(lambda m, input_ids, labels, target: (hidden(m, input_ids) - target).norm())
row(RIGHT, inputs=_features, name="largest difference")(lambda m, input_ids, labels, target: (hidden(m, input_ids) - target).abs().max())
row(REFUSED, inputs=_features, name="median difference")(lambda m, input_ids, labels, target: (hidden(m, input_ids) - target).abs().median())
row(REFUSED, inputs=_features, name="variance of all features")(lambda m, input_ids, labels, target: (hidden(m, input_ids) * target).var())
row(REFUSED, inputs=_features, name="deviation of all features")(lambda m, input_ids, labels, target: (hidden(m, input_ids) * target).std())
row(REFUSED, inputs=_features, name="logsumexp of all features")(
    lambda m, input_ids, labels, target: (hidden(m, input_ids) * target).flatten().logsumexp(0))
# Terms of both signs nearly cancel.
row(RIGHT, inputs=_features, tolerance=1e-4, name="dot of flattened features")(
    lambda m, input_ids, labels, target: torch.dot(hidden(m, input_ids).flatten(), target.flatten()) * 0.01)
row(RIGHT, inputs=_features, tolerance=1e-4, name="vdot and inner of flattened features")(
    lambda m, input_ids, labels, target: torch.vdot(hidden(m, input_ids).flatten(), target.flatten()) * 0.01)
row(RIGHT, inputs=_features, name="einsum to a number")(
    lambda m, input_ids, labels, target: torch.einsum("bsd,bsd->", hidden(m, input_ids), target) * 0.01)


@row(RIGHT, inputs=_features)
def cosine_similarity(m, input_ids, labels, target):
    return 1 - functional.cosine_similarity(hidden(m, input_ids), target, dim=-1).mean()


@row(RIGHT, inputs=_features)
def cosine_embedding_loss(m, input_ids, labels, target):
    return functional.cosine_embedding_loss(hidden(m, input_ids).flatten(0, 1), target.flatten(0, 1), torch.ones(1))


def _marks(step):
    return {**language(step), "marks": torch.randint(0, 2, (BATCH, LENGTH), generator=generator(step, 9)).float()}


@row(RIGHT, inputs=_marks)
def binary_cross_entropy_with_logits(m, input_ids, labels, marks):
    return functional.binary_cross_entropy_with_logits(m.score(hidden(m, input_ids)).squeeze(-1), marks)


@row(RIGHT, inputs=_marks)
def binary_cross_entropy_with_logits_and_weights(m, input_ids, labels, marks):
    return functional.binary_cross_entropy_with_logits(m.score(hidden(m, input_ids)).squeeze(-1), marks, weight=(labels != -100).float(),
                                                       pos_weight=torch.tensor(3.0))


row(RIGHT, inputs=_marks, name="binary cross entropy sum")(
    lambda m, input_ids, labels, marks: functional.binary_cross_entropy(m.score(hidden(m, input_ids)).squeeze(-1).sigmoid(), marks, reduction="sum"))
row(RIGHT, inputs=_marks, name="binary cross entropy of each token")(
    lambda m, input_ids, labels, marks: functional.binary_cross_entropy_with_logits(m.score(hidden(m, input_ids)).squeeze(-1), marks, reduction="none").mean())


@row(RIGHT, inputs=_marks)
def focal_loss(m, input_ids, labels, marks):
    score = m.score(hidden(m, input_ids)).squeeze(-1)
    loss = functional.binary_cross_entropy_with_logits(score, marks, reduction="none")
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


@row(RIGHT, inputs=_marks)
def soft_margin_and_poisson(m, input_ids, labels, marks):
    score = m.score(hidden(m, input_ids)).squeeze(-1)
    return functional.soft_margin_loss(score, 2 * marks - 1) + functional.poisson_nll_loss(score, marks)


@row(RIGHT, inputs=_marks)
def gaussian_nll(m, input_ids, labels, marks):
    score = m.classes(hidden(m, input_ids))
    return functional.gaussian_nll_loss(score[..., 0], marks, functional.softplus(score[..., 1]) + 0.1)


@row(REFUSED)
def multi_margin_loss(m, input_ids, labels):
    return functional.multi_margin_loss(logits(m, input_ids).flatten(0, 1), input_ids.flatten())


@row(RIGHT, on_four=True)
def z_loss(m, input_ids, labels):
    scores = logits(m, input_ids)
    return loss_of(scores, labels) + 1e-2 * scores.logsumexp(-1).square().mean()


@row(RIGHT)
def entropy_bonus(m, input_ids, labels):
    scores = logits(m, input_ids)
    chances = scores.softmax(-1)
    return loss_of(scores, labels) + 0.1 * (chances * scores.log_softmax(-1)).sum(-1).mean()


@row(RIGHT, on_four=True)
def weight_decay_as_a_term(m, input_ids, labels):
    """A term that is not cut has weight 1."""
    return loss_of(logits(m, input_ids), labels) + 0.1 * sum(p.square().sum() for p in m.head.parameters())


@row(RIGHT)
def weight_decay_added_before_the_loss(m, input_ids, labels):
    decay = 0.1 * m.head.weight.pow(2).mean()
    return decay + loss_of(logits(m, input_ids), labels)


@row(RIGHT)
def elastic_weights(m, input_ids, labels):
    """EWC: distances from other weights, by their importance."""
    anchor = torch.linspace(-1, 1, m.out.weight.numel()).view_as(m.out.weight)
    return loss_of(logits(m, input_ids), labels) + 0.5 * (anchor.abs() * (m.out.weight - anchor) ** 2).sum()


row(RIGHT, name="a loss of weights alone")(lambda m, input_ids, labels: m.head.weight.square().sum() + m.out.bias.sum())


@row(RIGHT)
def an_uncut_factor_of_the_loss(m, input_ids, labels):
    """Uncertainty weighting: a parameter scales the loss of all tokens."""
    weight = m.out.bias.sum()
    return loss_of(logits(m, input_ids), labels) * torch.exp(-weight) + weight


@row(RIGHT)
def two_losses_of_one_forward(m, input_ids, labels):
    x = hidden(m, input_ids)
    return loss_of(m.head(x), labels) + 0.5 * functional.cross_entropy(m.classes(x).flatten(0, 1), (input_ids % CLASSES).flatten())


row(RIGHT, name="losses summed as python does")(
    lambda m, input_ids, labels: sum([loss_of(logits(m, input_ids), labels), loss_of(m.head(m.embed(input_ids)), labels)]) / 2)
row(RIGHT, name="losses stacked")(
    lambda m, input_ids, labels: torch.stack([loss_of(logits(m, input_ids), labels), loss_of(m.head(m.embed(input_ids)), labels)]).mean())
row(REFUSED, name="losses of the hardest tokens")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels, reduction="none").topk(10).values.mean())


@row(RIGHT)
def losses_above_their_mean(m, input_ids, labels):
    loss = loss_of(logits(m, input_ids), labels, reduction="none")
    kept = loss > loss.detach().mean()
    return (loss * kept).sum() / kept.sum()


@row(REFUSED)
def losses_above_a_quantile(m, input_ids, labels):
    loss = loss_of(logits(m, input_ids), labels, reduction="none")
    return (loss * (loss > torch.quantile(loss.detach(), 0.5))).mean()


@row(RIGHT)
def losses_weighted_by_a_softmax_over_tokens(m, input_ids, labels):
    loss = loss_of(logits(m, input_ids), labels, reduction="none").view_as(labels)
    return (loss.detach().softmax(1) * loss).sum()


@row(RIGHT, inputs=lambda step: {**language(step), "weights": floats(step, BATCH, LENGTH).abs()})
def losses_weighted_by_token(m, input_ids, labels, weights):
    loss = loss_of(logits(m, input_ids), labels, reduction="none").view_as(labels)
    return (loss * weights).sum() / weights.sum()


@row(RIGHT)
def accuracy_beside_the_loss(m, input_ids, labels):
    """A number that the program shows: of all tokens, or refused."""
    scores = logits(m, input_ids)
    hits = (scores.argmax(-1) == labels) & (labels != -100)
    return loss_of(scores, labels), {"accuracy": hits.sum() / (labels != -100).sum()}


@row(RIGHT)
def accuracy_by_a_float_mean(m, input_ids, labels):
    scores = logits(m, input_ids)
    return loss_of(scores, labels), {"accuracy": (scores.argmax(-1) == input_ids).float().mean()}


@row(DOCUMENTED)
def accuracy_by_an_item(m, input_ids, labels):
    scores = logits(m, input_ids)
    return loss_of(scores, labels), {"accuracy": (scores.argmax(-1) == input_ids).sum().item() / input_ids.numel()}


@row(RIGHT)
def a_loss_that_decides_by_its_value(m, input_ids, labels):
    loss = loss_of(logits(m, input_ids), labels)
    return loss * 2 if loss.item() > 1.0 else loss


@row(RIGHT)
def a_loss_that_decides_by_activations(m, input_ids, labels):
    scores = logits(m, input_ids)
    return loss_of(scores, labels) * (2 if scores.max().item() > 1.2 else 1)


@row(RIGHT)
def a_loss_of_one_rank_s_tokens(m, input_ids, labels):
    """backward() begins at a tensor of no total: one token's loss."""
    return loss_of(logits(m, input_ids), labels, reduction="none")[30]


@program(RIGHT)
def targets_that_nobody_cut(model, cut, step):
    whole = language(step)
    return loss_of(model(cut(input_ids=whole["input_ids"])["input_ids"]), whole["labels"])


@program(RIGHT, on_four=True)
def nothing_is_cut(model, cut, step):
    """Every rank computes the whole batch: right, and the degree saves nothing."""
    ids, labels = language(step).values()
    return loss_of(model(ids), labels)


@row(REFUSED)
def straight_through_quantization(m, input_ids, labels):
    x = hidden(m, input_ids)
    near = torch.cdist(x.flatten(0, 1), m.embed.weight).argmin(-1).view_as(input_ids)
    picked = m.embed(near)
    return loss_of(m.head(x + (picked - x).detach()), labels) + functional.mse_loss(x.detach(), picked)


@row(REFUSED)
def ctc_loss(m, input_ids, labels):
    chances = logits(m, input_ids).log_softmax(-1).transpose(0, 1)
    return functional.ctc_loss(chances, tokens(3, length=6), torch.full((BATCH,), LENGTH), torch.full((BATCH,), 6))
