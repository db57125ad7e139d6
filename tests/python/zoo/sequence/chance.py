"""Random numbers that a program draws, for tokens and for decisions."""
import torch

from .table import BATCH, HIDDEN, LENGTH, RIGHT, attend, generator, hidden, language, loss_of, row


@row(RIGHT, lambda step: {**language(step), "noise": torch.rand(BATCH, LENGTH, generator=generator(step, 9))})
def tokens_dropped_by_given_noise(m, input_ids, labels, noise):
    x = m.embed(input_ids) * (noise > 0.3).float()[..., None] / 0.7
    return loss_of(m.head(x + attend(m, x)), labels)


@row(RIGHT)
def a_decision_by_a_random_number(m, input_ids, labels):
    x = m.embed(input_ids)
    for _ in range(6):
        if torch.rand(1).item() < 0.5:
            x = x + attend(m, x) * 0.0
    return loss_of(m.head(x), labels)


@row(RIGHT)
def a_decision_by_a_random_tensor(m, input_ids, labels):
    x = m.embed(input_ids)
    for _ in range(6):
        if torch.rand([]) < 0.5:
            x = x + attend(m, x) * 0.0
    return loss_of(m.head(x), labels)


@row(RIGHT)
def a_decision_by_randint(m, input_ids, labels):
    x = m.embed(input_ids)
    for _ in range(int(torch.randint(1, 6, (1,)))):
        x = x + attend(m, x) * 0.0
    return loss_of(m.head(x), labels)


@row(RIGHT)
def a_decision_by_bernoulli_and_randperm(m, input_ids, labels):
    x = m.embed(input_ids)
    for layer in torch.randperm(5).tolist():
        if layer % 2 and torch.bernoulli(torch.tensor(0.5)):
            x = x + attend(m, x) * 0.0
        elif layer:
            x = x + hidden(m, input_ids).mean(1, keepdim=True) * 0.0
    return loss_of(m.head(x), labels)


@row(RIGHT)
def noise_of_a_sample_shared_by_tokens(m, input_ids, labels):
    noise = torch.randn(BATCH, 1, HIDDEN)
    x = m.embed(input_ids) + noise
    total = (x - m.embed(input_ids)).mean(1)
    return loss_of(m.head(m.embed(input_ids)), labels), {"zero": (total - noise[:, 0]).abs().max() > 1e-4}
