"""Numbers that a program prints beside its loss, and sums over tokens that it keeps."""
import math

import torch
from torch.nn import functional

from .table import BATCH, CLASSES, HIDDEN, REFUSED, RIGHT, VOCABULARY, hidden, logits, loss_of, row


@row(RIGHT)
def metrics_of_many_kinds(m, input_ids, labels):
    scores = logits(m, input_ids)
    loss = loss_of(scores, labels)
    with torch.no_grad():
        guess, kept = scores.argmax(-1), labels != -100
        right = (guess == labels) & kept
        top5 = (scores.topk(5, -1).indices == labels[..., None]).any(-1)
        told = {"accuracy": right.sum() / kept.sum(), "by items": right.sum().item() / kept.sum().item(), "top5": top5[kept].float().mean(),
                "exact": (right | ~kept).all(1).float().mean(), "perplexity": math.exp(loss.item()), "correct": (guess == labels)[kept].float().mean(),
                "true positives": ((guess % 2 == 1) & (labels % 2 == 1) & kept).sum(), "any": right.any(), "per sample": right.sum(1).float() / kept.sum(1),
                "confidence": scores.softmax(-1).amax(-1)[kept].mean()}
    return loss, told


@row(RIGHT)
def accuracy_by_counting_what_is_selected(m, input_ids, labels):
    scores = logits(m, input_ids)
    kept = labels != -100
    right = (scores.argmax(-1) == labels)[kept]
    return loss_of(scores, labels), {"accuracy": right.sum().item() / right.numel()}


@row(RIGHT)
def accuracy_by_the_length_of_nonzero(m, input_ids, labels):
    scores = logits(m, input_ids)
    right = (scores.argmax(-1) % 2 == labels % 2).nonzero()
    return loss_of(scores, labels), {"right": len(right)}


@row(RIGHT)
def a_confusion_matrix_by_bincount(m, input_ids, labels):
    scores = m.classes(hidden(m, input_ids))
    target = input_ids % CLASSES
    pairs = (target * CLASSES + scores.argmax(-1)).flatten()
    return loss_of(scores, target), {"confusion": torch.bincount(pairs, minlength=CLASSES ** 2)}


@row(RIGHT)
def calibration_bins(m, input_ids, labels):
    scores = m.classes(hidden(m, input_ids))
    target, told = input_ids % CLASSES, 0.0
    with torch.no_grad():
        sure, guess = scores.softmax(-1).max(-1)
        for low in torch.linspace(0, 0.9, 10).tolist():
            inside = (sure > low) & (sure <= low + 0.1)
            if inside.any():
                told = told + (sure[inside].mean() - (guess == target)[inside].float().mean()).abs() * inside.float().mean()
    return loss_of(scores, target), {"calibration": told}


@row(REFUSED)
def sums_and_means_into_given_tensors(m, input_ids, labels):
    h = hidden(m, input_ids)
    with torch.no_grad():
        total, mean = torch.empty(BATCH, HIDDEN), torch.empty(BATCH, HIDDEN)
        torch.sum(h, 1, out=total)
        torch.mean(h, 1, out=mean)
    return loss_of(m.head(h), labels), {"total": total, "mean": mean}


@row(REFUSED)
def a_maximum_into_a_given_tensor(m, input_ids, labels):
    h = hidden(m, input_ids)
    with torch.no_grad():
        largest = torch.empty(BATCH, HIDDEN)
        torch.amax(h, 1, out=largest)
    return loss_of(m.head(h), labels), {"largest": largest}


@row(REFUSED)
def a_product_into_a_given_tensor(m, input_ids, labels):
    h = hidden(m, input_ids)
    with torch.no_grad():
        gram = torch.empty(BATCH, HIDDEN, HIDDEN)
        torch.bmm(h.transpose(1, 2), h, out=gram)
    return loss_of(m.head(h), labels), {"gram": gram}


@row(RIGHT)
def numbers_written_into_a_buffer(m, input_ids, labels):
    h = hidden(m, input_ids)
    with torch.no_grad():
        seen = torch.zeros(HIDDEN)
        seen += h.sum((0, 1))
        seen.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
        other = torch.zeros(2, HIDDEN)
        other[0] = h.mean((0, 1))
        other[1].copy_(h.square().mean((0, 1)))
        ema = torch.zeros(HIDDEN).lerp_(h.mean((0, 1)), 0.3)
    return loss_of(m.head(h), labels), {"seen": seen, "other": other, "ema": ema}


@row(REFUSED)
def sums_of_ids_by_index_add_without_gradients(m, input_ids, labels):
    h = hidden(m, input_ids)
    with torch.no_grad():
        sums = torch.zeros(VOCABULARY, HIDDEN).index_add_(0, input_ids.flatten(), h.flatten(0, 1))
    return loss_of(m.head(h), labels), {"sums": sums}


@row(RIGHT)
def sums_of_ids_by_scatter_reduce(m, input_ids, labels):
    h = m.score(hidden(m, input_ids)).flatten()
    means = torch.zeros(VOCABULARY).scatter_reduce(0, input_ids.flatten(), h, "mean", include_self=False)
    return means.square().sum()


@row(REFUSED)
def sums_of_ids_by_bincount_with_weights(m, input_ids, labels):
    h = hidden(m, input_ids)
    with torch.no_grad():
        loads = torch.bincount(input_ids.flatten(), weights=m.score(h).flatten().double(), minlength=VOCABULARY)
    return loss_of(m.head(h), labels), {"loads": loads}


@row(REFUSED)
def sums_of_ids_by_index_put_accumulate(m, input_ids, labels):
    h = hidden(m, input_ids)
    sums = torch.zeros(VOCABULARY, HIDDEN).index_put((input_ids.flatten(),), h.flatten(0, 1), accumulate=True)
    return sums.square().mean()


@row(REFUSED)
def sums_by_addmm_and_addbmm(m, input_ids, labels):
    h = hidden(m, input_ids)
    flat = h.flatten(0, 1)
    gram = torch.addmm(torch.eye(HIDDEN), flat.T, flat, alpha=0.01)
    return gram.square().mean() + torch.addbmm(torch.eye(HIDDEN), h.transpose(1, 2), h, alpha=0.01).mean()


@row(REFUSED)
def centroids_by_products_without_gradients(m, input_ids, labels):
    h = hidden(m, input_ids)
    with torch.no_grad():
        flat = h.reshape(-1, HIDDEN)
        assigned = functional.one_hot(torch.cdist(flat, m.classes.weight).argmin(-1), CLASSES).float()
        size, total = assigned.sum(0), assigned.t() @ flat
    return loss_of(m.head(h), labels), {"size": size, "total": total}


@row(RIGHT)
def a_quantizer_s_scale_by_the_largest(m, input_ids, labels):
    h = hidden(m, input_ids)
    scale = h.detach().abs().max() / 127
    q = h + ((h / scale).round() * scale - h).detach()
    return loss_of(m.head(q), labels)


@row(RIGHT)
def a_quantizer_s_scale_by_item(m, input_ids, labels):
    h = hidden(m, input_ids)
    scale = h.detach().abs().mean().item() / 10
    return loss_of(m.head(h + ((h / scale).round() * scale - h).detach()), labels)


@row(REFUSED)
def fake_quantization_per_tensor(m, input_ids, labels):
    h = hidden(m, input_ids)
    return loss_of(m.head(torch.fake_quantize_per_tensor_affine(h, 0.05, 0, -128, 127)), labels)


row(RIGHT, name="number of selected labels")(
    lambda m, input_ids, labels: (loss_of(logits(m, input_ids), labels), {"targets": len(labels[labels > 0]), "numel": labels[labels > 0].numel()}))


@row(RIGHT)
def number_of_predictions(m, input_ids, labels):
    scores = logits(m, input_ids)
    guess = scores.argmax(-1)
    return loss_of(scores, labels), {"share": (guess == input_ids).sum().item() / guess.numel()}


@row(RIGHT)
def share_by_the_shape(m, input_ids, labels):
    scores = logits(m, input_ids)
    b, s = input_ids.shape
    return loss_of(scores, labels), {"share": (scores.argmax(-1) == input_ids).sum().item() / (b * s)}


@row(RIGHT)
def means_for_a_share_of_predictions(m, input_ids, labels):
    scores = logits(m, input_ids)
    return loss_of(scores, labels), {"share": (scores.argmax(-1) == input_ids).float().mean()}
