"""Attention and MLPs as users write them, each in a small language model."""
import math

import torch
from torch import nn
from torch.nn import functional as F
import zoo
from zoo.parts import HEADS, HIDDEN, LENGTH, OF_ATTENTION, OF_LM, OF_MLP, Attention, Lm, Mlp, column, cut, next_token, row, rules, tokens

PROGRAMS = zoo.Collection("layers", tokens, next_token)


def attention_variant(cls, partition_config="same"):
    """The class as two programs: by heuristics, and with rules."""
    PROGRAMS.add(f"attention_{cls.__name__}", lambda: Lm(attention=cls))
    PROGRAMS.add(f"attention_{cls.__name__}_ruled", lambda: Lm(attention=cls), partition_config=OF_LM if partition_config == "same" else partition_config)
    return cls


def mlp_variant(cls, partition_config="same"):
    PROGRAMS.add(f"mlp_{cls.__name__}", lambda: Lm(mlp=cls))
    PROGRAMS.add(f"mlp_{cls.__name__}_ruled", lambda: Lm(mlp=cls), partition_config=OF_LM if partition_config == "same" else partition_config)
    return cls


def mlp_of(name, parts=None, **methods):
    """An mlp_variant() with these methods, and with `parts`, which are made behind the two matrices."""
    def own(self):
        for part, make in (parts or {}).items():
            setattr(self, part, make())
    mlp_variant(type(name, (Mlp,), {"own": own, **methods}))


# Attention.
attention_variant(type("Plain", (Attention,), {}))


@attention_variant
class Einsum(Attention):
    def attend(self, q, k, v):
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(self.size)
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return torch.einsum("bhqk,bhkd->bhqd", scores.masked_fill(mask, float("-inf")).softmax(-1), v)


@attention_variant
class EinsumOfFour(Attention):
    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (layer(x).view(b, s, self.heads, self.size) for layer in (self.q_proj, self.k_proj, self.v_proj))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(self.size)
        return self.o_proj(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2))


@attention_variant
class Bmm(Attention):
    def attend(self, q, k, v):
        b, h, s, d = q.shape
        q, k, v = (part.reshape(b * h, s, d) for part in (q, k, v))
        mask = torch.full((s, s), float("-inf")).triu(1)
        return torch.bmm((torch.bmm(q, k.transpose(1, 2)) / d ** 0.5 + mask).softmax(-1), v).view(b, h, s, d)


@attention_variant
class AlibiBaddbmm(Attention):
    def attend(self, q, k, v):
        b, h, s, d = q.shape
        slopes = torch.tensor([2.0 ** (-8 * (i + 1) / self.heads) for i in range(self.heads)])
        alibi = (slopes[:, None, None] * torch.arange(s)[None, None]).repeat(b, 1, 1)
        q, k, v = (part.reshape(b * self.heads, s, d) for part in (q, k, v))
        scores = torch.baddbmm(alibi.expand(-1, s, -1), q, k.transpose(1, 2), beta=1.0, alpha=d ** -0.5)
        return torch.bmm(scores.softmax(-1), v).view(b, self.heads, s, d)


@attention_variant
class AlibiAdded(Attention):
    def own(self):
        self.register_buffer("slopes", torch.tensor([2.0 ** (-i - 1) for i in range(self.heads)]))

    def attend(self, q, k, v):
        s = q.shape[2]
        distance = torch.arange(s)[None] - torch.arange(s)[:, None]
        bias = self.slopes[:, None, None] * distance
        scores = q @ k.transpose(-1, -2) / self.size ** 0.5 + bias
        return scores.masked_fill(distance > 0, torch.finfo(scores.dtype).min).softmax(-1) @ v


class _Packed(Attention):
    def __init__(self):
        nn.Module.__init__(self)
        self.qkv, self.o_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def parts(self, x):
        return self.qkv(x).chunk(3, -1)

    def project(self, x):
        b, s, _ = x.shape
        return tuple(part.reshape(b, s, self.heads, self.size).transpose(1, 2) for part in self.parts(x))


OF_PACKED = rules(*OF_MLP, column("qkv", shape=[3, -1], partition_dim=0), row("o_proj"))


def packed_variant(cls):
    return attention_variant(cls, OF_PACKED)


packed_variant(type("PackedChunk", (_Packed,), {}))


@packed_variant
class PackedSplit(_Packed):
    def parts(self, x):
        return self.qkv(x).split(HIDDEN, dim=2)


@packed_variant
class PackedSlices(_Packed):
    def parts(self, x):
        mixed = self.qkv(x)
        return mixed[..., :HIDDEN], mixed[..., HIDDEN:2 * HIDDEN], mixed[:, :, 2 * HIDDEN:]


@packed_variant
class PackedUnbind(_Packed):
    def project(self, x):
        b, s, c = x.shape
        return self.qkv(x).reshape(b, s, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)


@packed_variant
class PackedIndexed(_Packed):
    def project(self, x):
        b, s, c = x.shape
        qkv = self.qkv(x).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return qkv[0], qkv[1], qkv[2]


@packed_variant
class PackedTensorSplit(_Packed):
    def parts(self, x):
        return torch.tensor_split(self.qkv(x), 3, dim=-1)


@packed_variant
class PackedUnflatten(_Packed):
    def project(self, x):
        return self.qkv(x).unflatten(-1, (3, self.heads, self.size)).permute(2, 0, 3, 1, 4).unbind(0)


def _by_head(cls):
    return attention_variant(cls, rules(*OF_MLP, column("query_key_value"), row("dense")))


@_by_head
class PackedByHead(Attention):
    def __init__(self):
        nn.Module.__init__(self)
        self.query_key_value, self.dense = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.query_key_value(x).view(b, s, self.heads, 3 * self.size).transpose(1, 2).chunk(3, -1)
        return self.dense(self.attend(q, k, v).transpose(1, 2).reshape(b, s, HIDDEN))


@_by_head
class PackedByHeadViewed(PackedByHead):
    def forward(self, x):
        b, s, _ = x.shape
        mixed = self.query_key_value(x).view(b, s, self.heads, 3, self.size)
        q, k, v = (mixed[..., i, :].transpose(1, 2) for i in range(3))
        return self.dense(self.attend(q, k, v).transpose(1, 2).reshape(b, s, HIDDEN))


@lambda cls: attention_variant(cls, rules(*OF_MLP, column("c_attn", shape=[3, -1], partition_dim=0), row("c_proj")))
class NanoGpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.n_head, self.n_embd = HEADS, HIDDEN

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


for heads, groups in ((3, 3), (5, 5), (6, 6), (7, 7), (6, 3), (8, 2), (4, 1), (12, 3)):
    attention_variant(type(f"Heads{heads}Of{groups}", (Attention,), {"heads": heads, "groups": groups}))


@attention_variant
class GroupedExpanded(Attention):
    groups = 2

    def attend(self, q, k, v):
        b, _, s, d = k.shape
        k, v = (part[:, :, None].expand(b, self.groups, self.heads // self.groups, s, d).reshape(b, self.heads, s, d) for part in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@attention_variant
class GroupedSdpa(Attention):
    groups = 2

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@attention_variant
class GroupedViews(Attention):
    groups = 2

    def attend(self, q, k, v):
        b, h, s, d = q.shape
        q = q.reshape(b, self.groups, self.heads // self.groups, s, d)
        scores = torch.einsum("bghqd,bgkd->bghqk", q, k) / d ** 0.5
        return torch.einsum("bghqk,bgkd->bghqd", scores.softmax(-1), v).reshape(b, h, s, d)


@attention_variant
class SharedKey(Attention):
    groups = 1

    def attend(self, q, k, v):
        return ((q @ k.transpose(-1, -2)) / self.size ** 0.5).softmax(-1) @ v


def _angles(s, d):
    return torch.outer(torch.arange(s).float(), 1.0 / 10000 ** (torch.arange(0, d, 2).float() / d))


@attention_variant
class RotaryReal(Attention):
    def attend(self, q, k, v):
        angles = _angles(q.shape[2], self.size).repeat(1, 2)
        q, k = (part * angles.cos() + torch.cat((-part[..., self.size // 2:], part[..., :self.size // 2]), -1) * angles.sin() for part in (q, k))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@attention_variant
class RotaryComplex(Attention):
    def attend(self, q, k, v):
        turns = torch.polar(torch.ones(q.shape[2], self.size // 2), _angles(q.shape[2], self.size))
        q, k = (torch.view_as_real(torch.view_as_complex(part.reshape(*part.shape[:-1], -1, 2)) * turns).flatten(3) for part in (q, k))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@attention_variant
class RotaryInPlace(Attention):
    def attend(self, q, k, v):
        angles = _angles(q.shape[2], self.size)
        def turn(part):
            out = torch.empty_like(part)
            out[..., ::2] = part[..., ::2] * angles.cos() - part[..., 1::2] * angles.sin()
            out[..., 1::2] = part[..., ::2] * angles.sin() + part[..., 1::2] * angles.cos()
            return out
        return F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)


@attention_variant
class RelativeBias(Attention):
    def own(self):
        self.bias = nn.Parameter(torch.randn(self.heads, LENGTH, LENGTH) * 0.1)

    def attend(self, q, k, v):
        return (q @ k.transpose(-1, -2) / self.size ** 0.5 + self.bias[:, :q.shape[2], :q.shape[2]]).softmax(-1) @ v


@attention_variant
class RelativeEmbedding(Attention):
    def own(self):
        self.relative = nn.Embedding(2 * LENGTH, self.heads)

    def attend(self, q, k, v):
        place = torch.arange(q.shape[2])
        bias = self.relative(place[None] - place[:, None] + LENGTH).permute(2, 0, 1)[None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@attention_variant
class RelativeKeys(Attention):
    def own(self):
        self.relative = nn.Embedding(2 * LENGTH, self.size)

    def attend(self, q, k, v):
        place = torch.arange(q.shape[2])
        relative = self.relative(place[None] - place[:, None] + LENGTH)
        scores = q @ k.transpose(-1, -2) + torch.einsum("bhld,lrd->bhlr", q, relative)
        return (scores / self.size ** 0.5).softmax(-1) @ v


@attention_variant
class Temperature(Attention):
    def own(self):
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(self.heads, 1, 1)))

    def attend(self, q, k, v):
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        return (scores * torch.clamp(self.logit_scale, max=math.log(100.0)).exp()).softmax(-1) @ v


@attention_variant
class QueryNorm(Attention):
    def own(self):
        self.q_norm, self.k_norm = nn.LayerNorm(self.size), nn.RMSNorm(self.size)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)


@attention_variant
class NormOverHeads(Attention):
    def own(self):
        self.q_norm = nn.LayerNorm(HIDDEN)

    def project(self, x):
        b, s, _ = x.shape
        q, k, v = self.q_norm(self.q_proj(x)), self.k_proj(x), self.v_proj(x)
        return tuple(part.view(b, s, self.heads, self.size).transpose(1, 2) for part in (q, k, v))


@attention_variant
class TalkingHeads(Attention):
    def own(self):
        self.talk = nn.Linear(self.heads, self.heads)

    def attend(self, q, k, v):
        scores = q @ k.transpose(-1, -2) / self.size ** 0.5
        return self.talk(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1) @ v


@attention_variant
class GatedHeads(Attention):
    def own(self):
        self.gate = nn.Linear(HIDDEN, self.heads)

    def forward(self, x):
        b, s, _ = x.shape
        out = self.attend(*self.project(x)) * torch.sigmoid(self.gate(x)).transpose(1, 2)[..., None]
        return self.o_proj(out.transpose(1, 2).flatten(2))


@attention_variant
class HeadScales(Attention):
    def own(self):
        self.scales = nn.Parameter(torch.rand(self.heads))

    def attend(self, q, k, v):
        return super().attend(q, k, v) * self.scales.view(1, -1, 1, 1)


@attention_variant
class HeadMask(Attention):
    def attend(self, q, k, v):
        mask = torch.ones(self.heads)
        mask[1] = 0
        return super().attend(q, k, v) * mask[None, :, None, None]


@attention_variant
class FirstHeads(Attention):
    """The first two heads see everything, the others what is before."""

    def attend(self, q, k, v):
        one = F.scaled_dot_product_attention(q[:, :2], k[:, :2], v[:, :2])
        other = F.scaled_dot_product_attention(q[:, 2:], k[:, 2:], v[:, 2:], is_causal=True)
        return torch.cat((one, other), 1)


@attention_variant
class WrittenHeads(Attention):
    def attend(self, q, k, v):
        out = torch.zeros_like(q)
        for head in range(self.heads):
            out[:, head] = F.scaled_dot_product_attention(q[:, head], k[:, head], v[:, head], is_causal=True)
        return out


@attention_variant
class PiecesOfKeys(Attention):
    """As latent attention makes its keys: piece by piece in a tensor of its own."""

    def attend(self, q, k, v):
        keys = k.new_empty(*k.shape[:-1], k.shape[-1])
        keys[..., :3].copy_(k[..., :3])
        keys[..., 3:].copy_(k[..., 3:] * 2)
        return F.scaled_dot_product_attention(q, keys, v, is_causal=True)


@attention_variant
class LinearAttention(Attention):
    def attend(self, q, k, v):
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.cumsum(torch.einsum("bhsd,bhse->bhsde", k, v), 2)
        return torch.einsum("bhsd,bhsde->bhse", q, state) / torch.einsum("bhsd,bhsd->bhs", q, k.cumsum(2))[..., None]


@attention_variant
class Where(Attention):
    def attend(self, q, k, v):
        s = q.shape[2]
        scores = q @ k.transpose(-1, -2) / self.size ** 0.5
        return torch.where(torch.ones(s, s, dtype=torch.bool).tril(), scores, torch.tensor(-1e9)).softmax(-1) @ v


@attention_variant
class Cached(Attention):
    """Keys and values in a cache of all heads that is written in place."""

    def attend(self, q, k, v):
        b, h, s, d = k.shape
        keys, values = torch.zeros(b, self.heads, LENGTH, d), torch.zeros(b, self.heads, LENGTH, d)
        keys[:, :, :s], values[:, :, :s] = k, v
        return F.scaled_dot_product_attention(q, keys[:, :, :s], values[:, :, :s], is_causal=True)


@attention_variant
class SinkTokens(Attention):
    """A key and a value that are learnt, for each head."""

    def own(self):
        self.sink_k, self.sink_v = nn.Parameter(torch.randn(1, self.heads, 1, self.size)), nn.Parameter(torch.randn(1, self.heads, 1, self.size))

    def attend(self, q, k, v):
        b = q.shape[0]
        k, v = torch.cat((self.sink_k.expand(b, -1, -1, -1), k), 2), torch.cat((self.sink_v.expand(b, -1, -1, -1), v), 2)
        return F.scaled_dot_product_attention(q, k, v)


@attention_variant
class SinkLogits(Attention):
    def own(self):
        self.sinks = nn.Parameter(torch.randn(self.heads))

    def attend(self, q, k, v):
        b, h, s, _ = q.shape
        scores = q @ k.transpose(-1, -2) / self.size ** 0.5
        scores = torch.cat((scores, self.sinks.reshape(1, -1, 1, 1).expand(b, -1, s, -1)), -1)
        return scores.softmax(-1)[..., :-1] @ v


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k):
        ctx.save_for_backward(q, k)
        return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5

    @staticmethod
    def backward(ctx, grad):
        q, k = ctx.saved_tensors
        return grad @ k / q.shape[-1] ** 0.5, grad.transpose(-1, -2) @ q / q.shape[-1] ** 0.5


@attention_variant
class OwnFunction(Attention):
    def attend(self, q, k, v):
        return _Scores.apply(q, k).softmax(-1) @ v


@attention_variant
class MeanOfHeads(Attention):
    """The mean of the probabilities over heads feeds the next computation."""

    def attend(self, q, k, v):
        probabilities = (q @ k.transpose(-1, -2) / self.size ** 0.5).softmax(-1)
        return probabilities @ v + 0.1 * probabilities.mean(1, keepdim=True) @ v


@attention_variant
class SumOverHeads(Attention):
    def forward(self, x):
        b, s, _ = x.shape
        heads = self.attend(*self.project(x)).transpose(1, 2)
        weight = self.o_proj.weight.view(HIDDEN, self.heads, self.size)
        return sum(heads[:, :, h] @ weight[:, h].t() for h in range(self.heads)) + self.o_proj.bias


def _of_parameters(cls):
    names = lambda *names, **options: {"patterns": [f".*attn\\.{name}$" for name in names], **options}
    return attention_variant(cls, rules(*OF_MLP, names("q_proj", "k_proj", "v_proj", partition_type="column", partition_dim=1),
                                        names("o_proj", partition_type="row", partition_dim=0)))


@_of_parameters
class EinsumWeights(nn.Module):
    """Weights of shape (hidden, heads, size), as in JAX programs."""

    def __init__(self):
        super().__init__()
        make = lambda *shape: nn.Parameter(torch.randn(*shape) * 0.1)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = make(HIDDEN, 4, 8), make(HIDDEN, 4, 8), make(HIDDEN, 4, 8), make(4, 8, HIDDEN)

    def forward(self, x):
        q, k, v = (torch.einsum("bsm,mhd->bhsd", x, w) for w in (self.q_proj, self.k_proj, self.v_proj))
        return torch.einsum("bhsd,hdm->bsm", F.scaled_dot_product_attention(q, k, v, is_causal=True), self.o_proj)


@attention_variant
class Vmapped(Attention):
    def attend(self, q, k, v):
        one = lambda q, k, v: (q @ k.t() / self.size ** 0.5).softmax(-1) @ v
        return torch.func.vmap(torch.func.vmap(one))(q, k, v)


class OtherNames(Attention):
    def __init__(self):
        nn.Module.__init__(self)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = None, None, None, None

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (layer(x).view(b, s, self.heads, self.size).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        return self.wo(self.attend(q, k, v).transpose(1, 2).reshape(b, s, HIDDEN))


attention_variant(OtherNames, rules(*OF_MLP, column("wq", "wk", "wv"), row("wo")))


class Torchs(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)

    def forward(self, x):
        return self.self_attn(x, x, x, need_weights=False)[0]


attention_variant(Torchs, rules(*OF_MLP))
PROGRAMS.add("attention_Torchs_out_row", lambda: Lm(attention=Torchs), partition_config=rules(
    *OF_MLP, {"patterns": [".*in_proj_(weight|bias)"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0}, row("out_proj")))


# MLPs.
mlp_variant(type("Plain", (Mlp,), {}))


def _fused(cls):
    return mlp_variant(cls, rules(*OF_ATTENTION, column("gate_up_proj", shape=[2, -1], partition_dim=0), row("down_proj")))


class _Fused(Mlp):
    def __init__(self):
        nn.Module.__init__(self)
        self.gate_up_proj, self.down_proj = nn.Linear(HIDDEN, 96), nn.Linear(48, HIDDEN)


@_fused
class FusedChunk(_Fused):
    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


@_fused
class FusedGlu(_Fused):
    def forward(self, x):
        return self.down_proj(F.glu(self.gate_up_proj(x), dim=-1))


@_fused
class FusedPairs(_Fused):
    """Gates and values in turns."""

    def forward(self, x):
        both = self.gate_up_proj(x)
        return self.down_proj(F.silu(both[..., ::2]) * both[..., 1::2])


@mlp_variant
class UnfusedGlu(Mlp):
    """up_proj is two matrices, which its name does not tell."""

    def __init__(self):
        nn.Module.__init__(self)
        self.up_proj, self.down_proj = nn.Linear(HIDDEN, 96), nn.Linear(48, HIDDEN)

    def forward(self, x):
        a, b = self.up_proj(x).chunk(2, -1)
        return self.down_proj(F.gelu(a) * b)


@lambda cls: mlp_variant(cls, rules(*OF_ATTENTION, column("gate_proj", "up_proj"), row("down_proj")))
class SwiGlu(Mlp):
    def own(self):
        self.gate_proj = nn.Linear(HIDDEN, 48)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@lambda cls: mlp_variant(cls, rules(*OF_ATTENTION, column("w1", "w3"), row("w2")))
class LlamaNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(HIDDEN, 45, bias=False), nn.Linear(45, HIDDEN, bias=False), nn.Linear(HIDDEN, 45, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


@lambda cls: mlp_variant(cls, rules(*OF_ATTENTION, column("0"), row("2")))
class Sequence(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(HIDDEN, 45), nn.GELU(), nn.Linear(45, HIDDEN))


@lambda cls: mlp_variant(cls, rules(*OF_ATTENTION, column("0"), row("3")))
class NormedSequence(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(HIDDEN, 44), nn.GELU(), nn.LayerNorm(44), nn.Linear(44, HIDDEN))


mlp_of("NormInside", {"norm": lambda: nn.LayerNorm(48)}, act=lambda self, x: F.gelu(self.norm(x)))
mlp_of("RmsInside", {"weight": lambda: nn.Parameter(torch.rand(48))},
       act=lambda self, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight)
mlp_of("NnRmsInside", {"norm": lambda: nn.RMSNorm(48)}, act=lambda self, x: self.norm(F.relu(x)))
mlp_of("Groups", {"norm": lambda: nn.GroupNorm(6, 48)}, act=lambda self, x: self.norm(x.transpose(1, 2)).transpose(1, 2).relu())
mlp_of("Batched", {"norm": lambda: nn.BatchNorm1d(48)}, act=lambda self, x: self.norm(x.relu().flatten(0, 1)).view(x.shape))
mlp_of("Convolved", {"conv": lambda: nn.Conv1d(48, 48, 3, padding=2)},
       act=lambda self, x: F.silu(self.conv(x.transpose(1, 2))[..., :x.shape[1]].transpose(1, 2)))
mlp_of("DepthwiseConvolved", {"conv": lambda: nn.Conv1d(48, 48, 3, padding=2, groups=48)},
       act=lambda self, x: F.silu(self.conv(x.transpose(1, 2))[..., :x.shape[1]].transpose(1, 2)))
mlp_of("SoftmaxInside", act=lambda self, x: x.softmax(-1))
mlp_of("LogSoftmaxInside", act=lambda self, x: F.log_softmax(x, dim=2))


@mlp_variant
class ResidualInside(Mlp):
    def own(self):
        self.middle = nn.Linear(48, 48)

    def act(self, x):
        x = F.gelu(x)
        return x + F.gelu(self.middle(x))


mlp_of("OutputResidual", forward=lambda self, x: x + 0.5 * self.down_proj(F.gelu(self.up_proj(x))) + x.mean(-1, keepdim=True))


@mlp_variant
class SameWidth(Mlp):
    """As many features inside as outside, and the whole is added to the slices."""

    def __init__(self):
        super().__init__(HIDDEN)

    def forward(self, x):
        return self.down_proj(F.gelu(self.up_proj(x)) + x)


@mlp_variant
class SameWidthNorm(Mlp):
    def __init__(self):
        super().__init__(HIDDEN)

    def own(self):
        self.ln = nn.LayerNorm(HIDDEN)

    def forward(self, x):
        return self.down_proj(self.ln(F.gelu(self.up_proj(x)) + x))


mlp_of("Scaled", {"scale": lambda: nn.Parameter(torch.rand(48)), "shift": lambda: nn.Parameter(torch.rand(1, 1, 48))},
       act=lambda self, x: F.gelu(x * self.scale + self.shift))
mlp_of("Prelu", {"prelu": lambda: nn.PReLU(48), "one": lambda: nn.PReLU()}, act=lambda self, x: self.one(self.prelu(x.flatten(0, 1)).view(x.shape)))
mlp_of("LearntScalar", {"beta": lambda: nn.Parameter(torch.tensor(1.5))}, act=lambda self, x: x * torch.sigmoid(self.beta * x))
mlp_of("TopK", act=lambda self, x: torch.where(x >= x.topk(8, -1).values[..., -1:], x, torch.zeros(())))
mlp_of("Largest", act=lambda self, x: x / (x.abs().amax(-1, keepdim=True) + 1) + x.max(-1, keepdim=True).values)
mlp_of("Sorted", act=lambda self, x: x.sort(-1).values)
mlp_of("MeanByShape", act=lambda self, x: F.relu(x - x.sum(-1, keepdim=True) / x.shape[-1]))
mlp_of("StandardByHand", act=lambda self, x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt())
mlp_of("StandardUnbiased", act=lambda self, x: x / (x.std(-1, keepdim=True) + 1))
mlp_of("MeanOfAll", act=lambda self, x: x * x.abs().mean() + x.numel() / 1440 + x.norm())
mlp_of("Unit", act=lambda self, x: F.normalize(x, dim=-1))
mlp_of("Cosine", act=lambda self, x: x * F.cosine_similarity(x, x.roll(1, 1), dim=-1)[..., None])
mlp_of("Gram", act=lambda self, x: (x @ x.transpose(1, 2) / 48).softmax(-1) @ x)
mlp_of("Rolled", act=lambda self, x: x + x.roll(1, -1) + x.flip(-1))


@mlp_variant
class Shuffled(Mlp):
    def act(self, x):
        b, s, c = x.shape
        return x.view(b, s, 4, c // 4).transpose(2, 3).reshape(b, s, c).relu()


mlp_of("Selected", act=lambda self, x: x[..., torch.arange(47, -1, -1)] * torch.index_select(x, -1, torch.arange(48).roll(5)))
mlp_of("EveryOther", act=lambda self, x: torch.cat((x[..., ::2].relu(), x[..., 1::2].tanh()), -1))
mlp_of("Padded", act=lambda self, x: F.pad(x[..., :-2], (2, 0)).relu())
mlp_of("Narrowed", act=lambda self, x: torch.cat((x.narrow(-1, 0, 10).exp(), x[..., 10:]), -1).tanh())
mlp_of("Summed", act=lambda self, x: x.cumsum(-1).tanh())


@mlp_variant
class Maxout(Mlp):
    def __init__(self):
        nn.Module.__init__(self)
        self.up_proj, self.down_proj = nn.Linear(HIDDEN, 96), nn.Linear(48, HIDDEN)

    def act(self, x):
        return x.view(*x.shape[:-1], 48, 2).max(-1).values


@mlp_variant
class InPlace(Mlp):
    def act(self, x):
        x = x.clone()
        x.mul_(2).add_(1)
        x[..., 0] = 0
        x[:, 0, 3:7] += 1
        return x.relu_()


@mlp_variant
class Put(Mlp):
    def act(self, x):
        x = x.clone()
        x.index_put_((torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([5, 40])), torch.tensor([1.0, 2.0]))
        return x.masked_fill_(x > 2, 2.0)


@mlp_variant
class Masked(Mlp):
    def act(self, x):
        mask = torch.ones(48)
        mask[::3] = 0
        return x * mask + x.masked_fill(mask.bool(), 0.0) ** 2


mlp_of("Constant", act=lambda self, x: x * torch.arange(x.size(-1)) + torch.linspace(0, 1, x.shape[-1]) + x.new_ones(x.shape) + torch.zeros_like(x))
mlp_of("Noise", act=lambda self, x: x + 0 * torch.randn_like(x) + 0 * torch.rand(x.shape))


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return 2 * x * grad


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class _Centered(torch.autograd.Function):
    """Takes the mean over the features in both directions."""

    @staticmethod
    def forward(ctx, x):
        return x - x.mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(-1, keepdim=True)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, 1).t() @ x.flatten(0, 1), grad.flatten(0, 1).sum(0)


mlp_of("SquareFunction", act=lambda self, x: _Square.apply(x))
mlp_of("StraightThrough", act=lambda self, x: _Straight.apply(3 * x) + x)
mlp_of("CenteredFunction", act=lambda self, x: _Centered.apply(x))


@mlp_variant
class LinearFunction(Mlp):
    def forward(self, x):
        inner = _Linear.apply(x, self.up_proj.weight, self.up_proj.bias)
        return _Linear.apply(F.gelu(inner), self.down_proj.weight, self.down_proj.bias)


@mlp_variant
class Functional(Mlp):
    def forward(self, x):
        inner = torch.matmul(x, self.up_proj.weight.T) + self.up_proj.bias
        return torch.addmm(self.down_proj.bias, F.gelu(inner).flatten(0, 1), self.down_proj.weight.t()).view(x.shape)


@mlp_variant
class EinsumProducts(Mlp):
    def forward(self, x):
        inner = torch.einsum("bsi,oi->bso", x, self.up_proj.weight) + self.up_proj.bias
        return torch.einsum("bso,io->bsi", inner.relu(), self.down_proj.weight) + self.down_proj.bias


@mlp_variant
class Tokens(Mlp):
    """A mixer: tokens are mixed while features are cut."""

    def own(self):
        self.mix = nn.Linear(LENGTH, LENGTH)

    def act(self, x):
        return self.mix(x.transpose(1, 2)).transpose(1, 2).relu()


mlp_of("Pooled", act=lambda self, x: x.sigmoid() * x.mean(1, keepdim=True))
mlp_of("SqueezeExcite", {"squeeze": lambda: nn.Linear(48, 8), "excite": lambda: nn.Linear(8, 48)},
       act=lambda self, x: x * torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean(1, keepdim=True))))))


@mlp_variant
class Quantised(Mlp):
    def act(self, x):
        scale = x.detach().abs().max() / 127
        return x + (torch.round(x / scale) * scale - x).detach()


@mlp_variant
class Normed(Mlp):
    """Weights under parametrizations."""

    def own(self):
        self.up_proj = nn.utils.parametrizations.weight_norm(self.up_proj)


@mlp_variant
class Spectral(Mlp):
    def own(self):
        self.up_proj = nn.utils.parametrizations.spectral_norm(self.up_proj)


@mlp_variant
class OldNormed(Mlp):
    def own(self):
        self.down_proj = nn.utils.weight_norm(self.down_proj)


@mlp_variant
class LowRank(Mlp):
    def own(self):
        for layer, name in ((self.up_proj, "up"), (self.down_proj, "down")):
            layer.requires_grad_(False)
            setattr(self, f"{name}_a", nn.Linear(layer.in_features, 4, bias=False))
            setattr(self, f"{name}_b", nn.Linear(4, layer.out_features, bias=False))

    def forward(self, x):
        inner = F.gelu(self.up_proj(x) + self.up_b(self.up_a(x)))
        return self.down_proj(inner) + self.down_b(self.down_a(inner))


@mlp_variant
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, 4), nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x):
        flat = x.reshape(-1, HIDDEN)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        return out.view(x.shape)


@mlp_variant
class BatchedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(HIDDEN, 4)
        self.up_proj, self.down_proj = nn.Parameter(torch.randn(4, HIDDEN, 48) * 0.1), nn.Parameter(torch.randn(4, 48, HIDDEN) * 0.1)

    def forward(self, x):
        inner = torch.einsum("bsi,eio->bseo", x, self.up_proj).relu()
        out = torch.einsum("bseo,eoi->bsei", inner, self.down_proj)
        return (out * self.router(x).softmax(-1)[..., None]).sum(2)


mlp_of("BilinearInside", {"bilinear": lambda: nn.Bilinear(48, 48, 48)}, act=lambda self, x: self.bilinear(x, x))
mlp_of("Recurrent", {"lstm": lambda: nn.LSTM(48, 48, batch_first=True)}, act=lambda self, x: self.lstm(x)[0])


@mlp_variant
class Gated(nn.Module):
    """A GRU alone."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, x):
        return self.gru(x)[0]


@mlp_variant
class Printed(Mlp):
    """Python decides by numbers of activations."""

    def act(self, x):
        if x.abs().max().item() > 1e9 or not torch.isfinite(x).all():
            raise ValueError
        factor = float(x.mean()) if bool((x > 0).any()) else 0.0
        return x * (1 + 0.1 * factor)


mlp_of("ThroughNumpy", act=lambda self, x: x * float(x.detach().numpy().mean()))


@mlp_variant
class Dimension(Mlp):
    def act(self, x):
        b, s, c = x.shape
        assert c == 48 and x.size(-1) == 48 and x.numel() == b * s * 48 and x.stride() == (s * 48, 48, 1) and x.view(-1).shape == (b * s * 48,)
        return x.relu() / c ** 0.5


mlp_of("Unfolded", act=lambda self, x: x.unfold(-1, 4, 4).sum(-1).repeat_interleave(4, -1) + x)


@mlp_variant
class HeadedMlp(Mlp):
    def act(self, x):
        x = x.view(*x.shape[:-1], 8, 6)
        return F.layer_norm(x, (6,)).flatten(2)


mlp_of("ThirdsMlp", act=lambda self, x: F.softmax(x.view(*x.shape[:-1], 3, 16), -1).flatten(2))
mlp_of("Outer", {"side": lambda: nn.Linear(HIDDEN, 48)},
       act=lambda self, x: x,
       forward=lambda self, x: self.down_proj(self.up_proj(x) * self.side(x)))


@mlp_variant
class TwiceUsed(Mlp):
    def forward(self, x):
        x = self.down_proj(F.gelu(self.up_proj(x)))
        return self.down_proj(F.gelu(self.up_proj(x)))


@mlp_variant
class TiedMatrices(nn.Module):
    """The second matrix is the first one, transposed."""

    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(HIDDEN, 48, bias=False)

    def forward(self, x):
        return F.gelu(self.up_proj(x)) @ self.up_proj.weight


@mlp_variant
class Transposed(nn.Module):
    """Both matrices are parameters of (in, out)."""

    def __init__(self):
        super().__init__()
        self.w_up, self.w_down = nn.Parameter(torch.randn(HIDDEN, 48) * 0.1), nn.Parameter(torch.randn(48, HIDDEN) * 0.1)

    def forward(self, x):
        return F.gelu(x @ self.w_up) @ self.w_down
