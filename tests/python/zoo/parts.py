"""Parts of the zoo's programs: batches, losses, rules of partitions, and the language model whose layers they
replace."""
import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, HEADS, LENGTH, VOCABULARY, BATCH = 32, 4, 10, 50, 3


def cut(*patterns, **options):
    """A rule of partition_config."""
    return {"patterns": [f"(.*\\.)?{pattern}\\.(weight|bias)$" for pattern in patterns], **options}


def rules(*specs):
    return {"use_default_specs": False, "layer_specs": list(specs)}


def column(*patterns, **options):
    return cut(*patterns, partition_type="column", **options)


def row(*patterns, **options):
    return cut(*patterns, partition_type="row", **options)


def tokens(number, vocabulary=VOCABULARY, length=LENGTH):
    generator = torch.Generator().manual_seed(1000 + number)
    return (torch.randint(0, vocabulary, (BATCH, length), generator=generator),)


def vectors(number, width=HIDDEN):
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(BATCH, LENGTH, width, generator=generator), torch.randn(BATCH, LENGTH, width, generator=generator)


def next_token(call, _, ids):
    logits = call(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def squares(call, _, x, y):
    return F.mse_loss(call(x), y)


class Mlp(nn.Module):
    def __init__(self, inner=48):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(HIDDEN, inner), nn.Linear(inner, HIDDEN)
        self.own()

    def own(self):
        """Other layers."""

    def act(self, x):
        return F.gelu(x)

    def forward(self, x):
        return self.down_proj(self.act(self.up_proj(x)))


class Attention(nn.Module):
    heads, groups, size = HEADS, HEADS, 8

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, self.heads * self.size)
        self.k_proj, self.v_proj = nn.Linear(HIDDEN, self.groups * self.size), nn.Linear(HIDDEN, self.groups * self.size)
        self.o_proj = nn.Linear(self.heads * self.size, HIDDEN)
        self.own()

    def own(self):
        """Other layers."""

    def attend(self, q, k, v):
        if self.groups != self.heads:
            k, v = (part.repeat_interleave(self.heads // self.groups, 1) for part in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def project(self, x):
        b, s, _ = x.shape
        return (self.q_proj(x).view(b, s, self.heads, self.size).transpose(1, 2), self.k_proj(x).view(b, s, self.groups, self.size).transpose(1, 2),
                self.v_proj(x).view(b, s, self.groups, self.size).transpose(1, 2))

    def forward(self, x):
        b, s, _ = x.shape
        return self.o_proj(self.attend(*self.project(x)).transpose(1, 2).reshape(b, s, self.heads * self.size))


class Block(nn.Module):
    def __init__(self, attention, mlp):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(HIDDEN), attention(), nn.LayerNorm(HIDDEN), mlp()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Lm(nn.Module):
    """A language model as a program writes it."""

    tied, vocabulary = False, VOCABULARY

    def __init__(self, attention=Attention, mlp=Mlp, layers=2):
        super().__init__()
        self.embed_tokens = nn.Embedding(self.vocabulary, HIDDEN)
        self.layers = nn.ModuleList(Block(attention, mlp) for _ in range(layers))
        self.norm, self.lm_head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, self.vocabulary, bias=False)
        if self.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def hidden(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, ids):
        return self.lm_head(self.hidden(ids))


OF_MLP = (column("up_proj"), row("down_proj"))
OF_ATTENTION = (column("q_proj", "k_proj", "v_proj"), row("o_proj"))
OF_LM = rules(*OF_MLP, *OF_ATTENTION)
