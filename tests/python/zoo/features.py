"""Models of random_features.py, on whole batches of two samples: build(), batch() and loss_of(), and as layers of a
pipeline."""
import functools

import torch
import zoo
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from trireme.pipe import TiedLayerSpec
from zoo import hugging_face, models as zoo_models

SAMPLES, LENGTH, WIDTH, FEATURES, PADDING = 2, 16, 32, 8, 1
HEADS = 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        """[B, S, H] -> [B, S, H], causal"""
        q, k, v = (part(x).view(x.shape[0], x.shape[1], HEADS, WIDTH // HEADS).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(x.shape))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        """[B, S, H] -> [B, S, H]"""
        return self.down_proj(functional.gelu(self.up_proj(x)))


class Experts(nn.Module):
    """A mixture that gathers what its experts make of their tokens in zeros_like() of the tokens."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3, bias=False), nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x):
        """[B, S, H] -> [B, S, H]"""
        tokens = x.reshape(-1, WIDTH)
        share, choice = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            mask = choice == index
            out[mask] = expert(tokens[mask]) * share[mask].unsqueeze(-1)
        return out.view(x.shape)


class Adapted(nn.Module):
    """A frozen linear layer beside a trained product of rank 4, as peft writes it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + 2 * self.lora_B(self.lora_A(x))


class Block(nn.Module):
    def __init__(self, mixes=True, inner=Mlp, adapts=False):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention() if mixes else nn.Identity()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), inner()
        if adapts:
            self.requires_grad_(False)
            self.mlp.up_proj, self.mlp.down_proj = Adapted(self.mlp.up_proj), Adapted(self.mlp.down_proj)
            if mixes:
                self.attention.q_proj = Adapted(self.attention.q_proj)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(zoo_models.VOCABULARY, WIDTH)

    @property
    def weight(self):
        """The table, by which a tied head reads it."""
        return self.embed_tokens.weight

    def forward(self, ids):
        return self.embed_tokens(ids)


class Head(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, outputs, bias=False)

    def forward(self, x):
        return self.lm_head(self.norm(x))


def _as_head(embedding, x):
    return functional.linear(x, embedding.weight)


class Stack(nn.Module):
    """The layers of a pipeline as one module."""

    def __init__(self, first, blocks, last):
        super().__init__()
        self.first, self.blocks, self.last, self.checkpoints = first, nn.ModuleList(blocks), last, False

    def forward(self, input_ids):
        hidden = self.first(input_ids)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpoints else block(hidden)
        return _as_head(self.first, hidden) if self.last is None else self.last(hidden)


# By name: (first layer, block, last layer; None: the first one's weight, frozen layers).
_STACKS = {
    "mlp": (functools.partial(nn.Linear, FEATURES, WIDTH), functools.partial(Block, mixes=False), functools.partial(Head, 3), ()),
    "decoder": (Embedding, Block, functools.partial(Head, zoo_models.VOCABULARY), ()),
    "tied": (Embedding, Block, None, ()),
    "experts": (Embedding, functools.partial(Block, inner=Experts), functools.partial(Head, zoo_models.VOCABULARY), ()),
    "frozen": (Embedding, Block, functools.partial(Head, zoo_models.VOCABULARY), (0, 1)),
    "adapted": (Embedding, functools.partial(Block, adapts=True), functools.partial(Head, zoo_models.VOCABULARY), (0,)),
}


def frozen_llama():
    """Its words and its first layer do not learn."""
    model = zoo_models.llama()
    for part in (model.model.embed_tokens, model.model.layers[0]):
        part.requires_grad_(False)
    return model


FROM_HUB = {**{name: zoo_models.PROGRAMS[name].build for name in ("llama", "llama, tied", "gpt2", "bert", "t5")}, "llama, frozen": frozen_llama,
            "roberta": functools.partial(hugging_face.model, "RobertaForMaskedLM", pad_token_id=PADDING, max_position_embeddings=LENGTH + 2),
            "lora": lambda: hugging_face.adapted(zoo_models.llama())}
OWN = tuple(_STACKS)
MODELS = (*OWN, *FROM_HUB)
# Rounding chooses the way through experts.
IN_16_BITS = tuple(name for name in MODELS if name != "experts")
SEED = 1234


def _initialised(module, seed):
    """One of a layer's making, whose norms and biases tell each other apart."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * 0.1 + (parameter.dim() == 1))
    return module


def build(name, recomputes=False, seed=SEED):
    """The model in fp32; `recomputes`: by torch.utils.checkpoint."""
    if name in OWN:
        make, block, last, frozen = _STACKS[name]
        layers = [make(), block(), block(), last() if last else None]
        model = Stack(layers[0], layers[1:3], layers[3])
        model.checkpoints = recomputes
    else:
        torch.manual_seed(seed)
        model, layers, frozen = FROM_HUB[name](), (), ()
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    _initialised(model, seed)
    for index in frozen:
        layers[index].requires_grad_(False)
    return model.train()


class Word(Embedding):
    """As a pipeline makes a tied layer, with the values of build()."""

    def __init__(self):
        super().__init__()
        self.load_state_dict(build("tied").first.state_dict())


def layers_of(name):
    """(the layers of a PipelineModule, the names of these modules in build()'s model)."""
    model = build(name)
    if model.last is not None:
        return [model.first, *model.blocks, model.last], ["first", "blocks.0", "blocks.1", "last"]
    shares = {"tied_weight_attr": "embed_tokens.weight"}
    return [TiedLayerSpec("word", Word, **shares), *model.blocks, TiedLayerSpec("word", Word, forward_fn=_as_head, **shares)], ["first", "blocks.0", "blocks.1", "first"]


def batch(name, number):
    """Micro-batch `number`, whole, as arguments of loss_of()."""
    generator = torch.Generator().manual_seed(number)
    if name == "mlp":
        return {"input_ids": torch.randn(SAMPLES, LENGTH, FEATURES, generator=generator), "labels": torch.randn(SAMPLES, LENGTH, 3, generator=generator)}
    ids = torch.randint(3, zoo_models.VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    if name == "t5":
        return {"input_ids": ids, "labels": torch.randint(3, zoo_models.VOCABULARY, (SAMPLES, LENGTH), generator=generator)}
    if name not in ("bert", "roberta"):
        return {"input_ids": ids, "labels": labels}
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PADDING), "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def criterion(name):
    """loss(output, labels) of the models that have none of their own."""
    if name == "mlp":
        return lambda output, labels: functional.mse_loss(output.float(), labels)
    return lambda output, labels: functional.cross_entropy(output[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def loss_of(name, call, values, dtype=torch.float32):
    """The loss of a batch(); `call` is the module or an engine, `dtype` that of floating inputs."""
    if name not in OWN:
        return call(**values).loss
    inputs = values["input_ids"]
    return criterion(name)(call(inputs.to(dtype) if inputs.is_floating_point() else inputs), values["labels"])


PROGRAMS = zoo.Collection("features", sorted_by_words=False)
for _name in MODELS:
    PROGRAMS.add(f"feature {_name}", functools.partial(build, _name), lambda call, _, values, name=_name: loss_of(name, call, values),
                 lambda number, name=_name: (batch(name, number),))
