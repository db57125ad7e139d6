"""Several batches, models and lengths in a step."""
import copy

import torch
from torch import nn
from torch.nn import functional

from .table import (BATCH, HIDDEN, LENGTH, REFUSED, RIGHT, Net, attend, floats, heads, hidden, joined, language, logits, loss_of, mlp, padding,
                    program, tokens)

sdpa = functional.scaled_dot_product_attention


def _log_chances(scores, labels, mask=None):
    picked = scores.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return picked.sum(1) if mask is None else (picked * mask).sum(1)


def _padded_logits(m, input_ids, attention_mask):
    return logits(m, input_ids, attn_mask=attention_mask[:, None, None, :].bool())


@program(RIGHT, on_four=True)
def dpo(model, cut, step):
    """Two batches are cut before either runs."""
    good, bad = cut(input_ids=tokens(step, 1))["input_ids"], cut(input_ids=tokens(step, 2))["input_ids"]
    difference = _log_chances(model(good), good) - _log_chances(model(bad), bad)
    return -functional.logsigmoid(0.1 * difference).mean()


@program(RIGHT, forward=_padded_logits, on_four=True)
def two_padded_batches_cut_before_either_runs(model, cut, step):
    """The second has other padding."""
    first = cut(input_ids=tokens(step, 1), labels=tokens(step, 3), attention_mask=padding(0))
    other = (torch.arange(LENGTH)[None] < torch.tensor([[9], [20], [16]])).long()
    second = cut(input_ids=tokens(step, 2), labels=tokens(step, 4), attention_mask=other)
    one, two = (loss_of(model(part["input_ids"], part["attention_mask"]), part["labels"]) for part in (first, second))
    return one + 2 * two


@program(RIGHT, forward=_padded_logits)
def a_padded_batch_and_one_without_padding(model, cut, step):
    first = cut(input_ids=tokens(step, 1), labels=tokens(step, 3), attention_mask=padding(0))
    second = cut(input_ids=tokens(step, 2), labels=tokens(step, 4), attention_mask=torch.ones(BATCH, LENGTH, dtype=torch.long))
    one, two = (loss_of(model(part["input_ids"], part["attention_mask"]), part["labels"]) for part in (first, second))
    return one + 2 * two


@program(RIGHT, forward=lambda m, ids, mask=None: logits(m, ids) if mask is None else _padded_logits(m, ids, mask))
def a_padded_batch_and_one_without_a_mask(model, cut, step):
    first = cut(input_ids=tokens(step, 1), labels=tokens(step, 3), attention_mask=padding(0))
    second = cut(input_ids=tokens(step, 2), labels=tokens(step, 4))
    return (loss_of(model(first["input_ids"], first["attention_mask"]), first["labels"]) +
            2 * loss_of(model(second["input_ids"]), second["labels"]))


@program(RIGHT, forward=lambda m, ids, mask=None: logits(m, ids) if mask is None else _padded_logits(m, ids, mask))
def a_mask_that_the_model_does_not_get(model, cut, step):
    """cut() has the mask, forward() has not: whole attention without it."""
    parts = cut(input_ids=tokens(step, 1), labels=tokens(step, 3), attention_mask=padding(0))
    return loss_of(model(parts["input_ids"]), parts["labels"])


@program(RIGHT)
def two_batches_one_after_the_other(model, cut, step):
    losses = []
    for salt in (1, 2):
        ids, labels = cut(input_ids=tokens(step, salt), labels=tokens(step, salt + 5)).values()
        losses.append(loss_of(model(ids), labels))
    return losses[0] + 0.3 * losses[1]


@program(RIGHT)
def two_batches_of_two_lengths(model, cut, step):
    losses = []
    for length in (24, 18):
        ids, labels = cut(input_ids=tokens(step, 1, length=length), labels=tokens(step, 2, length=length)).values()
        losses.append(loss_of(model(ids), labels))
    return losses[0] + 0.3 * losses[1]


@program(RIGHT, forward=lambda m, first, second: m.head(m.embed(first) + m.embed(second)))
def two_lengths_that_meet(model, cut, step):
    """Ids of 12 tokens twice beside ids of 24: a rank has 6 and 12 of them."""
    ids, labels = cut(input_ids=tokens(step), labels=tokens(step, 3)).values()
    short = cut(input_ids=tokens(step, 4, length=12))["input_ids"]
    return loss_of(model(ids, torch.cat([short, short], 1)), labels)


@program(RIGHT, on_four=True)
def samples_contrasted(model, cut, step):
    """Two views of the samples, pooled, against each other."""
    first, second = (model(cut(input_ids=tokens(step, salt))["input_ids"]).mean(1) for salt in (1, 2))
    scores = functional.normalize(first, dim=-1) @ functional.normalize(second, dim=-1).T
    return functional.cross_entropy(scores / 0.2, torch.arange(BATCH))


@program(RIGHT)
def samples_contrasted_by_their_last_token(model, cut, step):
    first, second = (model(cut(input_ids=tokens(step, salt))["input_ids"])[:, -1] for salt in (1, 2))
    return functional.cross_entropy(first @ second.T / 5, torch.arange(BATCH))


@program(RIGHT, forward=lambda m, ids: m.score(hidden(m, ids)).squeeze(-1))
def a_reward_model(model, cut, step):
    good, bad = (model(cut(input_ids=tokens(step, salt))["input_ids"])[:, -1] for salt in (1, 2))
    return -functional.logsigmoid(good - bad).mean()


@program(RIGHT, forward=lambda m, ids, at: m.score(hidden(m, ids)).squeeze(-1)[torch.arange(BATCH), at])
def a_reward_model_by_whole_places(model, cut, step):
    """The last tokens' places are computed before the cut."""
    at = padding(step).sum(1) - 1
    good, bad = (model(cut(input_ids=tokens(step, salt))["input_ids"], at) for salt in (1, 2))
    return -functional.logsigmoid(good - bad).mean()


@program(RIGHT)
def ppo(model, cut, step):
    whole = {"input_ids": tokens(step), "old": floats(step, BATCH, LENGTH) * 0.1 - 3, "advantage": floats(step, BATCH, LENGTH, salt=4)}
    ids, old, advantage = cut(**whole).values()
    now = model(ids).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    ratio = (now - old).exp()
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


@program(RIGHT)
def grpo_with_advantages_of_samples(model, cut, step):
    ids, mask = cut(input_ids=tokens(step), mask=padding(step)).values()
    now = model(ids).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    loss = (now - now.detach()).exp() * torch.tensor([0.5, -1.0, 0.7])[:, None]
    return -((loss * mask).sum(1) / mask.sum(1)).mean()


@program(RIGHT)
def grpo_normalized_by_all_tokens(model, cut, step):
    ids, mask = cut(input_ids=tokens(step), mask=padding(step)).values()
    now = model(ids).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    loss = (now - now.detach()).exp() * torch.tensor([0.5, -1.0, 0.7])[:, None]
    return -(loss * mask).sum() / mask.sum()


@program(RIGHT)
def advantages_normalized_over_tokens(model, cut, step):
    ids, advantage = cut(input_ids=tokens(step), advantage=floats(step, BATCH, LENGTH)).values()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-4)
    now = model(ids).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return -(now * advantage).mean()


@program(RIGHT, on_four=True)
def reinforce_with_returns_by_flipped_cumsum(model, cut, step):
    ids, reward = cut(input_ids=tokens(step), reward=floats(step, BATCH, LENGTH)).values()
    returns = reward.flip(1).cumsum(1).flip(1)
    now = model(ids).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return -(now * returns).mean()


def _with_teacher():
    net = Net(logits)
    net.teacher = copy.deepcopy(net).requires_grad_(False)
    net.function = lambda m, ids, teach=False: logits(m.teacher, ids) if teach else logits(m, ids)
    return net


@program(RIGHT, build=_with_teacher)
def distillation(model, cut, step):
    ids = cut(input_ids=tokens(step))["input_ids"]
    with torch.no_grad():
        target = model(ids, teach=True).mul(0.5).softmax(-1)
    return -(target * model(ids).log_softmax(-1)).sum(-1).mean()


@program(RIGHT, build=_with_teacher)
def distillation_by_kl_div_batchmean(model, cut, step):
    ids = cut(input_ids=tokens(step))["input_ids"]
    with torch.no_grad():
        target = model(ids, teach=True).mul(0.5).log_softmax(-1)
    return functional.kl_div(model(ids).log_softmax(-1), target, log_target=True, reduction="batchmean")


@program(RIGHT, build=_with_teacher)
def distillation_by_mean_squares(model, cut, step):
    ids = cut(input_ids=tokens(step))["input_ids"]
    with torch.no_grad():
        target = model(ids, teach=True)
    return (model(ids) - target * 0.5).square().mean()


# --- encoders and decoders ---

def _translate(m, source, target, mask=None):
    memory = m.embed(source)
    bias = None if mask is None else mask[:, None, None, :].bool()
    memory = memory + attend(m, m.norm(memory), attn_mask=bias)
    x = m.embed(target)
    x = x + attend(m, m.norm(x), is_causal=True)
    key, value = (heads(part) for part in m.cross(memory).chunk(2, -1))
    x = x + m.out(joined(sdpa(heads(m.query(m.norm(x))), key, value, attn_mask=bias)))
    return m.head(m.last_norm(x + mlp(m, x)))


_CROSS = {"cross": lambda: nn.Linear(HIDDEN, 2 * HIDDEN), "query": lambda: nn.Linear(HIDDEN, HIDDEN)}


@program(RIGHT, modules=_CROSS, forward=_translate, on_four=True)
def an_encoder_and_a_decoder_of_two_lengths(model, cut, step):
    source = cut(input_ids=tokens(step, 1, length=18))["input_ids"]
    ids, labels = cut(input_ids=tokens(step, 2), labels=tokens(step, 3)).values()
    return loss_of(model(source, ids), labels)


@program(RIGHT, modules=_CROSS, forward=_translate)
def an_encoder_and_a_decoder_of_one_length(model, cut, step):
    source = cut(input_ids=tokens(step, 1))["input_ids"]
    ids, labels = cut(input_ids=tokens(step, 2), labels=tokens(step, 3)).values()
    return loss_of(model(source, ids), labels)


@program(RIGHT, modules=_CROSS, forward=_translate, on_four=True)
def an_encoder_s_padding_beside_a_decoder_of_equal_length(model, cut, step):
    """The mask is the encoder's; the decoder has all its tokens."""
    ids, labels = cut(input_ids=tokens(step, 2), labels=tokens(step, 3)).values()
    source, mask = cut(input_ids=tokens(step, 1), attention_mask=padding(step)).values()
    return loss_of(model(source, ids, mask), labels)


@program(RIGHT, modules=_CROSS, forward=_translate)
def an_encoder_s_padding_beside_a_longer_decoder(model, cut, step):
    ids, labels = cut(input_ids=tokens(step, 2), labels=tokens(step, 3)).values()
    source, mask = cut(input_ids=tokens(step, 1, length=18), attention_mask=padding(0, length=18)).values()
    return loss_of(model(source, ids, mask), labels)


@program(RIGHT, modules=_CROSS, forward=_translate)
def an_encoder_that_is_not_cut(model, cut, step):
    """Whole on every rank; the decoder's queries attend to all of it."""
    ids, labels = cut(input_ids=tokens(step, 2), labels=tokens(step, 3)).values()
    return loss_of(model(tokens(step, 1, length=9), ids), labels)


@program(RIGHT, modules=_CROSS, forward=_translate)
def a_decoder_that_is_not_cut(model, cut, step):
    """Short targets stay whole on every rank; the encoder's keys are cut."""
    source = cut(input_ids=tokens(step, 1))["input_ids"]
    return loss_of(model(source, tokens(step, 2, length=9)), tokens(step, 3, length=9))


@program(RIGHT, modules={"patch": lambda: nn.Linear(6, HIDDEN)}, forward=lambda m, ids, images: m.head(hidden(m, ids) + m.patch(images).mean(1, keepdim=True)))
def an_image_that_is_not_cut(model, cut, step):
    """Its features are alike on all ranks and join each token."""
    ids, labels = cut(**language(step)).values()
    return loss_of(model(ids, floats(step, BATCH, 9, 6)), labels)


@program(RIGHT, modules={"patch": lambda: nn.Linear(6, HIDDEN)},
         forward=lambda m, ids, images: (m.head(hidden(m, ids)), m.classes(m.patch(images).mean(1))))
def a_second_head_that_is_not_cut(model, cut, step):
    """Two losses, one of tokens that are cut and one of images that are not."""
    ids, labels = cut(**language(step)).values()
    scores, classes = model(ids, floats(step, BATCH, 9, 6))
    return loss_of(scores, labels) + functional.cross_entropy(classes, torch.tensor([0, 3, 1]))


@program(RIGHT, on_four=True)
def one_batch_cut_and_one_not(model, cut, step):
    """The second loss is computed whole on every rank."""
    ids, labels = cut(**language(step)).values()
    return loss_of(model(ids), labels) + 0.5 * loss_of(model(tokens(step, 5)), tokens(step, 6))


@program(RIGHT, forward=lambda m, x: m.head(m.last_norm(x + attend(m, x, is_causal=True))))
def inputs_of_floats(model, cut, step):
    """inputs_embeds."""
    x, labels = cut(input_ids=floats(step, BATCH, LENGTH, HIDDEN), labels=tokens(step, 3)).values()
    return loss_of(model(x), labels)


@program(RIGHT, forward=lambda m, x: m.head(m.last_norm(x + mlp(m, x))))
def inputs_cut_along_their_first_dim(model, cut, step):
    """[S, B, D]."""
    x = cut(input_ids=floats(step, LENGTH, BATCH, HIDDEN), dim=0)["input_ids"]
    labels = cut(input_ids=tokens(step, 3).T.contiguous(), dim=0)["input_ids"]
    return loss_of(model(x), labels)


@program(RIGHT, forward=lambda m, x: m.head(m.last_norm(x + mlp(m, x)).flatten(1, 2)))
def images_cut_along_their_rows(model, cut, step):
    """[B, rows, columns, D], cut by rows and merged with columns."""
    x = cut(input_ids=floats(step, BATCH, 8, 6, HIDDEN))["input_ids"]
    labels = cut(input_ids=tokens(step, 3, length=48).view(BATCH, 8, 6))["input_ids"]
    return loss_of(model(x), labels.flatten(1))


@program(RIGHT, forward=lambda m, x: m.head(x + attend(m, x)))
def images_cut_along_their_rows_and_attended(model, cut, step):
    x = cut(input_ids=floats(step, BATCH, 8, 6, HIDDEN))["input_ids"].flatten(1, 2)
    labels = cut(input_ids=tokens(step, 3, length=48).view(BATCH, 8, 6))["input_ids"].flatten(1)
    return loss_of(model(x), labels)


@program(RIGHT, forward=lambda m, x: m.head(x + attend(m, x)))
def images_of_which_a_view_merges_other_dims_first(model, cut, step):
    """[B, 6, columns] cut along columns, rows before: merged tokens of a rank are not neighbours in the whole."""
    x = cut(input_ids=floats(step, BATCH, 6, 8, HIDDEN), dim=2)["input_ids"].flatten(1, 2)
    labels = cut(input_ids=tokens(step, 3, length=48).view(BATCH, 6, 8), dim=2)["input_ids"].flatten(1)
    return loss_of(model(x), labels)


@program(RIGHT, build=lambda: Net(lambda m, x: m.head(m.last_norm(x))))
def a_trained_input(model, cut, step):
    """Gradients of weights behind a cut of floats that need none."""
    x = cut(input_ids=floats(step, BATCH, LENGTH, HIDDEN))["input_ids"]
    return model(x).square().mean()


