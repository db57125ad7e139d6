"""Functions of autograd with a backward of their own, transforms of torch.func, scripted functions."""
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .table import DOCUMENTED, HEADS, REFUSED, RIGHT, attend, hidden, logits, loss_of, mlp, row


class _ChunkedLoss(torch.autograd.Function):
    """As Liger and Unsloth do: gradients are made in forward."""

    @staticmethod
    def forward(ctx, h, weight, labels):
        scores = h.flatten(0, 1) @ weight.T
        count = (labels != -100).sum()
        kept = (labels.flatten() != -100).float()[:, None]
        target = functional.one_hot(labels.flatten().clamp(min=0), weight.shape[0]).float()
        log_p = scores.log_softmax(-1)
        loss = -(log_p * target * kept).sum() / count
        d_scores = (log_p.exp() - target) * kept / count
        ctx.save_for_backward((d_scores @ weight).view(h.shape), d_scores.T @ h.flatten(0, 1))
        return loss

    @staticmethod
    def backward(ctx, d):
        d_h, d_weight = ctx.saved_tensors
        return d * d_h, d * d_weight, None


row(RIGHT, on_four=True, name="a fused linear cross entropy of its own")(
    lambda m, input_ids, labels: _ChunkedLoss.apply(hidden(m, input_ids), m.head.weight, labels))


class _LossByInnerGrad(torch.autograd.Function):
    """Gradients by autograd inside of forward, chunk by chunk."""

    @staticmethod
    def forward(ctx, h, labels):
        total, parts = 0.0, []
        with torch.enable_grad():
            for chunk, label in zip(h.detach().chunk(2, 1), labels.chunk(2, 1)):
                chunk = chunk.requires_grad_()
                loss = functional.cross_entropy(chunk.flatten(0, 1), label.flatten(), reduction="sum")
                parts.append(torch.autograd.grad(loss, chunk)[0])
                total = total + loss.detach()
        ctx.save_for_backward(torch.cat(parts, 1))
        return total

    @staticmethod
    def backward(ctx, d):
        return ctx.saved_tensors[0] * d, None


row(RIGHT, name="a chunked loss whose gradient is taken in forward")(
    lambda m, input_ids, labels: _LossByInnerGrad.apply(logits(m, input_ids), labels) / 60)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.mean(1)

    @staticmethod
    def backward(ctx, d):
        return (d / ctx.shape[1]).unsqueeze(1).expand(ctx.shape)


row(RIGHT, name="a mean over tokens with a backward of its own")(
    lambda m, input_ids, labels: m.classes(_Mean.apply(hidden(m, input_ids))).square().mean())


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx, d):
        return 2 * ctx.saved_tensors[0] * d


row(RIGHT, name="a square sum with a backward of its own")(lambda m, input_ids, labels: _Sum.apply(hidden(m, input_ids)) / 1000)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, d):
        x, weight = ctx.saved_tensors
        return d @ weight, d.flatten(0, 1).T @ x.flatten(0, 1)


row(RIGHT, stage=3, name="a linear with a backward of its own")(
    lambda m, input_ids, labels: loss_of(_Linear.apply(hidden(m, input_ids), m.head.weight), labels))


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight):
        ctx.save_for_backward(ids)
        ctx.rows = weight.shape[0]
        return weight[ids]

    @staticmethod
    def backward(ctx, d):
        ids, = ctx.saved_tensors
        return None, torch.zeros(ctx.rows, d.shape[-1]).index_add_(0, ids.flatten(), d.flatten(0, 1))


@row(RIGHT)
def an_embedding_with_a_backward_of_its_own(m, input_ids, labels):
    x = _Embed.apply(input_ids, m.embed.weight)
    return loss_of(m.head(x + attend(m, x, is_causal=True)), labels)


class _NormGrad(torch.autograd.Function):
    """Divides gradients by their norm over all tokens."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        return d / d.norm()


row(DOCUMENTED, name="gradients of activations normalized in a backward")(
    lambda m, input_ids, labels: loss_of(m.head(_NormGrad.apply(hidden(m, input_ids))), labels))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        rstd = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    def backward(ctx, d):
        x, weight, rstd = ctx.saved_tensors
        y = x * rstd
        g = d * weight
        return rstd * (g - y * (g * y).mean(-1, keepdim=True)), (d * y).sum((0, 1))


@row(RIGHT, on_four=True, stage=1)
def rms_norm_with_a_backward_of_its_own(m, input_ids, labels):
    x = _RMSNorm.apply(m.embed(input_ids), m.norm.weight)
    return loss_of(m.head(x + attend(m, x)), labels)


@row(REFUSED)
def func_grad_of_a_token_energy(m, input_ids, labels):
    x = m.embed(input_ids)
    force = torch.func.grad(lambda y: m.score(torch.tanh(m.out(y))).sum())(x)
    return loss_of(m.head(x - 0.1 * force), labels)


@row(REFUSED)
def vmap_over_tokens(m, input_ids, labels):
    x = m.embed(input_ids)
    y = torch.func.vmap(lambda one: mlp(m, one), in_dims=1, out_dims=1)(x)
    return loss_of(m.head(x + y), labels)


@row(REFUSED)
def vmapped_loss_of_samples(m, input_ids, labels):
    scores = logits(m, input_ids)
    each = torch.func.vmap(lambda s, l: functional.cross_entropy(s, l, reduction="sum"))(scores, input_ids)
    return each.mean() / 10


@row(RIGHT)
def checkpoint_of_the_loss_in_chunks(m, input_ids, labels):
    h = hidden(m, input_ids)
    part = lambda a, b: functional.cross_entropy(m.head(a).flatten(0, 1), b.flatten(), reduction="sum")
    total = sum(checkpoint(part, a, b, use_reentrant=False) for a, b in zip(h.split(5, 1), labels.split(5, 1)))
    return total / (labels != -100).sum()


row(RIGHT, stage=3, name="scripted functions")(lambda m, input_ids, labels: loss_of(m.head(_scripted(hidden(m, input_ids), m.norm.weight)), labels))


@torch.jit.script
def _scripted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x) * w


@torch.jit.script
def _scripted_pool(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1) / x.size(1)


row(RIGHT, name="a scripted pool by the length")(
    lambda m, input_ids, labels: m.classes(_scripted_pool(hidden(m, input_ids))).square().mean())
row(REFUSED, name="vmapped sum of samples")(
    lambda m, input_ids, labels: torch.func.vmap(lambda one: one.square().sum())(hidden(m, input_ids)).mean() / 100)
row(REFUSED, name="vmapped mean over tokens")(
    lambda m, input_ids, labels: m.classes(torch.func.vmap(lambda one: one.mean(0))(hidden(m, input_ids))).square().mean())


@row(REFUSED)
def vmapped_attention(m, input_ids, labels):
    x = m.embed(input_ids)
    def of_one(one):
        q, k, v = (part.unflatten(-1, (HEADS, 5)).transpose(0, 1) for part in m.qkv(one).chunk(3, -1))
        return m.out(functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))
    return loss_of(m.head(torch.func.vmap(of_one)(x)), labels)


@row(REFUSED)
def func_grad_of_a_sample_loss(m, input_ids, labels):
    h = hidden(m, input_ids)
    g = torch.func.grad(lambda y: m.score(y).square().mean())(h)
    return loss_of(m.head(h - g), labels)


@row(REFUSED)
def func_vmap_of_grad(m, input_ids, labels):
    h = hidden(m, input_ids)
    g = torch.func.vmap(torch.func.grad(lambda y: m.score(y).square().sum()))(h)
    return loss_of(m.head(h - g), labels)


class _SumThenRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.square().sum().sqrt()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, d):
        x, y = ctx.saved_tensors
        return d * x / y


row(RIGHT, name="a norm with a backward of its own")(lambda m, input_ids, labels: _SumThenRoot.apply(hidden(m, input_ids)) / 10)


class _Entropy(torch.autograd.Function):
    """A mean of all tokens' entropies, with its gradient by hand."""

    @staticmethod
    def forward(ctx, x):
        p = x.softmax(-1)
        each = -(p * p.log()).sum(-1)
        ctx.save_for_backward(p, each)
        return each.mean()

    @staticmethod
    def backward(ctx, d):
        p, each = ctx.saved_tensors
        return -d * p * (p.log() + each[..., None]) / each.numel()


row(RIGHT, name="an entropy with a backward of its own")(lambda m, input_ids, labels: _Entropy.apply(m.classes(hidden(m, input_ids))))


@row(REFUSED)
def vmapped_sum_of_tokens(m, input_ids, labels):
    h = hidden(m, input_ids)
    return torch.vmap(lambda a: a.sum(0))(h).square().mean() * 0.01


@row(REFUSED)
def per_sample_losses_by_vmap_of_means(m, input_ids, labels):
    scores = logits(m, input_ids)
    return torch.vmap(lambda s, t: functional.cross_entropy(s, t))(scores, input_ids).max()


@row(REFUSED)
def vmapped_softmax_over_tokens(m, input_ids, labels):
    s = m.score(hidden(m, input_ids))[..., 0]
    w = torch.vmap(lambda one: one.softmax(0))(s)
    return (w * s).mean()


@row(REFUSED)
def vmapped_cumsum(m, input_ids, labels):
    x = m.embed(input_ids)
    return loss_of(m.head(torch.vmap(lambda one: one.cumsum(0))(x)), labels)


@row(REFUSED)
def jvp_of_a_token_function(m, input_ids, labels):
    x = m.embed(input_ids)
    y, t = torch.func.jvp(lambda a: torch.tanh(m.out(a)), (x,), (torch.ones_like(x),))
    return loss_of(m.head(y + t), labels)


class _MaskedMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, losses, mask):
        ctx.save_for_backward(mask)
        return (losses * mask).sum() / mask.sum()

    @staticmethod
    def backward(ctx, d):
        mask, = ctx.saved_tensors
        return d * mask / mask.sum(), None


@row(RIGHT)
def a_masked_mean_with_a_backward_of_its_own(m, input_ids, labels):
    losses = functional.cross_entropy(logits(m, input_ids).transpose(1, 2), labels, reduction="none")
    return _MaskedMean.apply(losses, (labels != -100).float())


class _ZLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores):
        lse = scores.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(scores, lse)
        return lse.square().mean()

    @staticmethod
    def backward(ctx, d):
        scores, lse = ctx.saved_tensors
        return d * 2 * lse * (scores - lse).exp() / (scores.shape[0] * scores.shape[1])


row(RIGHT, name="a z loss with a backward of its own")(lambda m, input_ids, labels: _ZLoss.apply(logits(m, input_ids)))


class _PooledSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.like = x
        return x.sum(1)

    @staticmethod
    def backward(ctx, d):
        return d[:, None].expand_as(ctx.like)


row(RIGHT, name="a sum over tokens with a backward of its own")(
    lambda m, input_ids, labels: m.classes(_PooledSum.apply(hidden(m, input_ids))).square().mean())


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d):
        return -0.5 * d


row(RIGHT, name="a gradient reversed of pooled tokens")(
    lambda m, input_ids, labels: m.classes(_Reverse.apply(hidden(m, input_ids).mean(1))).square().mean() + m.score(_Reverse.apply(hidden(m, input_ids))).mean())


@row(RIGHT)
def a_hook_on_a_mean_over_tokens(m, input_ids, labels):
    total = hidden(m, input_ids).mean(1)
    if total.requires_grad:
        total.register_hook(lambda g: g * 0.5)
    return m.classes(total).square().mean()
