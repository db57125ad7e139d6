"""Labels and activations moved by a token, parts of the tokens, tokens at the ends."""
import torch
from torch import nn
from torch.nn import functional

from .table import (BATCH, HIDDEN, LENGTH, REFUSED, RIGHT, VOCABULARY, attend, floats, hidden, logits, loss_of, mlp, padded, program, row, tokens,
                    words)


@row(RIGHT, on_four=True)
def labels_shifted_by_pad(m, input_ids, labels):
    """Hugging Face's since 2025."""
    moved = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return loss_of(logits(m, input_ids), moved)


@row(RIGHT, on_four=True)
def labels_shifted_by_slices(m, input_ids, labels):
    scores = logits(m, input_ids)
    return loss_of(scores[:, :-1], labels[:, 1:])


@row(RIGHT)
def labels_shifted_by_slices_with_ellipsis(m, input_ids, labels):
    scores = logits(m, input_ids)
    return functional.cross_entropy(scores[..., :-1, :].contiguous().view(-1, VOCABULARY), labels[..., 1:].contiguous().view(-1))


row(RIGHT, name="labels shifted by slices with classes in dim 1")(
    lambda m, input_ids, labels: functional.cross_entropy(logits(m, input_ids)[:, :-1].transpose(1, 2), labels[:, 1:]))


@row(RIGHT, on_four=True)
def labels_shifted_by_roll(m, input_ids, labels):
    moved = labels.roll(-1, dims=1)
    moved[:, -1] = -100
    return loss_of(logits(m, input_ids), moved)


row(RIGHT, name="ids shifted by roll")(lambda m, input_ids, labels: loss_of(logits(m, input_ids), input_ids.roll(-1, 1)))
row(RIGHT, name="ids shifted by pad")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), functional.pad(input_ids[:, 1:], (0, 1), value=-100)))


@row(RIGHT, on_four=True)
def ids_shifted_by_cat(m, input_ids, labels):
    ends = torch.full((input_ids.shape[0], 1), -100)
    return loss_of(logits(m, input_ids), torch.cat([input_ids[:, 1:], ends], dim=1))


row(RIGHT, name="ids shifted by new full")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), torch.cat([input_ids[:, 1:], input_ids.new_full((input_ids.shape[0], 1), -100)], 1)))


@row(RIGHT)
def ids_shifted_in_place(m, input_ids, labels):
    """`shifted[:, :-1] = ids[:, 1:]`."""
    moved = torch.full_like(input_ids, -100)
    moved[:, :-1] = input_ids[:, 1:]
    return loss_of(logits(m, input_ids), moved)


@row(RIGHT)
def ids_shifted_to_the_right(m, input_ids, labels):
    """T5's and BART's decoder inputs."""
    inputs = input_ids.new_zeros(input_ids.shape)
    inputs[:, 1:] = input_ids[:, :-1].clone()
    inputs[:, 0] = 2
    return loss_of(logits(m, inputs), labels)


row(RIGHT, name="ids shifted to the right by pad")(
    lambda m, input_ids, labels: loss_of(logits(m, functional.pad(input_ids[:, :-1], (1, 0), value=2)), labels))
row(RIGHT, name="ids shifted to the right by cat")(
    lambda m, input_ids, labels: loss_of(logits(m, torch.cat([torch.full((input_ids.shape[0], 1), 2), input_ids[:, :-1]], 1)), labels))


@row(RIGHT, on_four=True)
def logits_against_the_next_ids(m, input_ids, labels):
    """nanoGPT's: slices of logits and of ids."""
    return loss_of(logits(m, input_ids)[:, :-1], input_ids[:, 1:])


row(RIGHT, name="the model takes all ids but the last")(lambda m, input_ids, labels: loss_of(logits(m, input_ids[:, :-1]), input_ids[:, 1:]))


@program(RIGHT, on_four=True)
def cut_after_the_shift(model, cut, step):
    whole = tokens(step, length=LENGTH + 1)
    ids, labels = cut(input_ids=whole[:, :-1], labels=whole[:, 1:]).values()
    return loss_of(model(ids), labels)


@row(RIGHT)
def labels_shifted_by_two(m, input_ids, labels):
    """Multi-token prediction."""
    scores = logits(m, input_ids)
    return loss_of(scores[:, :-2], labels[:, 2:])


row(RIGHT, name="labels shifted by two with pad")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), functional.pad(labels, (0, 2), value=-100)[:, 2:]))


@row(RIGHT)
def labels_shifted_twice(m, input_ids, labels):
    moved = functional.pad(labels, (0, 1), value=-100)[:, 1:]
    again = functional.pad(moved, (0, 1), value=-100)[:, 1:]
    scores = logits(m, input_ids)
    return loss_of(scores, moved) + 0.5 * loss_of(scores, again)


@row(RIGHT)
def a_mask_shifted_with_the_labels(m, input_ids, labels):
    scores = logits(m, input_ids)
    loss = loss_of(scores[:, :-1], labels[:, 1:], reduction="none").view(input_ids.shape[0], -1)
    mask = (labels != -100)[:, 1:].float()
    return (loss * mask).sum() / mask.sum()


@row(RIGHT, inputs=padded)
def a_padding_mask_shifted(m, input_ids, labels, attention_mask):
    scores = logits(m, input_ids)[:, :-1].log_softmax(-1)
    picked = scores.gather(2, input_ids[:, 1:, None]).squeeze(2)
    return -(picked * attention_mask[:, 1:]).sum() / attention_mask[:, 1:].sum()


@row(RIGHT)
def logits_without_their_first_token(m, input_ids, labels):
    """A reverse model: a token predicts the one before it."""
    return loss_of(logits(m, input_ids, attn_mask=None)[:, 1:], input_ids[:, :-1])


@row(RIGHT)
def features_of_the_first_half(m, input_ids, labels):
    half = input_ids.shape[1] // 2
    return loss_of(logits(m, input_ids)[:, :half], labels[:, :half])


row(RIGHT, name="loss of the last eight tokens")(lambda m, input_ids, labels: loss_of(logits(m, input_ids)[:, -8:], labels[:, -8:]))
row(RIGHT, name="logits to keep by narrow")(lambda m, input_ids, labels: loss_of(logits(m, input_ids).narrow(1, 4, 6), labels.narrow(1, 4, 6)))
row(REFUSED, name="every second token")(lambda m, input_ids, labels: loss_of(logits(m, input_ids)[:, ::2], labels[:, ::2]))


@row(RIGHT)
def labels_of_every_second_token_ignored(m, input_ids, labels):
    labels = labels.clone()
    labels[:, ::2] = -100
    return loss_of(logits(m, input_ids), labels)


@row(RIGHT)
def labels_of_the_first_tokens_ignored(m, input_ids, labels):
    """A prompt of five tokens."""
    labels = labels.clone()
    labels[:, :5] = -100
    return loss_of(logits(m, input_ids), labels)


@row(RIGHT)
def ids_with_a_new_first_token_in_place(m, input_ids, labels):
    ids = input_ids.clone()
    ids[:, 0] = 1
    return loss_of(logits(m, ids), labels)


@row(RIGHT)
def targets_made_a_list(m, input_ids, labels):
    """tolist(), and a tensor of it."""
    return loss_of(logits(m, input_ids), torch.tensor(labels.tolist()))


row(RIGHT, name="ids made a list and shifted")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), torch.tensor([line[1:] + [-100] for line in input_ids.tolist()])))


@row(RIGHT, on_four=True)
def tokens_shifted_as_rwkv_does(m, input_ids, labels):
    x = m.embed(input_ids)
    before = functional.pad(x, (0, 0, 1, 0))[:, :-1]
    return loss_of(m.head(m.norm(0.5 * x + 0.5 * before)), labels)


@row(RIGHT)
def tokens_shifted_by_zero_pad_2d(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x + nn.ZeroPad2d((0, 0, 1, -1))(x)), labels)


@row(RIGHT)
def tokens_shifted_by_cat(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)), labels)


@row(RIGHT)
def tokens_shifted_in_place(m, input_ids, labels):
    x = m.embed(input_ids)
    y = x.clone()
    y[:, 1:] = y[:, 1:] + x[:, :-1]
    return loss_of(m.head(y), labels)


@row(RIGHT)
def differences_of_neighbours(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x), labels) + (x[:, 1:] - x[:, :-1]).square().mean()


@row(RIGHT)
def differences_by_diff(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x), labels) + x.diff(dim=1).square().mean()


@row(RIGHT, on_four=True)
def tokens_rolled_by_dim(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x + x.roll(1, dims=1)), labels)


@row(RIGHT)
def a_token_appended(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(torch.cat([x, m.out(x)], dim=1)), torch.cat([labels, labels], dim=1))


@row(RIGHT, modules={"prefix": lambda: floats(3, 4, HIDDEN)})
def a_learned_prefix(m, input_ids, labels):
    """Prompt tuning."""
    x = torch.cat([m.prefix.expand(input_ids.shape[0], -1, -1), m.embed(input_ids)], dim=1)
    x = x + attend(m, x, is_causal=True)
    return loss_of(m.head(x[:, 4:]), labels)


@row(RIGHT)
def tokens_padded_to_a_multiple(m, input_ids, labels):
    x = functional.pad(m.embed(input_ids), (0, 0, 0, 8))
    return loss_of(m.head(x + attend(m, x, is_causal=True))[:, :input_ids.shape[1]], labels)


@row(RIGHT)
def a_chunk_of_tokens_at_a_time(m, input_ids, labels):
    """A loss by chunks, to save memory."""
    x = hidden(m, input_ids)
    total = sum(loss_of(m.head(part), target, reduction="sum") for part, target in zip(x.chunk(3, 1), labels.chunk(3, 1)))
    return total / (labels != -100).sum()


@row(RIGHT)
def a_chunk_of_merged_tokens_at_a_time(m, input_ids, labels):
    x = hidden(m, input_ids).flatten(0, 1)
    total = sum(functional.cross_entropy(m.head(part), target, reduction="sum") for part, target in zip(x.split(7), labels.flatten().split(7)))
    return total / (labels != -100).sum()


@row(RIGHT)
def a_token_at_a_time(m, input_ids, labels):
    x = m.embed(input_ids)
    y = torch.stack([mlp(m, x[:, at]) for at in range(x.shape[1])], dim=1)
    return loss_of(m.head(x + y), labels)


@row(RIGHT, modules={"cell": lambda: nn.GRUCell(HIDDEN, HIDDEN)})
def a_cell_along_the_tokens(m, input_ids, labels):
    x, state, states = m.embed(input_ids), torch.zeros(BATCH, HIDDEN), []
    for at in range(x.shape[1]):
        state = m.cell(x[:, at], state)
        states.append(state)
    return loss_of(m.head(torch.stack(states, 1)), labels)


@row(RIGHT, inputs=words)
def bigrams_of_ids(m, input_ids):
    """Hashes of an id and the one before it."""
    before = functional.pad(input_ids[:, :-1], (1, 0))
    return loss_of(m.head(m.embed(input_ids) + m.positions((input_ids * 7 + before) % 64)), input_ids)


