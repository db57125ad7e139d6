"""Operators on slices as users' programs have them: of heads, of the features of an MLP, of weights, of vocabularies.
See tensor_parts.py."""
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import zoo
from zoo import parts

PROGRAMS = zoo.Collection("operators", parts.tokens, parts.next_token)


def case(name, make, **options):
    PROGRAMS.add(name.replace(" ", "_"), make, **options)


# Heads, as many as ranks.


class A(parts.Attention):
    heads = 2
    groups = 2
    size = 16


def att(name):

    def put(fn):
        case("att " + name, lambda: parts.Lm(attention=type("X", (A,), {"attend": fn})))
        return fn
    return put


def std(q, k, v, **o):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, **o)


att("squeeze dim")(lambda self, q, k, v: std(q.squeeze(1), k.squeeze(1), v).squeeze(1))
att("squeeze all")(lambda self, q, k, v: std(q.squeeze(), k, v.squeeze()))


@att("expand bias")
def _(self, q, k, v):
    b = torch.arange(2.0)[None, :, None, None].expand(3, 2, 10, 10)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=b * torch.randn(10, 10, generator=torch.Generator().manual_seed(1)))


att("expand key")(lambda self, q, k, v: std(q, k[:, :1].expand(-1, 2, -1, -1), v))
att("expand_as")(lambda self, q, k, v: std(q, k[:, 1:].expand_as(k), v))


@att("broadcast_to mask")
def _(self, q, k, v):
    mask = torch.ones(10, 10, dtype=torch.bool).tril().broadcast_to(3, 2, 10, 10)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@att("mask of heads whole bool")
def _(self, q, k, v):
    mask = torch.ones(3, 2, 10, 10, dtype=torch.bool).tril()
    mask[:, 1] = torch.ones(10, 10, dtype=torch.bool).tril(2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@att("mask one head whole")
def _(self, q, k, v):
    mask = torch.ones(3, 1, 10, 10, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@att("tensordot")
def _(self, q, k, v):
    s = torch.stack([torch.tensordot(q[b], k[b], dims=([2], [2])).diagonal(dim1=0, dim2=2).permute(2, 0, 1) for b in range(3)])
    return (s / 4).softmax(-1) @ v


att("loop over heads")(lambda self, q, k, v: torch.stack([std(q[:, h], k[:, h], v[:, h]) for h in range(2)], 1))
att("loop over unbind")(lambda self, q, k, v: torch.stack([std(a, b, c) for a, b, c in zip(q.unbind(1), k.unbind(1), v.unbind(1))], 1))
att("repeat")(lambda self, q, k, v: std(q, k[:, :1].repeat(1, 2, 1, 1), v))
att("tile of heads")(lambda self, q, k, v: std(q.repeat(1, 2, 1, 1), k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))[:, 1:3])
att("roll heads")(lambda self, q, k, v: std(q, k.roll(1, 1), v))
att("flip heads")(lambda self, q, k, v: std(q, k.flip(1), v))
att("index heads")(lambda self, q, k, v: std(q, k[:, [1, 0]], v.index_select(1, torch.tensor([1, 0]))))
att("mean over heads in value")(lambda self, q, k, v: std(q, k, v) - std(q, k, v).mean(1, keepdim=True))
att("softmax over heads")(lambda self, q, k, v: (q @ k.transpose(-1, -2) / 4).softmax(1) @ v)
att("matmul one whole")(lambda self, q, k, v: std(q @ torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1)), k, v))
att("matmul square whole")(lambda self, q, k, v: std(q @ torch.randn(16, 16, generator=torch.Generator().manual_seed(1)), k, v))


@att("dropout mask whole")
def _(self, q, k, v):
    keep = (torch.rand(3, 2, 10, 10, generator=torch.Generator().manual_seed(1)) > 0.2).float()
    return (q @ k.transpose(-1, -2) / 4).softmax(-1) * keep @ v


att("movedim")(lambda self, q, k, v: std(q.movedim(1, 0).contiguous().movedim(0, 1), k.swapaxes(1, 2).swapaxes(1, 2), v))


@att("flatten batch heads einsum")
def _(self, q, k, v):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    a = torch.einsum("nqd,nkd->nqk", q, k).softmax(-1)
    return torch.einsum("nqk,nkd->nqd", a, v).unflatten(0, (3, 2))


@att("einsum ellipsis")
def _(self, q, k, v):
    a = torch.einsum("...qd,...kd->...qk", q, k).softmax(-1)
    return torch.einsum("...qk,...kd->...qd", a, v)


@att("inner products mul sum")
def _(self, q, k, v):
    a = (q[:, :, :, None] * k[:, :, None]).sum(-1).softmax(-1)
    return (a[..., None] * v[:, :, None]).sum(3)


att("cdist")(lambda self, q, k, v: (-torch.cdist(q, k)).softmax(-1) @ v)


@att("local windows")
def _(self, q, k, v):
    q, k, v = (t.reshape(3, 2, 2, 5, 16) for t in (q, k, v))
    return std(q, k, v).reshape(3, 2, 10, 16)


@att("unfold keys")
def _(self, q, k, v):
    k, v = (F.pad(t, (0, 0, 2, 0)).unfold(2, 3, 1) for t in (k, v))
    a = (q[..., None] * k).sum(3).softmax(-1)
    return (a[..., None, :] * v).sum(-1)


att("chunked attention")(lambda self, q, k, v: torch.cat([F.scaled_dot_product_attention(c, k, v) for c in q.split(3, 2)], 2))
att("numel scale")(lambda self, q, k, v: std(q * (q.numel() / 960), k * q.shape[1] / 2, v))
att("one hot heads")(lambda self, q, k, v: std(q, k, v) * F.one_hot(torch.arange(2), 2).float().sum(0)[None, :, None, None])


@att("scan by time")
def _(self, q, k, v):
    s = torch.zeros(3, 2, 16, 16)
    out = []
    for t in range(10):
        s = 0.9 * s + k[:, :, t, :, None] * v[:, :, t, None, :]
        out.append((q[:, :, t, :, None] * s).sum(2))
    return torch.stack(out, 2)


@att("scan with einsum")
def _(self, q, k, v):
    s = q.new_zeros(q.shape[0], q.shape[1], 16, 16)
    out = []
    for t in range(10):
        s = s + torch.einsum("bhd,bhe->bhde", k[:, :, t], v[:, :, t])
        out.append(torch.einsum("bhd,bhde->bhe", q[:, :, t], s))
    return torch.stack(out, 2)


@att("gather keys")
def _(self, q, k, v):
    i = torch.randint(0, 10, (3, 2, 5, 1), generator=torch.Generator().manual_seed(1)).expand(-1, -1, -1, 16)
    return F.scaled_dot_product_attention(q, k.gather(2, i), v.gather(2, i))


@att("advanced index")
def _(self, q, k, v):
    i = torch.tensor([0, 3, 5])
    return F.scaled_dot_product_attention(q, k[:, :, i], v[:, :, i])


@att("boolean index")
def _(self, q, k, v):
    i = torch.arange(10) % 2 == 0
    return F.scaled_dot_product_attention(q, k[:, :, i], v[..., i, :])


att("sort keys")(lambda self, q, k, v: std(q, k.sort(2).values, v))


def mlp(name, inner):

    def put(fn):
        case(f"mlp {name}", lambda: parts.Lm(mlp=type("X", (parts.Mlp,), {"act": fn, "__init__": lambda self: parts.Mlp.__init__(self, inner)})))
    return put


mlp("one each squeeze", 2)(lambda self, x: x.relu().squeeze().squeeze(-1))
mlp("one each expand", 2)(lambda self, x: x * x[..., :1].expand(3, 10, 2))
mlp("one each sum of rest", 2)(lambda self, x: x + x.sum(-1, keepdim=True).expand_as(x))
mlp("one each outer", 2)(lambda self, x: torch.einsum("bsi,bsj->bsij", x, x).sum(-1))
mlp("one each cat", 2)(lambda self, x: torch.cat([x[..., 1:], x[..., :1]], -1))


@mlp("one each stack unbind", 2)
def _(self, x):
    a, b = x.unbind(-1)
    return torch.stack([a * b, a + b], -1)


mlp("einsum square", 48)(lambda self, x: torch.einsum("bsi,ij->bsj", x, torch.eye(48).roll(1, 0)))
mlp("einsum diag", 48)(lambda self, x: torch.einsum("bsi,i->bsi", x, torch.linspace(0, 1, 48)))
mlp("einsum reduce", 48)(lambda self, x: x * torch.einsum("bsi,bsi->bs", x, x)[..., None].tanh())
mlp("einsum tokens", 48)(lambda self, x: torch.einsum("bsi,st->bti", x, torch.ones(10, 10).tril() / 10))
mlp("einsum three", 48)(lambda self, x: torch.einsum("bsi,bti,bto->bso", x, x / 10, x))
mlp("einsum all", 48)(lambda self, x: x * (1 + torch.einsum("bsi->", x).tanh()) + torch.einsum("bsi->bi", x)[:, None] / 10)
mlp("matmul square whole", 48)(lambda self, x: x @ torch.eye(48).roll(1, 0))
mlp("mv", 48)(lambda self, x: x * (x @ torch.linspace(0, 1, 48))[..., None].tanh())
mlp("outer whole", 48)(lambda self, x: x + torch.outer(torch.linspace(0, 1, 10), torch.linspace(0, 1, 48)))
mlp("kron groups", 48)(lambda self, x: (x.view(3, 10, 6, 8) @ torch.randn(8, 8, generator=torch.Generator().manual_seed(1))).flatten(2))
mlp("fft features", 48)(lambda self, x: torch.fft.rfft(x, dim=-1).abs().repeat_interleave(2, -1)[..., :48])
mlp("fft tokens", 48)(lambda self, x: torch.fft.fft(x, dim=1).real)
mlp("interpolate", 48)(lambda self, x: F.interpolate(x.transpose(1, 2), size=5).repeat_interleave(2, -1).transpose(1, 2))
mlp("max pool tokens", 48)(lambda self, x: F.max_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2))
mlp("avg pool features", 48)(lambda self, x: F.avg_pool1d(x, 3, 1, 1))
mlp("embedding of digits", 48)(lambda self, x: x + F.embedding((x.detach() > 0).long(), torch.tensor([[0.0], [1.0]])).squeeze(-1))
mlp("bucketize", 48)(lambda self, x: x * torch.bucketize(x.detach(), torch.tensor([-1.0, 0.0, 1.0])))
mlp("quantile", 48)(lambda self, x: x / (x.detach().abs().quantile(0.9) + 1))
mlp("median features", 48)(lambda self, x: x - x.median(-1, keepdim=True).values)
mlp("argmax one hot", 48)(lambda self, x: x * F.one_hot(x.argmax(-1), 48))
mlp("unique count", 48)(lambda self, x: x * torch.unique(x.detach().sign()).numel())
mlp("nonzero", 48)(lambda self, x: x * (torch.nonzero(x > 0).shape[0] / 1440))
mlp("masked_select", 48)(lambda self, x: x * x[x > 0].mean())


@mlp("boolean write", 48)
def _(self, x):
    x = x.clone()
    x[x < 0] = 0.1
    return x


mlp("scatter features", 48)(lambda self, x: torch.zeros_like(x).scatter(-1, x.topk(5, -1).indices, 1.0) * x)
mlp("index_add features", 48)(lambda self, x: torch.zeros_like(x).index_add(-1, torch.arange(48) // 2, x))


@mlp("checkerboard mask write", 48)
def _(self, x):
    x = x.clone()
    x[..., torch.arange(48) % 2 == 0] *= 2
    return x


@mlp("aminmax", 48)
def _(self, x):
    lo, hi = torch.aminmax(x.detach())
    return (x - lo) / (hi - lo + 1)


mlp("clip by norm", 48)(lambda self, x: x * (1 / x.norm(dim=-1, keepdim=True).clamp(min=1)))


@mlp("var_mean", 48)
def _(self, x):
    v, mu = torch.var_mean(x, -1, keepdim=True)
    return (x - mu) / (v + 1).sqrt()


mlp("linalg vector norm p1", 48)(lambda self, x: x / (torch.linalg.vector_norm(x, 1, -1, keepdim=True) + 1))
mlp("logcumsumexp", 48)(lambda self, x: torch.logcumsumexp(x, -1))
mlp("prod", 48)(lambda self, x: x * x.tanh().prod(-1, keepdim=True))
mlp("gumbel fixed", 48)(lambda self, x: F.softmax(x + torch.rand(x.shape, generator=torch.Generator().manual_seed(1)), -1))
mlp("rand generator like", 48)(lambda self, x: x * (torch.rand(3, 10, 48, generator=torch.Generator().manual_seed(1)) > 0.1))
mlp("channel shuffle", 48)(lambda self, x: F.channel_shuffle(x.transpose(1, 2)[..., None], 4)[..., 0].transpose(1, 2))
mlp("pixel shuffle like", 48)(lambda self, x: x.view(3, 10, 2, 24).transpose(2, 3).reshape(3, 10, 48))
mlp("local response", 48)(lambda self, x: F.local_response_norm(x.transpose(1, 2), 3).transpose(1, 2))
mlp("instance norm", 48)(lambda self, x: F.instance_norm(x.relu().transpose(1, 2)).transpose(1, 2))
mlp("softmax groups by chunk", 48)(lambda self, x: torch.cat([c.softmax(-1) for c in x.chunk(3, -1)], -1))


@mlp("split uneven", 48)
def _(self, x):
    a, b, c = x.split([7, 30, 11], -1)
    return torch.cat([a.relu(), b.tanh(), c.sigmoid()], -1)


mlp("hadamard whole weight", 48)(lambda self, x: F.linear(x, self.up_proj.weight @ self.up_proj.weight.t()) / 30)
mlp("weight row used", 48)(lambda self, x: x * self.up_proj.weight[:, 0] + self.down_proj.weight[0])
mlp("weights sum", 48)(lambda self, x: x * self.up_proj.weight.sum() + self.up_proj.weight.mean(1))


# Weights, and vocabularies.


def mlp_of_weights(name, own=None):

    def put(fn):
        cls = type("X", (parts.Mlp,), {"forward": fn, **({"own": own} if own else {})})
        case(f"mlp {name}", lambda: parts.Lm(mlp=cls, layers=1))
        case(f"mlp {name} ruled", lambda: parts.Lm(mlp=cls, layers=1), partition_config=parts.OF_LM)
    return put

U = lambda s: s.up_proj
D = lambda s: s.down_proj


mlp_of_weights("normalised rows")(lambda s, x: s.down_proj(F.linear(x, F.normalize(s.up_proj.weight, dim=1), s.up_proj.bias).relu()))
mlp_of_weights("normalised columns")(lambda s, x: s.down_proj(F.linear(x, F.normalize(s.up_proj.weight, dim=0), s.up_proj.bias).relu()))
mlp_of_weights("normalised down rows")(lambda s, x: F.linear(s.up_proj(x).relu(), F.normalize(s.down_proj.weight, dim=1), s.down_proj.bias))


@mlp_of_weights("standardised down")
def _(s, x):
    w = s.down_proj.weight
    w = (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 0.1)
    return F.linear(s.up_proj(x).relu(), w, s.down_proj.bias)


@mlp_of_weights("standardised up")
def _(s, x):
    w = s.up_proj.weight
    w = (w - w.mean()) / (w.std() + 0.1)
    return s.down_proj(F.linear(x, w, s.up_proj.bias).relu())


class Sign(torch.autograd.Function):

    @staticmethod
    def forward(ctx, w):
        return w.sign() * w.abs().mean()

    @staticmethod
    def backward(ctx, g):
        return g


mlp_of_weights("binary weights by Function")(
    lambda s, x: F.linear(F.linear(x, Sign.apply(s.up_proj.weight), s.up_proj.bias).relu(), Sign.apply(s.down_proj.weight), s.down_proj.bias))


@mlp_of_weights("binary weights detach")
def _(s, x):
    w = s.up_proj.weight
    w = w + (w.sign() * w.abs().mean() - w).detach()
    return s.down_proj(F.linear(x, w, s.up_proj.bias).relu())


@mlp_of_weights("ternary by round")
def _(s, x):

    def q(w):
        k = w.abs().mean().clamp(min=1e-05)
        return w + ((w / k).round().clamp(-1, 1) * k - w).detach()
    return F.linear(F.linear(x, q(s.up_proj.weight)).relu(), q(s.down_proj.weight))


mlp_of_weights("fake quantise tensor")(
    lambda s, x: s.down_proj(F.linear(x, torch.fake_quantize_per_tensor_affine(s.up_proj.weight, 0.01, 0, -128, 127), s.up_proj.bias).relu()))


@mlp_of_weights("fake quantise channel")
def _(s, x):
    w = s.up_proj.weight
    sc = w.detach().abs().amax(1) / 127
    return s.down_proj(F.linear(x, torch.fake_quantize_per_channel_affine(w, sc, torch.zeros(48), 0, -128, 127), s.up_proj.bias).relu())


@mlp_of_weights("quantise per row by hand")
def _(s, x):
    w = s.down_proj.weight
    sc = w.detach().abs().amax(1, keepdim=True) / 127
    w = w + ((w / sc).round() * sc - w).detach()
    return F.linear(s.up_proj(x).relu(), w, s.down_proj.bias)


def ab(s):
    s.a, s.b = (nn.Parameter(torch.randn(4, 32) * 0.1), nn.Parameter(torch.randn(48, 4) * 0.1))
    s.c, s.d = (nn.Parameter(torch.randn(4, 48) * 0.1), nn.Parameter(torch.randn(32, 4) * 0.1))


mlp_of_weights("lora merged in forward", ab)(
    lambda s, x: F.linear(F.linear(x, s.up_proj.weight + s.b @ s.a, s.up_proj.bias).relu(), s.down_proj.weight + s.d @ s.c, s.down_proj.bias))


@mlp_of_weights("dora by hand", ab)
def _(s, x):
    w = s.up_proj.weight + s.b @ s.a
    w = w / w.norm(dim=1, keepdim=True)
    v = s.down_proj.weight + s.d @ s.c
    v = v / v.norm(dim=1, keepdim=True)
    return F.linear(F.linear(x, w).relu(), v)


mlp_of_weights("slimmed")(
    lambda s, x: F.linear(F.linear(x, s.up_proj.weight[:30], s.up_proj.bias[:30]).relu(), s.down_proj.weight[:, :30], s.down_proj.bias))
mlp_of_weights("slimmed other half")(
    lambda s, x: F.linear(F.linear(x, s.up_proj.weight[24:], s.up_proj.bias[24:]).relu(), s.down_proj.weight[:, 24:], s.down_proj.bias))


@mlp_of_weights("permuted weights")
def _(s, x):
    i = torch.arange(48).roll(7)
    return F.linear(F.linear(x, s.up_proj.weight[i], s.up_proj.bias[i]).relu(), s.down_proj.weight, s.down_proj.bias)


mlp_of_weights("symmetric product")(lambda s, x: x @ (s.down_proj.weight @ s.up_proj.weight).t())


@mlp_of_weights("stacked weights mean")
def _(s, x):
    w = torch.stack([s.up_proj.weight, s.down_proj.weight.t()]).mean(0)
    return s.down_proj(F.linear(x, w, s.up_proj.bias).relu())


mlp_of_weights("weight masked by buffer", lambda s: s.register_buffer("mask", (torch.arange(48 * 32) % 3 > 0).float().view(48, 32)))(
    lambda s, x: s.down_proj(F.linear(x, s.up_proj.weight * s.mask, s.up_proj.bias).relu()))
mlp_of_weights("weight masked down", lambda s: s.register_buffer("mask", (torch.arange(48 * 32) % 3 > 0).view(32, 48)))(
    lambda s, x: F.linear(s.up_proj(x).relu(), s.down_proj.weight.masked_fill(s.mask, 0.0), s.down_proj.bias))


def pr(s):
    prune.l1_unstructured(s.up_proj, "weight", amount=0.3)
    prune.ln_structured(s.down_proj, "weight", 0.3, 2, 1)


mlp_of_weights("pruned by torch", pr)(lambda s, x: s.down_proj(s.up_proj(x).relu()))
mlp_of_weights("gated weight", lambda s: setattr(s, "g", nn.Parameter(torch.rand(48, 1))))(
    lambda s, x: s.down_proj(F.linear(x, s.up_proj.weight * s.g, s.up_proj.bias * s.g[:, 0]).relu()))
mlp_of_weights("weight detached twice used")(lambda s, x: s.down_proj(F.linear(x, s.up_proj.weight.detach(), s.up_proj.bias).relu() + s.up_proj(x)))
mlp_of_weights("conv 1x1 of weight")(
    lambda s, x: s.down_proj(F.conv1d(x.transpose(1, 2), s.up_proj.weight[:, :, None], s.up_proj.bias).transpose(1, 2).relu()))
mlp_of_weights("soft tied")(lambda s, x: s.down_proj(s.up_proj(x).relu()) + 0.1 * s.up_proj(x).relu() @ s.up_proj.weight)
mlp_of_weights("functional call")(
    lambda s, x: torch.func.functional_call(s.down_proj, {"weight": s.down_proj.weight * 0.5, "bias": s.down_proj.bias}, (s.up_proj(x).relu(),)))
mlp_of_weights("checkpoint inside")(
    lambda s, x: s.down_proj(torch.utils.checkpoint.checkpoint(lambda y: s.up_proj(y).relu(), x, use_reentrant=False)))
mlp_of_weights("checkpoint inside reentrant")(
    lambda s, x: s.down_proj(torch.utils.checkpoint.checkpoint(lambda y: s.up_proj(y).relu(), x, use_reentrant=True)))


@mlp_of_weights("no grad part")
def _(s, x):
    with torch.no_grad():
        y = s.up_proj(x).sigmoid()
    return s.down_proj(s.up_proj(x) * y)


mlp_of_weights("token by token")(lambda s, x: torch.stack([s.down_proj(s.up_proj(t).relu()) for t in x.unbind(1)], 1))


@mlp_of_weights("gathered tokens")
def _(s, x):
    f = x.reshape(-1, 32)
    i = torch.arange(0, 30, 2)
    o = torch.zeros_like(f)
    o[i] = s.down_proj(s.up_proj(f[i]).relu())
    return o.view_as(x)


@mlp_of_weights("index copy")
def _(s, x):
    f = x.reshape(-1, 32)
    i = torch.arange(0, 30, 2)
    return f.index_copy(0, i, s.down_proj(s.up_proj(f[i]).relu())).view_as(x)


mlp_of_weights("output in place")(lambda s, x: s.down_proj(s.up_proj(x).relu()).mul_(0.5).add_(x))


@mlp_of_weights("inner cached on module")
def _(s, x):
    s.kept = s.up_proj(x).relu()
    o = s.down_proj(s.kept)
    return o + s.kept.mean() + s.kept[..., :32]


@mlp_of_weights("inner returned to outside")
def _(s, x):
    y = s.up_proj(x).relu()
    return s.down_proj(y) + y[..., 16:]


class Fused(parts.Attention):

    def project(self, x):
        b, s, _ = x.shape
        y = F.linear(x, torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]), torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]))
        return tuple((p.view(b, s, 4, 8).transpose(1, 2) for p in y.chunk(3, -1)))

case("attention fused by cat", lambda: parts.Lm(attention=Fused, layers=1))


class Fused2(parts.Attention):

    def project(self, x):
        b, s, _ = x.shape
        y = F.linear(x, torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]), torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]))
        return y.view(b, s, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)

case("attention fused by cat unbind", lambda: parts.Lm(attention=Fused2, layers=1))


class Fused3(parts.Attention):

    def project(self, x):
        b, s, _ = x.shape
        w = torch.stack([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        return tuple((p.view(b, s, 4, 8).transpose(1, 2) for p in torch.matmul(x, w.transpose(1, 2)[:, None])))

case("attention fused by stack", lambda: parts.Lm(attention=Fused3, layers=1))


class ByFunction(parts.Attention):

    def forward(self, x):
        x = x.transpose(0, 1)
        o = F.multi_head_attention_forward(x, x, x, 32, 4, None, torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]), None, None, False, 0.0, self.o_proj.weight, self.o_proj.bias, use_separate_proj_weight=True, q_proj_weight=self.q_proj.weight, k_proj_weight=self.k_proj.weight, v_proj_weight=self.v_proj.weight, need_weights=False)[0]
        return o.transpose(0, 1)

case("attention by F.multi_head_attention_forward", lambda: parts.Lm(attention=ByFunction, layers=1))


def lm(name, own=None, **o):

    def put(fn):

        class X(parts.Lm):

            def __init__(self):
                super().__init__(layers=1)
                if own:
                    own(self)
            forward = fn
        case(f"lm {name}", X, **o)
    return put


lm("normalised head")(lambda s, i: 5 * F.normalize(s.hidden(i), dim=-1) @ F.normalize(s.lm_head.weight, dim=-1).t())
lm("normalised head columns")(lambda s, i: s.hidden(i) @ F.normalize(s.lm_head.weight, dim=0).t())
lm("head bias", lambda s: setattr(s, "bias", nn.Parameter(torch.randn(50))))(lambda s, i: s.lm_head(s.hidden(i)) + s.bias)


@lm("one hot embedding")
def _(s, i):
    x = F.one_hot(i, 50).float() @ s.embed_tokens.weight
    for l in s.layers:
        x = l(x)
    return s.lm_head(s.norm(x))


def emb(f):

    def g(s, i):
        x = f(s, i)
        for l in s.layers:
            x = l(x)
        return s.lm_head(s.norm(x))
    return g

lm("indexed embedding")(emb(lambda s, i: s.embed_tokens.weight[i]))
lm("index_select embedding")(emb(lambda s, i: s.embed_tokens.weight.index_select(0, i.view(-1)).view(3, 10, 32)))
lm("gather embedding")(emb(lambda s, i: s.embed_tokens.weight.gather(0, i.view(-1, 1).expand(-1, 32)).view(3, 10, 32)))
lm("transposed embedding")(emb(lambda s, i: s.embed_tokens.weight.t()[:, i].permute(1, 2, 0)))
lm("normalised embedding")(emb(lambda s, i: F.embedding(i, F.normalize(s.embed_tokens.weight, dim=-1))))
lm("embedding columns normalised")(emb(lambda s, i: F.embedding(i, s.embed_tokens.weight - s.embed_tokens.weight.mean(0))))
lm("embedding noise dropout rows")(emb(lambda s, i: F.embedding(i, s.embed_tokens.weight * (torch.arange(50) % 7 > 0).float()[:, None])))
lm("embedding max_norm", lambda s: setattr(s.embed_tokens, "max_norm", 3.0))(emb(lambda s, i: s.embed_tokens(i)))
lm("embedding padding", lambda s: setattr(s, "embed_tokens", nn.Embedding(50, 32, padding_idx=3)))(emb(lambda s, i: s.embed_tokens(i)))
lm("embedding padding last", lambda s: setattr(s, "embed_tokens", nn.Embedding(50, 32, padding_idx=-1)))(emb(lambda s, i: s.embed_tokens(i)))
lm("embedding by frequency", lambda s: setattr(s, "embed_tokens", nn.Embedding(50, 32, scale_grad_by_freq=True)))(emb(lambda s, i: s.embed_tokens(i)))
lm("embedding sparse", lambda s: setattr(s, "embed_tokens", nn.Embedding(50, 32, sparse=True)))(emb(lambda s, i: s.embed_tokens(i)))
lm("embedding extra rows", lambda s: setattr(s, "extra", nn.Parameter(torch.randn(5, 32))))(emb(lambda s, i: F.embedding(i % 55, torch.cat([s.embed_tokens.weight, s.extra]))))
lm("embedding bag sum")(emb(lambda s, i: s.embed_tokens(i) + F.embedding_bag(i, s.embed_tokens.weight, mode="sum")[:, None]))
lm("positions", lambda s: setattr(s, "positions", nn.Embedding(16, 32)))(emb(lambda s, i: s.embed_tokens(i) + s.positions(torch.arange(10))))
lm("positions and types", lambda s: (setattr(s, "wpe", nn.Embedding(3, 32)),))(emb(lambda s, i: s.embed_tokens(i) + s.wpe(i % 3)))
lm("factored", lambda s: (setattr(s, "embed_tokens", nn.Embedding(50, 8)), setattr(s, "project", nn.Linear(8, 32))))(emb(lambda s, i: s.project(s.embed_tokens(i))))


@lm("several heads", lambda s: setattr(s, "lm_head2", nn.Linear(32, 50)))
def _(s, i):
    h = s.hidden(i)
    return s.lm_head(h) + s.lm_head2(h.roll(1, 1))


@lm("shallow fusion of logits")
def _(s, i):
    h = s.hidden(i)
    return torch.logaddexp(s.lm_head(h), s.lm_head(h.flip(1)))


@lm("mixture of softmaxes", lambda s: (setattr(s, "prior", nn.Linear(32, 3)), setattr(s, "latent", nn.Linear(32, 96))))
def _(s, i):
    h = s.hidden(i)
    p = s.prior(h).softmax(-1)
    z = s.latent(h).tanh().view(3, 10, 3, 32)
    return (s.lm_head(z).softmax(-1) * p[..., None]).sum(2).log()


@lm("copy mechanism")
def _(s, i):
    h = s.hidden(i)
    a = (h @ h.transpose(1, 2)).softmax(-1)
    p = s.lm_head(h).softmax(-1) * 0.5
    return (p.scatter_add(-1, i[:, None].expand(-1, 10, -1), a * 0.5) + 1e-06).log()


@lm("pointer by one hot")
def _(s, i):
    h = s.hidden(i)
    a = (h @ h.transpose(1, 2)).softmax(-1)
    return (s.lm_head(h).softmax(-1) * 0.5 + 0.5 * a @ F.one_hot(i, 50).float() + 1e-06).log()


@lm("sampled softmax")
def _(s, i):
    c = torch.arange(0, 50, 2)
    l = s.hidden(i) @ s.lm_head.weight[c].t()
    o = torch.full((3, 10, 50), -10000.0)
    o[..., c] = l
    return o


lm("logit mask buffer", lambda s: s.register_buffer("m", torch.where(torch.arange(50) % 5 == 0, -10.0, 0.0)))(
    lambda s, i: s.lm_head(s.hidden(i)) + s.m)
lm("logit scatter")(lambda s, i: s.lm_head(s.hidden(i)).scatter(-1, torch.zeros(3, 10, 1, dtype=torch.long), -5.0))
lm("log softmax output")(lambda s, i: F.log_softmax(s.lm_head(s.hidden(i)), -1))
lm("last tokens")(lambda s, i: torch.cat([s.lm_head(s.hidden(i)[:, -3:]), s.lm_head(s.hidden(i)[:, :7])], 1))
lm("chunked logits")(lambda s, i: torch.cat([s.lm_head(c) for c in s.hidden(i).split(4, 1)], 1))
lm("padded vocabulary cut", lambda s: setattr(s, "lm_head", nn.Linear(32, 64, bias=False)))(lambda s, i: s.lm_head(s.hidden(i))[..., :50])
lm("permuted vocabulary")(lambda s, i: s.lm_head(s.hidden(i))[..., torch.arange(50).flip(0)])


@lm("soft tokens back")
def _(s, i):
    p = s.lm_head(s.hidden(i)).softmax(-1)
    return s.lm_head(s.norm(p @ s.embed_tokens.weight))


@lm("gumbel softmax back")
def _(s, i):
    torch.manual_seed(4)
    p = F.gumbel_softmax(s.lm_head(s.hidden(i)).log_softmax(-1) * 0 + torch.arange(50) * 0.1, hard=False)
    return s.lm_head(s.hidden(i)) + p.mean() * 0 + p.sum() * 0.001

