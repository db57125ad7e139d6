"""Models of Hugging Face and ways to write PyTorch programs, with batches of 4."""
import functools

import peft
import torch
import zoo
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from zoo import hugging_face

BATCH, SEQUENCE, VOCABULARY = 4, 12, hugging_face.SIZES["vocab_size"]


def tokens(step, length=SEQUENCE + 1):
    return (torch.randint(3, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(step)),)


def two_tokens(step):
    return (*tokens(step), *tokens(step + 1000))


def images(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 3, 16, 16, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator)


def causal_loss(call, _, ids):
    logits = call(input_ids=ids[:, :-1]).logits
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


def t5_loss(call, _, ids, labels):
    return call(input_ids=ids, labels=labels).loss


def masked_loss(call, _, ids):
    return call(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss


def image_loss(call, _, pixels, labels):
    return call(pixel_values=pixels, labels=labels).loss


llama, gpt2, mixtral, t5 = (functools.partial(hugging_face.model, kind, use_cache=False)
                            for kind in ("llama", "gpt2", "mixtral", "T5ForConditionalGeneration"))
bert, vit = (functools.partial(hugging_face.model, kind) for kind in ("BertForMaskedLM", "ViTForImageClassification"))


def lora():
    return peft.get_peft_model(llama(), peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"]))


def checkpointed_by_reentrance():
    model = hugging_face.checkpointed(llama(), reentrant=True)
    model.enable_input_require_grads()
    return model


class Blocks(nn.Module):
    """Layers that are recomputed, a tied output, a dict as the output, a forward hook, a buffer that follows."""

    def __init__(self, compiled=False, reentrant=None):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        layers = [nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in range(3)]
        self.layers = nn.ModuleList([torch.compile(layer, backend="aot_eager") if compiled else layer for layer in layers])
        self.norm = nn.RMSNorm(24)
        self.head = nn.Linear(24, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))
        self.norm.register_forward_hook(lambda module, inputs, output: output * 1.5)
        self.reentrant = reentrant

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        self.seen += 1
        for layer in self.layers:
            step = layer if self.reentrant is None else lambda x, f=layer: checkpoint(f, x, use_reentrant=self.reentrant)
            hidden = hidden + step(hidden)
        return {"logits": self.head(self.norm(hidden)), "hidden": hidden}


def blocks_loss(call, _, ids):
    logits = call(ids[:, :-1])["logits"]
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


class Quantised(nn.Module):
    """A frozen base of int8 weights and scales as buffers, and a trained adapter."""

    def __init__(self):
        super().__init__()
        weight = torch.randn(24, 3 * 16 * 16)
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.adapter = nn.Sequential(nn.Linear(3 * 16 * 16, 4, bias=False), nn.Linear(4, 24, bias=False))
        self.head = nn.Linear(24, 5)

    def forward(self, pixel_values):
        flat = pixel_values.flatten(1)
        return self.head(torch.relu(flat @ (self.weight.float() * self.scale).t() + self.adapter(flat)))


def quantised_loss(call, _, pixels, labels):
    return functional.cross_entropy(call(pixels), labels)


class PerSample(nn.Module):
    """A model whose loss uses torch.func: squared norms of per-sample gradients of an inner function of its
    parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3 * 16 * 16, 8), nn.Linear(8, 5)

    def forward(self, pixels, labels):
        def sample_loss(x, label):
            return functional.cross_entropy(self.second(torch.tanh(self.first(x)))[None], label[None])
        flat = pixels.flatten(1)
        slopes = torch.func.vmap(torch.func.grad(sample_loss))(flat, labels)
        return functional.cross_entropy(self.second(torch.tanh(self.first(flat))), labels) + slopes.square().sum(1).mean()


def per_sample_loss(call, _, pixels, labels):
    return call(pixels, labels)


PROGRAMS = zoo.Collection("models", tokens, causal_loss, sorted_by_words=False)
PROGRAMS.add("llama", llama)
PROGRAMS.add("llama, tied", lambda: llama(tie_word_embeddings=True))
PROGRAMS.add("gpt2", gpt2)
PROGRAMS.add("t5", t5, t5_loss, two_tokens)
PROGRAMS.add("bert", bert, masked_loss)
PROGRAMS.add("mixtral", mixtral)
PROGRAMS.add("vit", vit, image_loss, images)
PROGRAMS.add("lora", lora)
PROGRAMS.add("checkpoint, reentrant", checkpointed_by_reentrance)
PROGRAMS.add("checkpoint", lambda: hugging_face.checkpointed(llama()))
PROGRAMS.add("blocks", Blocks, blocks_loss)
PROGRAMS.add("blocks, checkpoint, reentrant", lambda: Blocks(reentrant=True), blocks_loss)
PROGRAMS.add("blocks, compiled", lambda: Blocks(compiled=True), blocks_loss)
PROGRAMS.add("quantised", Quantised, quantised_loss, images)
PROGRAMS.add("torch.func", PerSample, per_sample_loss, images)


def build(name):
    torch.manual_seed(7)
    return PROGRAMS[name].build().train()


def loss_of(name, call, step, rank, size):
    """That of the part of a batch that `rank` among `size` has; `call` is the module or an engine."""
    program = PROGRAMS[name]
    return program.loss(call, None, *(whole[rank * BATCH // size:(rank + 1) * BATCH // size] for whole in program.batch(step)))


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def plain(name, steps, lr=1e-2):
    """Losses on the whole batch in plain PyTorch."""
    model = build(name)
    optimizer, losses = torch.optim.AdamW(trained(model), lr=lr), []
    for step in range(steps):
        loss = loss_of(name, model, step, 0, 1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained(model), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(name, steps, stage, gather="auto", lr=1e-2):
    """The same, each rank with its part of the batch; the mean over ranks."""
    import trireme as deepspeed  # pylint: disable=import-outside-toplevel
    model = build(name)
    config = {"train_batch_size": BATCH, "zero_optimization": {"stage": stage}, "trireme": {"gather": gather}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained(model), lr=lr), config=config)
    losses = []
    for step in range(steps):
        loss = loss_of(name, engine, step, engine.global_rank, engine.world_size)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        deepspeed.comm.all_reduce(mean)
        losses.append(mean.item() / engine.world_size)
    engine.destroy()
    return losses
