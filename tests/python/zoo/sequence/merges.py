"""Operators that mix tokens and have no name for it: views, pools, convolutions, recurrences, orders, windows."""
import torch
from torch import nn
from torch.nn import functional

from .table import BATCH, HIDDEN, LENGTH, REFUSED, RIGHT, attend, floats, hidden, loss_of, mlp, row


def _of(m, x, labels):
    return loss_of(m.head(x), labels)


def same_size(name, function, expected=REFUSED, **options):
    """A row for function(x [B, S, D]) -> [B, S, D]."""
    def forward(m, input_ids, labels):
        return _of(m, function(m, m.embed(input_ids)), labels)
    row(expected, name=name, **options)(forward)


def channels(function):
    """function(x [B, D, S]), tokens last as convolutions have them."""
    return lambda m, x: function(m, x.transpose(1, 2)).transpose(1, 2)


_CONV = {"conv": lambda: nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)}
same_size("convolution of width 3", channels(lambda m, x: m.conv(x)), RIGHT, modules=_CONV, four=REFUSED, says="convolution", on_four=True)
same_size("causal convolution by depth", channels(lambda m, x: m.conv(x)[..., :-3]), RIGHT,
          modules={"conv": lambda: nn.Conv1d(HIDDEN, HIDDEN, 4, padding=3, groups=HIDDEN)})
same_size("two-dimensional convolution over tokens and features", lambda m, x: m.conv(x.unsqueeze(1)).squeeze(1), RIGHT,
          modules={"conv": lambda: nn.Conv2d(1, 1, 3, padding=1)})
same_size("transposed convolution", channels(lambda m, x: m.conv(x)), RIGHT, modules={"conv": lambda: nn.ConvTranspose1d(HIDDEN, HIDDEN, 3, padding=1)}, four=REFUSED)
same_size("a convolution of Fourier transforms", lambda m, x: torch.fft.fft(x, dim=1).real, says="fft")
same_size("a Fourier transform in two dims", lambda m, x: torch.fft.fft2(x).real, says="fft")
same_size("a Fourier transform of real numbers and back", lambda m, x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 0.5, n=x.shape[1], dim=1), says="fft")
same_size("Fourier transforms of features", lambda m, x: torch.fft.fft(x, dim=-1).real, REFUSED)
same_size("average pool of width 3", channels(lambda m, x: functional.avg_pool1d(x, 3, 1, 1)), says="avg_pool", on_four=True)
same_size("max pool of width 3", channels(lambda m, x: functional.max_pool1d(x, 3, 1, 1)), says="max_pool")
same_size("lp pool of width 3", channels(lambda m, x: functional.lp_pool1d(functional.pad(x, (1, 1)), 2.0, 3, 1)))
same_size("average pool over tokens and features", lambda m, x: functional.avg_pool2d(x.unsqueeze(1), 3, 1, 1).squeeze(1))
same_size("local response norm over tokens", lambda m, x: functional.local_response_norm(x, 3), REFUSED)
same_size("local response norm over features", channels(lambda m, x: functional.local_response_norm(x, 3)), REFUSED)
same_size("running sums of tokens", lambda m, x: x.cumsum(1), RIGHT, on_four=True)
same_size("running sums of tokens by a negative dim", lambda m, x: x.cumsum(-2), RIGHT)
same_size("running products of tokens", lambda m, x: x.cumprod(1), RIGHT)
same_size("running maxima of tokens", lambda m, x: x.cummax(1).values, RIGHT)
same_size("running logsumexp of tokens", lambda m, x: x.logcumsumexp(1), RIGHT)
same_size("running sums in place", lambda m, x: (x * 1.0).cumsum_(1), says="cumsum")
same_size("running sums by a triangle", lambda m, x: torch.ones(x.shape[1], x.shape[1]).tril() @ x, RIGHT)
same_size("tokens mixed by a learned matrix", lambda m, x: (m.mix[:x.shape[1], :x.shape[1]] @ x), RIGHT, modules={"mix": lambda: floats(0, LENGTH, LENGTH)})
same_size("tokens mixed by a linear layer", lambda m, x: functional.linear(x.transpose(1, 2), m.mix[:x.shape[1], :x.shape[1]]).transpose(1, 2), RIGHT,
          modules={"mix": lambda: floats(0, LENGTH, LENGTH)})
same_size("sorted tokens", lambda m, x: x.sort(dim=1).values, RIGHT)
same_size("sorted along the first dim by msort, tokens first", lambda m, x: x.transpose(0, 1).msort().transpose(0, 1), RIGHT, on_four=True)
same_size("flipped tokens", lambda m, x: x.flip(1), RIGHT, on_four=True)
same_size("flipped tokens by fliplr", lambda m, x: torch.fliplr(x), RIGHT, on_four=True)
same_size("flipped tokens by flipud, tokens first", lambda m, x: torch.flipud(x.transpose(0, 1)).transpose(0, 1), RIGHT)
same_size("rolled without a dim", lambda m, x: x.roll(HIDDEN), says="roll", on_four=True)
same_size("rolled by two dims", lambda m, x: x.roll((1, 1), (0, 1)), RIGHT)
same_size("rotated by 90 degrees twice", lambda m, x: x.rot90(2, (1, 2)))
same_size("a triangle of tokens and features", lambda m, x: x.tril(), RIGHT, on_four=True)
same_size("the other triangle", lambda m, x: x.triu(-3), RIGHT)
same_size("a gradient along tokens", lambda m, x: torch.gradient(x, dim=1)[0], RIGHT)
same_size("a gradient along all dims", lambda m, x: sum(torch.gradient(x)), RIGHT)
same_size("a gradient along features", lambda m, x: torch.gradient(x, dim=-1)[0], RIGHT)
same_size("shuffled channels", lambda m, x: functional.channel_shuffle(x.unsqueeze(-1), 4).squeeze(-1), says="channel_shuffle")
same_size("shuffled channels of features", lambda m, x: functional.channel_shuffle(x.transpose(1, 2).unsqueeze(-1), 4).squeeze(-1).transpose(1, 2), REFUSED)
same_size("softmax over tokens", lambda m, x: x.softmax(1) * x, RIGHT, on_four=True)
same_size("softmax over tokens of functional's legacy dim", lambda m, x: torch.log_softmax(x, -2), RIGHT)
same_size("softmax of features and tokens together", lambda m, x: x.flatten(1).softmax(1).view_as(x), RIGHT)
same_size("normalize over tokens", lambda m, x: functional.normalize(x, dim=1), RIGHT, on_four=True)
same_size("normalize over tokens and features", lambda m, x: x / x.norm(dim=(1, 2), keepdim=True), RIGHT, four=REFUSED)
same_size("normalize by the norm of all", lambda m, x: x / x.norm(), REFUSED)
same_size("deviation over tokens", lambda m, x: x / x.std(1, keepdim=True), RIGHT)
same_size("layer norm over tokens and features", lambda m, x: functional.layer_norm(x, x.shape[1:]), RIGHT, four=REFUSED)
same_size("layer norm over tokens", lambda m, x: functional.layer_norm(x.transpose(1, 2), (x.shape[1],)).transpose(1, 2), RIGHT)
same_size("batch norm of features", channels(lambda m, x: m.bn(x)), REFUSED, modules={"bn": lambda: nn.BatchNorm1d(HIDDEN)}, on_four=True)
same_size("batch norm of merged tokens", lambda m, x: m.bn(x.flatten(0, 1)).view_as(x), REFUSED, modules={"bn": lambda: nn.BatchNorm1d(HIDDEN)})
same_size("batch norm in eval", channels(lambda m, x: functional.batch_norm(x, torch.zeros(HIDDEN), torch.ones(HIDDEN))), RIGHT)
same_size("instance norm", channels(lambda m, x: functional.instance_norm(x)), RIGHT)
same_size("group norm over tokens", channels(lambda m, x: functional.group_norm(x, 4)), RIGHT)
same_size("group norm over tokens written out", lambda m, x: (x - x.mean((1, 2), keepdim=True)) * 2, RIGHT)
same_size("nearest interpolation", channels(lambda m, x: functional.interpolate(functional.interpolate(x, scale_factor=2), scale_factor=0.5)))
same_size("linear interpolation", channels(lambda m, x: functional.interpolate(x, scale_factor=2, mode="linear")[..., ::2]))
same_size("an unfolded window", lambda m, x: functional.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1), RIGHT)
same_size("an unfolded window without pad", lambda m, x: x.unfold(1, 4, 4).flatten(1, 2).transpose(1, 1)[:, :1].mean((1, 2), keepdim=True) + x, RIGHT)
same_size("im2col", lambda m, x: functional.unfold(x.unsqueeze(1), 3, padding=1).mean(1).view_as(x))
same_size("as_strided windows", lambda m, x: x + x.contiguous().as_strided((BATCH, x.shape[1] - 1, HIDDEN), x.contiguous().stride()).mean(1, keepdim=True))
same_size("as_strided from the second token", lambda m, x: x + x.as_strided(x.shape, (x.stride(0), 0, 1)))
same_size("pad with copies of the last token", channels(lambda m, x: functional.avg_pool1d(functional.pad(x, (1, 1), mode="replicate"), 3, 1)))
same_size("reflected pad", channels(lambda m, x: functional.pad(x, (2, 2), mode="reflect")[..., 1:-3]), RIGHT)
same_size("circular pad", channels(lambda m, x: functional.pad(x, (1, 0), mode="circular")[..., :-1]), RIGHT)
same_size("a GRU", lambda m, x: m.gru(x)[0], modules={"gru": lambda: nn.GRU(HIDDEN, HIDDEN, batch_first=True)}, says="gru", on_four=True)
same_size("an LSTM", lambda m, x: m.lstm(x)[0], modules={"lstm": lambda: nn.LSTM(HIDDEN, HIDDEN // 2, bidirectional=True, batch_first=True)}, says="lstm")
same_size("a plain RNN, tokens first", lambda m, x: m.rnn(x.transpose(0, 1))[0].transpose(0, 1), says="rnn_tanh",
          modules={"rnn": lambda: nn.RNN(HIDDEN, HIDDEN)})
same_size("an outer product of tokens", lambda m, x: torch.einsum("bsd,btd->bst", x, x).softmax(-1) @ x, RIGHT, four=REFUSED)
same_size("products of tokens and tokens", lambda m, x: (x @ x.transpose(1, 2)) @ x, RIGHT, four=REFUSED, says="bmm", on_four=True)
same_size("distances of tokens", lambda m, x: torch.cdist(x, x).neg().softmax(-1) @ x, says="cdist")
same_size("distances by broadcasting", lambda m, x: (-(x[:, :, None] - x[:, None]).square().sum(-1)).softmax(-1) @ x, RIGHT, four=REFUSED)
same_size("products by broadcasting", lambda m, x: (x[:, :, None] * x[:, None]).mean(2), RIGHT)
same_size("covariance of features", lambda m, x: x @ (x.transpose(1, 2) @ x), RIGHT)
same_size("covariance by torch.cov", lambda m, x: x @ torch.cov(x.flatten(0, 1).T), RIGHT)
same_size("correlation by torch.corrcoef", lambda m, x: x @ torch.corrcoef(x.flatten(0, 1).T), RIGHT)
same_size("whitening by qr", lambda m, x: torch.linalg.qr(x)[0])
same_size("a svd of tokens", lambda m, x: x + torch.linalg.svdvals(x).sum(1)[:, None, None])
same_size("a kronecker product", lambda m, x: x + torch.kron(x, torch.ones(1, 2, 1))[:, ::2], RIGHT)
same_size("trapezoids over tokens", lambda m, x: x + torch.trapezoid(x, dim=1)[:, None], RIGHT)
same_size("running trapezoids over tokens", lambda m, x: x + functional.pad(torch.cumulative_trapezoid(x, dim=1), (0, 0, 1, 0)), RIGHT)
same_size("a quantile over tokens", lambda m, x: x - x.quantile(0.3, dim=1, keepdim=True), RIGHT)
same_size("a median over tokens", lambda m, x: x - x.median(1, keepdim=True).values, RIGHT)
same_size("a k-th value over tokens", lambda m, x: x - x.kthvalue(2, dim=1, keepdim=True).values, RIGHT)
same_size("a mode over tokens", lambda m, x: x - x.mode(1, keepdim=True).values, RIGHT)
same_size("a renormalization of tokens", lambda m, x: x.renorm(2, 1, 1.0), RIGHT)
same_size("a renormalization of features", lambda m, x: x.renorm(2, 2, 1.0), RIGHT)
same_size("products over tokens", lambda m, x: x + x.prod(1, keepdim=True), RIGHT)
same_size("a histogram's bins", lambda m, x: x * torch.histc(x.detach(), 5)[0] / 100, REFUSED)
same_size("repeated tokens", lambda m, x: x.repeat(1, 2, 1)[:, :x.shape[1]], RIGHT)
same_size("tokens repeated and averaged", lambda m, x: x.repeat_interleave(2, 1).unflatten(1, (-1, 2)).mean(2), RIGHT)
same_size("tiled tokens", lambda m, x: x.tile(1, 2, 1)[:, x.shape[1]:], RIGHT)
same_size("tokens gathered by a fixed order", lambda m, x: x.gather(1, torch.arange(x.shape[1]).flip(0)[None, :, None].expand_as(x)), RIGHT)
same_size("tokens taken along a dim", lambda m, x: torch.take_along_dim(x, x.argsort(1), 1), RIGHT)
same_size("tokens picked by numbers of storage", lambda m, x: x + x.take(torch.arange(HIDDEN)))
same_size("tokens indexed by a flipped range", lambda m, x: x[:, torch.arange(x.shape[1]).flip(0)], RIGHT)
same_size("shuffled tokens of merged samples", lambda m, x: x.flatten(0, 1)[torch.arange(x.shape[0] * x.shape[1]).flip(0)].view_as(x), RIGHT)
same_size("samples swapped", lambda m, x: x + x.flip(0) + x.roll(1, 0), RIGHT)
same_size("samples swapped by an index", lambda m, x: x + x[torch.tensor([2, 0, 1])], RIGHT)
same_size("samples averaged", lambda m, x: x - x.mean(0, keepdim=True), RIGHT)
same_size("samples attended to", lambda m, x: x + (x.transpose(0, 1) @ x.permute(1, 2, 0)).softmax(-1).matmul(x.transpose(0, 1)).transpose(0, 1), RIGHT)

# --- views that merge tokens with another dim ---
same_size("pairs of neighbours by a view", lambda m, x: m.pairs(x.reshape(BATCH, x.shape[1] // 2, 2 * HIDDEN)).view_as(x), RIGHT,
          modules={"pairs": lambda: nn.Linear(2 * HIDDEN, 2 * HIDDEN)}, on_four=True)
same_size("pairs of distant tokens by a view", lambda m, x: x - x.view(BATCH, 2, x.shape[1] // 2, HIDDEN).mean(1).repeat(1, 2, 1), RIGHT, on_four=True)
same_size("pairs of neighbours averaged by a view", lambda m, x: x.view(BATCH, -1, 2, HIDDEN).mean(2).repeat_interleave(2, 1), RIGHT)
same_size("chunks averaged by a view", lambda m, x: x - x.unflatten(1, (3, -1)).mean(2).repeat_interleave(x.shape[1] // 3, 1), RIGHT)
same_size("chunks swapped by a view", lambda m, x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2), RIGHT)
same_size("a wrong view of heads", lambda m, x: x.reshape(BATCH, 4, x.shape[1], 5).softmax(-1).view_as(x), RIGHT)
same_size("a wrong view of heads over chunks", lambda m, x: x.reshape(BATCH, 4, x.shape[1], 5).softmax(1).reshape(x.shape), RIGHT)
same_size("tokens and features swapped by a view", lambda m, x: m.out(x.reshape(BATCH, HIDDEN, -1).transpose(1, 2)), RIGHT)
same_size("tokens and samples swapped by a view", lambda m, x: x - x.reshape(x.shape[1], BATCH, HIDDEN).mean(1, keepdim=True).view(1, -1, HIDDEN), RIGHT)
same_size("norm of flattened samples", lambda m, x: x / x.flatten(1).norm(dim=1)[:, None, None], RIGHT, four=REFUSED)
same_size("sums of flattened samples added to tokens", lambda m, x: x + x.flatten(1).sum(1)[:, None, None], RIGHT, on_four=True)
same_size("mean of merged tokens", lambda m, x: x - x.view(-1, HIDDEN).mean(0), RIGHT)
same_size("largest of merged tokens", lambda m, x: x - x.view(-1, HIDDEN).amax(0), RIGHT)
same_size("neighbours by split and stack", lambda m, x: torch.stack(x.unflatten(1, (-1, 2)).unbind(2)[::-1], 2).flatten(1, 2), RIGHT)
same_size("patches merged and split again", lambda m, x: x.view(BATCH, -1, 2 * HIDDEN).view(BATCH, -1, HIDDEN) * 2, RIGHT)
same_size("a flattened batch and back", lambda m, x: x.flatten().view_as(x) * 2, RIGHT)
same_size("windows of Swin", lambda m, x: attend(m, x.reshape(-1, 6, HIDDEN)).reshape(x.shape), RIGHT)
same_size("axial attention of a grid",
          lambda m, x: attend(m, x.unflatten(1, (4, -1)).transpose(1, 2).flatten(0, 1)).unflatten(0, (BATCH, -1)).transpose(1, 2).flatten(1, 2), RIGHT)
same_size("movedim and back", lambda m, x: mlp(m, x.movedim(1, 0)).movedim(0, 1), RIGHT)
same_size("complex pairs of features", lambda m, x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * 1j).flatten(-2), RIGHT)
same_size("viewed as other bits", lambda m, x: x + x.detach().view(torch.int32).bitwise_and(1).float(), RIGHT)


@row(RIGHT, modules={"pairs": lambda: nn.Linear(2 * HIDDEN, HIDDEN)})
def half_as_many_tokens(m, input_ids, labels):
    """A patch merge: two neighbours become one token; the loss is of half the labels."""
    x = m.pairs(m.embed(input_ids).reshape(BATCH, -1, 2 * HIDDEN))
    return loss_of(m.head(x), labels[:, 1::2])


@row(RIGHT)
def an_hourglass(m, input_ids, labels):
    """Tokens averaged by fours, a layer, repeated."""
    x = m.embed(input_ids)
    short = x.unflatten(1, (-1, 4)).mean(2)
    return loss_of(m.head(x + mlp(m, short).repeat_interleave(4, 1)), labels)


@row(RIGHT)
def an_hourglass_with_attention(m, input_ids, labels):
    x = m.embed(input_ids)
    short = x.unflatten(1, (-1, 4)).mean(2)
    return loss_of(m.head(x + attend(m, short).repeat_interleave(4, 1)), labels)


@row(RIGHT, four=REFUSED)
def a_contrast_of_tokens(m, input_ids, labels):
    x = functional.normalize(hidden(m, input_ids).flatten(0, 1), dim=-1)
    return functional.cross_entropy(x @ x.T / 0.5, torch.arange(len(x)))


@row(RIGHT)
def a_triplet_of_neighbours(m, input_ids, labels):
    x = hidden(m, input_ids)
    return functional.triplet_margin_loss(x[:, :-2], x[:, 1:-1], x[:, 2:])


@row(RIGHT)
def total_variation(m, input_ids, labels):
    x = hidden(m, input_ids)
    return loss_of(m.head(x), labels) + x.diff(dim=-1).abs().mean()


