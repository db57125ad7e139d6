"""Layers that mix tokens without attention over all of them: windows, norms, Fourier transforms, recurrences,
convolutions."""
import torch
from torch import nn
from torch.nn import functional

from .table import HIDDEN, LENGTH, REFUSED, RIGHT, attend, hidden, logits, loss_of, row, sized


@row(RIGHT)
def windows_of_four_tokens_attend(m, input_ids, labels):
    x = m.embed(input_ids)
    w = x.reshape(-1, 4, HIDDEN)
    return loss_of(m.head((w + attend(m, w)).view(x.shape)), labels)


@row(RIGHT)
def windows_of_a_part_attend(m, input_ids, labels):
    x = m.embed(input_ids)
    w = x.reshape(-1, 12, HIDDEN)
    return loss_of(m.head((w + attend(m, w)).view(x.shape)), labels)


@sized(RIGHT, batch=4, length=24)
def windows_as_long_as_the_sequence_attend(m, input_ids, labels):
    x = m.embed(input_ids)
    w = x.reshape(-1, 24, HIDDEN)
    return loss_of(m.head((w + attend(m, w)).view(x.shape)), labels)


@sized(RIGHT, batch=4, length=24)
def a_mean_of_windows_as_long_as_the_sequence(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.head(h.reshape(-1, 24, HIDDEN).mean(1)).square().mean()


@row(RIGHT)
def a_mean_of_windows_of_four(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(h.view(h.shape[0], -1, 4, HIDDEN).mean(2)).square().mean()


@row(RIGHT)
def a_mean_of_four_windows(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(h.view(h.shape[0], 4, -1, HIDDEN).mean(2)).square().mean()


@row(RIGHT)
def a_mean_of_every_fourth(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(h.view(h.shape[0], 4, -1, HIDDEN).mean(1)).square().mean()


@row(RIGHT)
def patches_merged_as_swin(m, input_ids, labels):
    h = hidden(m, input_ids)
    merged = torch.cat([h[:, 0::2], h[:, 1::2]], -1)
    return (merged @ torch.linspace(-1, 1, 6 * HIDDEN).view(2 * HIDDEN, 3)).square().mean()


@row(RIGHT)
def tokens_repeated(m, input_ids, labels):
    h = hidden(m, input_ids)
    return m.classes(h.repeat_interleave(2, dim=1)).square().mean() + m.classes(h.repeat(1, 2, 1)[:, :3]).mean()


@row(RIGHT)
def a_mixer_of_tokens_by_the_part_s_length(m, input_ids, labels):
    h = hidden(m, input_ids)
    mixed = functional.linear(h.transpose(1, 2), m.positions.weight[:24, :20].T[:, :h.shape[1]][:h.shape[1]])
    return mixed.square().mean()


@row(RIGHT, modules={"mixer": lambda: nn.Linear(LENGTH, LENGTH)})
def a_mixer_of_tokens(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x + m.mixer(x.transpose(1, 2)).transpose(1, 2)), labels)


row(RIGHT, modules={"w": lambda: torch.randn(LENGTH)}, name="learned weights of all tokens")(
    lambda m, input_ids, labels: m.classes(torch.einsum("bsd,s->bd", hidden(m, input_ids), m.w)).square().mean())
row(RIGHT, modules={"norm2": lambda: nn.LayerNorm((LENGTH, HIDDEN))}, name="layer norm of tokens and features", four=REFUSED)(
    lambda m, input_ids, labels: loss_of(m.head(m.norm2(m.embed(input_ids))), labels))


@row(RIGHT)
def layer_norm_of_the_shape_of_a_sample(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(functional.layer_norm(x, x.shape[1:])), labels)


@row(RIGHT)
def an_instance_norm_over_tokens(m, input_ids, labels):
    x = m.embed(input_ids).transpose(1, 2)
    return loss_of(m.head(functional.instance_norm(x).transpose(1, 2)), labels)


@row(RIGHT)
def group_norm_of_all_tokens(m, input_ids, labels):
    x = m.embed(input_ids).transpose(1, 2)
    return loss_of(m.head(functional.group_norm(x, 4).transpose(1, 2)), labels)


@row(RIGHT, modules={"bn": lambda: nn.BatchNorm1d(HIDDEN).eval()})
def batch_norm_of_kept_statistics(m, input_ids, labels):
    x = m.embed(input_ids)
    m.bn.eval()
    return loss_of(m.head(m.bn(x.transpose(1, 2)).transpose(1, 2) + attend(m, m.bn(x.flatten(0, 1)).view(x.shape))), labels)


@row(REFUSED)
def mixing_by_fourier(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1).real), labels)


@row(REFUSED)
def fourier_of_features(m, input_ids, labels):
    x = m.embed(input_ids)
    y = torch.fft.irfft(torch.fft.rfft(x, dim=-1) * torch.polar(torch.ones(11), torch.arange(11) * 0.1), n=HIDDEN, dim=-1)
    return loss_of(m.head(y + attend(m, x)), labels)


@row(RIGHT)
def a_recurrence_by_logcumsumexp(m, input_ids, labels):
    x = m.embed(input_ids)
    a = functional.logsigmoid(m.out(x)).cumsum(1)
    return loss_of(m.head((a + torch.logcumsumexp(x - a, 1)).tanh()), labels)


@row(RIGHT)
def a_recurrence_by_a_loop(m, input_ids, labels):
    x = m.embed(input_ids)
    state, found = torch.zeros(x.shape[0], HIDDEN), []
    for t in range(x.shape[1]):
        state = 0.8 * state + x[:, t]
        found.append(state)
    return loss_of(m.head(torch.stack(found, 1)), labels)


@row(RIGHT)
def a_recurrence_by_unbind(m, input_ids, labels):
    state, found = 0.0, []
    for token in m.embed(input_ids).unbind(1):
        state = torch.tanh(token + 0.5 * state)
        found.append(state)
    return loss_of(m.head(torch.stack(found, dim=1)), labels)


@row(RIGHT)
def a_recurrence_by_iterating_tokens_first(m, input_ids, labels):
    state, found = torch.zeros(input_ids.shape[0], HIDDEN), []
    for token in m.embed(input_ids).transpose(0, 1):
        state = torch.tanh(token + 0.5 * state)
        found.append(state)
    return loss_of(m.head(torch.stack(found).transpose(0, 1)), labels)


@row(RIGHT)
def a_recurrence_by_split_of_one(m, input_ids, labels):
    state, found = 0.0, []
    for token in m.embed(input_ids).split(1, 1):
        state = torch.tanh(token + 0.5 * state)
        found.append(state)
    return loss_of(m.head(torch.cat(found, 1)), labels)


@row(RIGHT)
def a_recurrence_written_into_empty(m, input_ids, labels):
    x = m.embed(input_ids)
    states, state = torch.empty_like(x), 0.0
    for t in range(x.size(1)):
        state = 0.5 * state + x[:, t]
        states[:, t] = state
    return loss_of(m.head(states), labels)


@row(RIGHT)
def a_scan_of_doubling_steps(m, input_ids, labels):
    x, step = m.embed(input_ids), 1
    while step < x.shape[1]:
        x = x + functional.pad(x, (0, 0, step, 0))[:, :x.shape[1]] * 0.5
        step *= 2
    return loss_of(m.head(x), labels)


@row(RIGHT, modules={"conv": lambda: nn.Conv1d(HIDDEN, HIDDEN, 3, padding=2, groups=HIDDEN)})
def a_causal_convolution(m, input_ids, labels):
    x = m.embed(input_ids)
    y = m.conv(x.transpose(1, 2))[..., :x.shape[1]].transpose(1, 2)
    return loss_of(m.head(y), labels)


@row(RIGHT, modules={"conv": lambda: nn.Conv2d(1, 3, (1, 3), padding=(0, 1))})
def a_convolution_of_features_of_each_token(m, input_ids, labels):
    x = m.embed(input_ids)
    y = m.conv(x[:, None]).mean(1)
    return loss_of(m.head(x + y + attend(m, x)), labels)


@row(RIGHT, modules={"conv": lambda: nn.Conv2d(1, 3, (3, 1), padding=(1, 0))})
def a_convolution_of_tokens_by_conv2d(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(x + m.conv(x[:, None]).mean(1)), labels)


row(RIGHT, modules={"conv": lambda: nn.Conv1d(HIDDEN, HIDDEN, 1, stride=2)}, name="a convolution of width 1 and stride 2")(
    lambda m, input_ids, labels: m.conv(hidden(m, input_ids).transpose(1, 2)).square().mean())
row(RIGHT, modules={"conv": lambda: nn.Conv1d(HIDDEN, HIDDEN, 1, padding=1)}, name="a convolution of width 1 and padding", four=REFUSED)(
    lambda m, input_ids, labels: m.conv(hidden(m, input_ids).transpose(1, 2)).square().mean())


@sized(RIGHT, length=12, width=6, head_count=3, batch=3, modules={"conv": lambda: nn.Conv1d(6, 6, 3, padding=1)})
def a_convolution_of_features_with_tokens_as_channels(m, input_ids, labels):
    x = m.embed(input_ids)
    y = torch.stack([functional.conv1d(x[i][:, None], m.conv.weight[:1, :1], padding=1)[:, 0] for i in range(3)])
    return loss_of(m.head(x + y), labels)


@row(REFUSED, modules={"gru": lambda: nn.GRU(5, 5, batch_first=True)})
def gru_of_features_of_each_token(m, input_ids, labels):
    x = m.embed(input_ids)
    y, _ = m.gru(x.reshape(-1, 4, 5))
    return loss_of(m.head(x + y.reshape(x.shape)), labels)


@row(RIGHT, modules={"cell": lambda: nn.GRUCell(HIDDEN, HIDDEN)})
def a_gru_cell_of_merged_tokens(m, input_ids, labels):
    x = m.embed(input_ids).flatten(0, 1)
    return loss_of(m.head(m.cell(x, m.norm(x)).view(*input_ids.shape, -1)), labels)


row(REFUSED, modules={"gru": lambda: nn.GRU(HIDDEN, HIDDEN, batch_first=True)}, name="a gru of tokens")(
    lambda m, input_ids, labels: loss_of(m.head(m.gru(m.embed(input_ids))[0]), labels))
row(REFUSED, modules={"lstm": lambda: nn.LSTM(HIDDEN, 10, bidirectional=True)}, name="an lstm of tokens first")(
    lambda m, input_ids, labels: loss_of(m.head(m.lstm(m.embed(input_ids).transpose(0, 1))[0].transpose(0, 1)), labels))


@row(RIGHT)
def windows_of_twelve_attend(m, input_ids, labels):
    w = m.embed(input_ids).unflatten(1, (-1, 12)).flatten(0, 1)
    return loss_of(m.head((w + attend(m, w)).view(*input_ids.shape, -1)), labels)


@row(RIGHT)
def losses_of_windows_of_twelve(m, input_ids, labels):
    losses = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), input_ids, reduction="none")
    return losses.view(-1, 12).mean(1).max() + losses.view(-1, 12).mean(1).square().mean()
