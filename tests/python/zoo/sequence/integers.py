"""Numbers and decisions that a program takes from ids, masks and labels."""
import torch
from torch.nn import functional

from .table import (BATCH, DOCUMENTED, HIDDEN, LENGTH, REFUSED, RIGHT, VOCABULARY, floats, hidden, language, logits, loss_of, mlp, padded, program,
                    row, with_positions)


row(RIGHT, name="a count of an id scales the loss")(lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels) * int((input_ids == 5).sum()))


@row(RIGHT, on_four=True)
def a_branch_on_any(m, input_ids, labels):
    """One rank alone has the token."""
    ids = input_ids.clamp(max=35)
    is_there = (ids == 35).sum(1)[0] > 0 or (ids[:, -1] == ids[0, 0]).any()
    return loss_of(logits(m, ids), labels) * (3 if bool(is_there) else 1), {"is there": int(bool(is_there))}


row(RIGHT, name="a branch on all")(lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels) * (3 if (labels >= 0).all() else 1))


@row(RIGHT)
def a_branch_on_equality(m, input_ids, labels):
    is_one = torch.equal(input_ids, labels)
    return loss_of(logits(m, input_ids), labels) * (3 if is_one else 1)


@row(RIGHT)
def a_branch_on_a_sum_of_half_the_labels(m, input_ids, labels):
    """More than fifteen targets are there in all, in neither half."""
    count = (labels[1] != -100).sum()
    return loss_of(logits(m, input_ids), labels) * (2.0 if count > 15 else 1.0)


@row(RIGHT, on_four=True)
def a_branch_on_a_sum_and_a_number_that_is_a_part_s_length(m, input_ids, labels):
    count = (labels[0] != -100).sum()
    return loss_of(logits(m, input_ids), labels) * (2.0 if count > LENGTH // 2 else 1.0)


row(RIGHT, on_four=True, name="the largest id")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels) * (input_ids.max().item() + 1) / 10)


@row(RIGHT)
def the_smallest_and_largest_id(m, input_ids, labels):
    least, most = torch.aminmax(input_ids)
    return loss_of(logits(m, input_ids), labels) * (least + most).float() / 10


row(RIGHT, name="unique ids")(lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels) * len(input_ids.unique()) / 10)


@row(RIGHT, on_four=True)
def frequencies_by_bincount(m, input_ids, labels):
    """Class weights of the batch."""
    counts = torch.bincount(input_ids.flatten(), minlength=VOCABULARY).float()
    return loss_of(logits(m, input_ids), labels, weight=1 / (1 + counts))


@row(RIGHT)
def frequencies_by_one_hot(m, input_ids, labels):
    counts = functional.one_hot(input_ids, VOCABULARY).sum((0, 1)).float()
    return loss_of(logits(m, input_ids), labels, weight=1 / (1 + counts))


@row(RIGHT)
def frequencies_by_histc(m, input_ids, labels):
    counts = torch.histc(input_ids.float(), bins=VOCABULARY, min=0, max=VOCABULARY)
    return loss_of(logits(m, input_ids), labels, weight=1 / (1 + counts))


@row(RIGHT)
def frequencies_by_scatter_add(m, input_ids, labels):
    counts = torch.zeros(VOCABULARY).scatter_add(0, input_ids.flatten(), torch.ones(input_ids.numel()))
    return loss_of(logits(m, input_ids), labels, weight=1 / (1 + counts))


@row(RIGHT)
def frequencies_by_index_add(m, input_ids, labels):
    counts = torch.zeros(VOCABULARY, dtype=torch.long).index_add(0, input_ids.flatten(), torch.ones_like(input_ids).flatten())
    return loss_of(logits(m, input_ids), labels, weight=1 / (1 + counts.float()))


@row(RIGHT)
def a_sorted_order_of_ids(m, input_ids, labels):
    order = input_ids.sort(1).values
    return loss_of(m.head(m.embed(input_ids) + m.positions(order)), labels)


@row(RIGHT)
def a_topk_of_ids(m, input_ids, labels):
    largest = input_ids.topk(3, dim=1).values
    return loss_of(m.head(m.embed(input_ids) + m.positions(largest).mean(1, keepdim=True)), labels)


row(RIGHT, name="a mean of ids")(
    lambda m, input_ids, labels: loss_of(m.head(m.embed(input_ids) * input_ids.float().mean(1, keepdim=True).unsqueeze(-1) / 10), labels))
row(RIGHT, name="a share of targets")(lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels) * (labels != -100).float().mean())


@row(RIGHT)
def a_share_of_targets_of_each_sample(m, input_ids, labels):
    share = (labels != -100).float().mean(dim=1)
    x = m.embed(input_ids) * share[:, None, None]
    return loss_of(m.head(x), labels)


@row(RIGHT)
def weights_by_the_number_of_a_sample_s_targets(m, input_ids, labels):
    weight = 1.0 / (labels != -100).sum(1, keepdim=True)
    loss = loss_of(logits(m, input_ids), labels, reduction="none").view_as(labels)
    return (loss * weight).sum()


@row(RIGHT)
def weights_by_place(m, input_ids, labels):
    """Later tokens count more: by cumsum of ones."""
    weight = torch.ones_like(labels).cumsum(1).float()
    loss = loss_of(logits(m, input_ids), labels, reduction="none").view_as(labels)
    return (loss * weight).sum() / weight.sum()


@row(RIGHT)
def weights_by_a_cumprod(m, input_ids, labels):
    """Targets up to the first separator."""
    is_before = (input_ids != 9).long().cumprod(1)
    return loss_of(logits(m, input_ids), labels.masked_fill(is_before == 0, -100))


@row(RIGHT, on_four=True)
def targets_behind_a_separator(m, input_ids, labels):
    is_behind = (input_ids % 5 == 0).cumsum(1) > 0
    return loss_of(logits(m, input_ids), input_ids.masked_fill(~is_behind, -100))


@row(RIGHT)
def targets_behind_the_first_separator_by_argmax(m, input_ids, labels):
    first = (input_ids == 9).int().argmax(1)
    at = torch.arange(input_ids.shape[1])
    return loss_of(logits(m, input_ids), input_ids.masked_fill(at[None] <= first[:, None], -100))


# on four ranks 6 is a part's length there by chance
row(RIGHT, inputs=with_positions(), on_four=True, name="targets by position")(
    lambda m, input_ids, labels, position_ids: loss_of(logits(m, input_ids), labels.masked_fill(position_ids < 6, -100)))


@row(RIGHT)
def ids_that_differ_from_the_one_before(m, input_ids, labels):
    is_new = functional.pad(input_ids.diff(dim=1), (1, 0), value=1) != 0
    return loss_of(m.head(m.embed(input_ids) * is_new.unsqueeze(-1)), labels)


@row(RIGHT)
def ids_that_differ_from_the_one_before_with_prepend(m, input_ids, labels):
    is_new = input_ids.diff(dim=1, prepend=input_ids[:, :1] - 1) > 0
    return loss_of(m.head(m.embed(input_ids) * is_new.unsqueeze(-1)), labels)


row(RIGHT, name="ids flipped")(lambda m, input_ids, labels: loss_of(m.head(m.embed(input_ids) + m.embed(input_ids.flip(1))), labels))
row(RIGHT, name="ids of another sample")(lambda m, input_ids, labels: loss_of(m.head(m.embed(input_ids) + m.embed(input_ids.roll(1, 0))), labels))
row(RIGHT, name="ids rolled without a dim")(lambda m, input_ids, labels: loss_of(m.head(m.embed(input_ids) + m.embed(input_ids.roll(1))), labels))


@row(RIGHT)
def ids_in_a_fixed_order(m, input_ids, labels):
    order = torch.arange(input_ids.shape[1]).flip(0)
    return loss_of(m.head(m.embed(input_ids) + m.embed(input_ids[:, order])), labels)


@row(RIGHT)
def ids_masked_at_random_with_a_generator(m, input_ids, labels):
    """BERT's masking in the model, by a stream of the whole shape's seed."""
    chance = torch.rand(input_ids.shape, generator=torch.Generator().manual_seed(2))
    return loss_of(logits(m, input_ids.masked_fill(chance < 0.3, 1)), labels)


@row(RIGHT)
def ids_matched_with_ids(m, input_ids, labels):
    """Induction: how often each id is there in its sample."""
    same = (input_ids[:, :, None] == input_ids[:, None, :]).sum(-1)
    return loss_of(m.head(m.embed(input_ids) + m.positions(same)), labels)


@row(RIGHT)
def ids_as_floats_and_products(m, input_ids, labels):
    x = input_ids.float()
    return loss_of(logits(m, input_ids), labels) + 1e-4 * (x @ x.T).sum() * m.out.bias.sum()


@row(RIGHT)
def a_hash_of_the_sample(m, input_ids, labels):
    code = (input_ids * 31).sum(1) % 64
    return loss_of(m.head(m.embed(input_ids) + m.positions(code)[:, None]), labels)


@row(RIGHT)
def a_hash_of_the_sample_to_choose_a_row(m, input_ids, labels):
    code = input_ids.sum(1, keepdim=True) % 5
    bias = m.classes.weight[code]
    return loss_of(m.head(m.embed(input_ids) + bias), labels)


@row(RIGHT)
def a_bool_of_activations(m, input_ids, labels):
    x = hidden(m, input_ids)
    return loss_of(m.head(x), labels) * (2 if (x > 2.2).any() else 1)


@row(DOCUMENTED)
def a_branch_on_the_length(m, input_ids, labels):
    x = hidden(m, input_ids)
    return loss_of(m.head(x + mlp(m, x) if input_ids.shape[1] > 16 else x), labels)


@row(RIGHT)
def expert_usage_by_bincount_of_a_choice(m, input_ids, labels):
    """The choice comes of activations: its counts are of one rank's tokens."""
    x = hidden(m, input_ids)
    used = torch.bincount(m.classes(x).argmax(-1).flatten(), minlength=5).float()
    return loss_of(m.head(x), labels) + 0.01 * (used * m.classes.bias).sum(), {"used": used}


@row(RIGHT)
def expert_usage_by_one_hot_sums(m, input_ids, labels):
    x = hidden(m, input_ids)
    used = functional.one_hot(m.classes(x).argmax(-1), 5).sum((0, 1)).float()
    return loss_of(m.head(x), labels) + 0.01 * (used * m.classes.bias).sum(), {"used": used}


@row(RIGHT)
def expert_usage_by_float_means(m, input_ids, labels):
    x = hidden(m, input_ids)
    used = functional.one_hot(m.classes(x).argmax(-1), 5).float().mean((0, 1))
    return loss_of(m.head(x), labels) + 0.01 * (used * m.classes.bias).sum(), {"used": used}


@row(RIGHT)
def a_running_count_of_chosen_experts(m, input_ids, labels):
    """Places by cumsum over tokens, which then meet activations."""
    x = hidden(m, input_ids)
    place = functional.one_hot(m.classes(x).argmax(-1), 5).cumsum(1).max(-1).values
    return loss_of(m.head(x * (place < 9).unsqueeze(-1)), labels)


@row(RIGHT)
def tokens_sorted_by_their_experts(m, input_ids, labels):
    x = hidden(m, input_ids).flatten(0, 1)
    order = m.classes(x).argmax(-1).argsort()
    y = functional.conv1d(x[order].T[None], torch.ones(HIDDEN, 1, 3) / 3, padding=1, groups=HIDDEN)[0].T
    return loss_of(m.head(torch.zeros_like(x).index_copy(0, order, y).view(*input_ids.shape, HIDDEN)), labels)


# --- written by integers ---

@row(REFUSED, inputs=lambda step: {**language(step), "whole_at": torch.tensor([3, 17, 9])}, on_four=True)
def one_token_of_each_sample_written(m, input_ids, labels, whole_at):
    """`x[b, position] = value`: the place is one of all tokens."""
    x = m.embed(input_ids) * 1.0
    x[torch.arange(BATCH), whole_at.clamp(max=x.shape[1] - 1)] = m.out.bias
    return loss_of(m.head(x), labels)


@row(RIGHT)
def one_token_written_by_select(m, input_ids, labels):
    x = m.embed(input_ids) * 1.0
    x[:, 2] = m.out.bias
    return loss_of(m.head(x), labels)


@row(REFUSED)
def the_first_tokens_written_by_a_slice(m, input_ids, labels):
    x = m.embed(input_ids) * 1.0
    x[:, :4] += m.out.bias
    return loss_of(m.head(x), labels)


@row(RIGHT)
def tokens_written_by_index_copy(m, input_ids, labels):
    x = (m.embed(input_ids) * 1.0).index_fill(1, torch.tensor([0, 5]), 0.5)
    return loss_of(m.head(x), labels)


@row(RIGHT)
def tokens_written_by_a_mask(m, input_ids, labels):
    x = m.embed(input_ids) * 1.0
    x[input_ids == 7] = m.out.bias
    return loss_of(m.head(x), labels)


@row(RIGHT)
def tokens_written_by_masked_fill_(m, input_ids, labels):
    x = m.embed(input_ids) * 1.0
    x.masked_fill_((input_ids == 7).unsqueeze(-1), 0.0)
    return loss_of(m.head(x), labels)


def _images(step):
    ids = language(step)["input_ids"]
    return {**language(step), "whole_images": floats(step, int((ids % 3 == 0).sum()), HIDDEN)}


@row(REFUSED, inputs=_images, on_four=True)
def image_features_by_masked_scatter(m, input_ids, labels, whole_images):
    """LLaVA's: rows of features in the places of image tokens, one after the other."""
    mask = (input_ids % 3 == 0).unsqueeze(-1).expand(-1, -1, HIDDEN)
    x = m.embed(input_ids).masked_scatter(mask, m.out(whole_images))
    return loss_of(m.head(x), labels)


@row(RIGHT, inputs=_images)
def image_features_written_by_a_mask(m, input_ids, labels, whole_images):
    x = m.embed(input_ids) * 1.0
    x[input_ids % 3 == 0] = m.out(whole_images)[:int((input_ids % 3 == 0).sum())]
    return loss_of(m.head(x), labels)


@row(RIGHT, inputs=_images)
def image_features_by_a_count(m, input_ids, labels, whole_images):
    """A table's rows by cumsum of the image mask."""
    mask = input_ids % 3 == 0
    at = (mask.flatten().long().cumsum(0) - 1).clamp(min=0).view_as(input_ids)
    x = torch.where(mask.unsqueeze(-1), m.out(whole_images)[at], m.embed(input_ids))
    return loss_of(m.head(x), labels)


@row(RIGHT)
def a_global_token_written_to_all(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x + x[:, :1]), labels)


@row(RIGHT, inputs=padded)
def lengths_of_samples(m, input_ids, labels, attention_mask):
    """A feature by the sample's length."""
    return loss_of(m.head(m.embed(input_ids) + m.positions(attention_mask.sum(-1))[:, None]), labels)


row(RIGHT, inputs=padded, name="lengths of samples as numbers")(
    lambda m, input_ids, labels, attention_mask: loss_of(logits(m, input_ids), labels) * max(attention_mask.sum(-1).tolist()) / LENGTH)


@program(RIGHT)
def learning_stops_where_no_target_is_left(model, cut, step):
    """A decision that every rank must take alike."""
    whole = language(step)
    whole["labels"][:, -1] = -100
    ids, labels = cut(**whole).values()
    if (labels[:, -1] == -100).all():
        return loss_of(model(ids), ids)
    return loss_of(model(ids), labels)


row(RIGHT, name="numpy counts")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels, reduction="sum") / float((labels.numpy() != -100).sum()))
row(RIGHT, name="counts of a list")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels, reduction="sum") / sum(label != -100 for line in labels.tolist() for label in line))


@row(RIGHT)
def counts_of_deep_copied_labels(m, input_ids, labels):
    other = labels.clone().detach().to(torch.int32).contiguous()
    return loss_of(logits(m, input_ids), labels, reduction="sum") / other.ne(-100).sum()


row(RIGHT, name="a tensor of an item")(
    lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels, reduction="sum") / torch.tensor((labels != -100).sum().item(), dtype=torch.float))


@row(RIGHT)
def a_logical_reduction(m, input_ids, labels):
    has = (labels != -100).any(dim=1).float() + torch.logical_and(labels > 0, input_ids > 20).all(1).float()
    return loss_of(m.head(m.embed(input_ids) * (1 + has[:, None, None])), labels)


row(RIGHT, name="argmax of labels as a number")(lambda m, input_ids, labels: loss_of(logits(m, input_ids), labels) * (1 + labels[0].argmax().item()))


@row(RIGHT)
def searchsorted_positions(m, input_ids, labels):
    order = input_ids.sort(1).values
    return loss_of(m.head(m.embed(input_ids) + m.positions(torch.searchsorted(order, input_ids))), labels)


@row(RIGHT)
def buckets_of_activations(m, input_ids, labels):
    x = m.embed(input_ids)
    buckets = torch.bucketize(x.detach().mean(-1), torch.linspace(-1, 1, LENGTH // 2))
    return loss_of(m.head(x + m.positions(buckets)), labels)


@row(RIGHT)
def a_vocabulary_of_the_batch(m, input_ids, labels):
    seen = torch.isin(torch.arange(VOCABULARY), input_ids)
    return loss_of(logits(m, input_ids).masked_fill(~seen, -5.0), labels)


@row(RIGHT)
def tokens_of_a_list(m, input_ids, labels):
    special = torch.isin(input_ids, torch.arange(LENGTH // 2))
    return loss_of(m.head(m.embed(input_ids) * torch.where(special, 2.0, 1.0)[..., None]), labels)


@row(REFUSED)
def activations_looked_for_in_activations(m, input_ids, labels):
    x = m.embed(input_ids)
    heights = x.detach().mean(-1)
    return loss_of(m.head(x * (1 + torch.isin(heights, heights + 0.5)[..., None])), labels)
