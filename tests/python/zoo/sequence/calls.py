"""Steps that cut something else than ids and labels, or nothing at all."""
import torch
from torch.nn import functional

from .table import BATCH, HIDDEN, LENGTH, REFUSED, RIGHT, attend, floats, generator, hidden, language, logits, loss_of, padded, program, tokens


@program(RIGHT, forward=lambda m, x, t: functional.cross_entropy(m.head(hidden(m, x)).permute(0, 2, 1), t) + m.score(hidden(m, x)).mean())
def a_forward_without_gradients_before_each(model, cut, step):
    part = cut(**language(step))
    with torch.no_grad():
        before = model(part["input_ids"], part["labels"])
    return model(part["input_ids"], part["labels"]), {"before": before}


@program(RIGHT, forward=lambda m, x: hidden(m, x), stage=1)
def results_without_gradients_as_the_target(model, cut, step):
    part = cut(**language(step))
    with torch.no_grad():
        target = model(part["input_ids"]).detach().roll(1, -1)
    h = model(part["input_ids"])
    return 1 - functional.cosine_similarity(h, target, dim=-1).mean() + (h.mean((0, 1)) - target.mean((0, 1))).norm()


@program(RIGHT, forward=lambda m, x, e: m.classes(m.embed(x) + e + attend(m, m.embed(x) + e)).square().mean())
def adversarial_embeddings(model, cut, step):
    ids = cut(input_ids=tokens(step))["input_ids"]
    delta = torch.zeros(*ids.shape, HIDDEN, requires_grad=True)
    return model(ids, delta)


@program(RIGHT, forward=lambda m, **named: logits(m, named["input_ids"]))
def as_many_classes_of_samples_as_tokens(model, cut, step):
    scores = model(input_ids=cut(input_ids=tokens(step))["input_ids"]).mean(1)[:, :LENGTH]
    return functional.binary_cross_entropy_with_logits(scores, (floats(step, BATCH, LENGTH) > 0).float())


def _of_many_classes(m, input_ids, labels):
    return functional.binary_cross_entropy_with_logits(logits(m, input_ids).mean(1)[:, :LENGTH], labels)


program(REFUSED, forward=_of_many_classes, name="nothing cut and labels of as many classes as tokens")(
    lambda model, cut, step: model(input_ids=tokens(step), labels=(floats(step, BATCH, LENGTH) > 0).float()))


@program(RIGHT, forward=lambda m, input_ids, labels: functional.cross_entropy(m.classes(hidden(m, input_ids)[:, 0]), labels))
def nothing_cut_and_labels_of_samples(model, cut, step):
    return model(input_ids=tokens(step), labels=torch.tensor([1, 0, 3]))


@program(RIGHT, forward=lambda m, input_ids, labels, attention_mask: loss_of(logits(m, input_ids), labels))
def nothing_cut_and_the_engine_cuts_all(model, cut, step):
    return model(**padded(step))


def _weighted(m, input_ids, labels, token_weights):
    losses = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), labels, reduction="none")
    return (losses * token_weights).sum() / 30


program(RIGHT, forward=_weighted, name="nothing cut and a tensor of another name")(
    lambda model, cut, step: model(**language(step), token_weights=torch.rand(BATCH, LENGTH, generator=generator(step, 5))))
