"""Tokens written in place, viewed in windows, pruned and measured together."""
import torch

from .table import BATCH, HIDDEN, LENGTH, REFUSED, RIGHT, attend, generator, hidden, language, loss_of, row


@row(REFUSED)
def strided_writes(m, input_ids, labels):
    x = m.embed(input_ids).clone()
    x[:, ::2] += m.positions.weight[0]
    x[:, 1::3] *= 2
    return loss_of(m.head(x + attend(m, x)), labels)


@row(REFUSED)
def the_first_three_tokens_added_to(m, input_ids, labels):
    x = m.embed(input_ids).clone()
    x[:, :3] += m.positions.weight[:3]
    x[:, -1] *= 0.0
    return loss_of(m.head(x + attend(m, x)), labels)


@row(RIGHT)
def tokens_zeroed_by_index_fill_and_scatter(m, input_ids, labels):
    x = m.embed(input_ids).index_fill(1, torch.tensor([2, 20]), 0.0)
    return loss_of(m.head(x + attend(m, x)), labels)


@row(REFUSED)
def a_token_written_at_a_place_of_each_sample(m, input_ids, labels):
    x = m.embed(input_ids).clone()
    x[torch.arange(BATCH), torch.tensor([3, 20, 11])] = m.positions.weight[0]
    return loss_of(m.head(x + attend(m, x)), labels)


@row(REFUSED)
def a_slice_scattered(m, input_ids, labels):
    x = m.embed(input_ids)
    x = torch.slice_scatter(x, m.positions.weight[:4].expand(BATCH, -1, -1), 1, 0, 4)
    return loss_of(m.head(x + attend(m, x)), labels)


@row(RIGHT)
def a_lower_triangle_of_tokens_and_features(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x + x.tril()), labels)


row(REFUSED, name="a diagonal of tokens and features")(lambda m, input_ids, labels: hidden(m, input_ids).diagonal(dim1=1, dim2=2).square().mean())


@row(REFUSED)
def windows_by_as_strided(m, input_ids, labels):
    h = hidden(m, input_ids).contiguous()
    w = h.as_strided((h.shape[0], h.shape[1] - 2, 3, HIDDEN), (h.stride(0), HIDDEN, HIDDEN, 1))
    return m.classes(w.mean(2)).square().mean()


row(RIGHT, name="windows by unfold")(lambda m, input_ids, labels: m.classes(hidden(m, input_ids).unfold(1, 3, 1).mean(-1)).square().mean())


@row(REFUSED)
def distances_of_all_tokens(m, input_ids, labels):
    h = hidden(m, input_ids)
    return torch.cdist(h, h).mean() * 0.1


row(RIGHT, name="a covariance by torch cov")(
    lambda m, input_ids, labels: torch.cov(m.classes(hidden(m, input_ids)).flatten(0, 1).T).square().mean())


@row(REFUSED)
def a_singular_value(m, input_ids, labels):
    h = hidden(m, input_ids)
    return torch.linalg.svdvals(h.flatten(0, 1)).sum() * 0.1 + torch.linalg.matrix_norm(h).mean()


@row(RIGHT, four=REFUSED)
def tokens_pruned_by_their_score(m, input_ids, labels):
    h = hidden(m, input_ids)
    kept = m.score(h)[..., 0].topk(6, dim=1).indices
    return m.classes(h.gather(1, kept[..., None].expand(-1, -1, HIDDEN))).square().mean()


@row(RIGHT, lambda step: {**language(step), "noise": torch.rand(BATCH, LENGTH, generator=generator(step, 9))})
def tokens_masked_by_sorted_noise_as_mae_does(m, input_ids, labels, noise):
    h = m.embed(input_ids)
    kept = noise.argsort(1)[:, :8]
    z = h.gather(1, kept[..., None].expand(-1, -1, HIDDEN))
    z = z + attend(m, z)
    return m.classes(z).square().mean()


@row(RIGHT, lambda step: {**language(step), "whole_noise": torch.rand(BATCH, LENGTH, generator=generator(step, 9))})
def tokens_masked_by_whole_sorted_noise(m, input_ids, labels, whole_noise):
    h = m.embed(input_ids)
    kept = whole_noise.argsort(1)[:, :12]
    z = h.gather(1, kept[..., None].expand(-1, -1, HIDDEN))
    return m.classes(z + attend(m, z)).square().mean()
