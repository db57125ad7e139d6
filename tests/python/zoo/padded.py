"""Models of Hugging Face, and one as a program writes it, on samples that end with padding."""
import functools

import torch
import transformers
import zoo
from zoo import hugging_face
from zoo.hugging_face import adapted, checkpointed

SAMPLES, LENGTH, VOCABULARY, HIDDEN = 4, 14, 66, 32


def batch(number):
    """Ids, mask and labels; the samples' ends are alike, so that each loss is the mean of as many tokens."""
    ids = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(number))
    mask = torch.ones_like(ids)
    mask[:, -3:] = 0
    return ids, mask, ids.masked_fill(mask == 0, -100)


def loss(call, _, ids, mask, labels):
    return call(input_ids=ids, attention_mask=mask, labels=labels).loss


class Attention(torch.nn.Module):
    """The attention of a model that is no transformers', with queries, keys and values in one matrix."""

    def __init__(self):
        super().__init__()
        self.mixed, self.out = torch.nn.Linear(HIDDEN, 3 * HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, mask):
        batch, length, _ = x.shape
        query, key, value = (part.view(batch, length, -1, 8).transpose(1, 2) for part in self.mixed(x).chunk(3, -1))
        scores = (query @ key.transpose(-1, -2) / 8 ** 0.5).masked_fill(mask == 0, float("-inf"))
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, -1))


class Block(torch.nn.Module):
    """A layer of such a model."""

    def __init__(self):
        super().__init__()
        self.norm1, self.attention, self.norm2 = torch.nn.LayerNorm(HIDDEN), Attention(), torch.nn.LayerNorm(HIDDEN)
        self.into, self.out_of = torch.nn.Linear(HIDDEN, 50), torch.nn.Linear(50, HIDDEN)

    def forward(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.out_of(torch.tanh(self.into(self.norm2(x))))


class Own(torch.nn.Module):
    """A language model as a program writes it, which has a partition_config."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(VOCABULARY, HIDDEN), torch.nn.Parameter(torch.randn(1, 32, HIDDEN) * 0.02)
        self.blocks, self.norm = torch.nn.ModuleList(Block() for _ in range(2)), torch.nn.LayerNorm(HIDDEN)

    def forward(self, input_ids, attention_mask, labels):
        length = input_ids.shape[1]
        x = self.tokens(input_ids) + self.places[:, :length]
        mask = torch.ones(length, length).tril()[None, None] * attention_mask[:, None, None]
        for block in self.blocks:
            x = block(x, mask)
        logits = self.norm(x) @ self.tokens.weight.t()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


model = functools.partial(hugging_face.model, vocab_size=VOCABULARY)
decoder = functools.partial(model, use_cache=False)
llama = functools.partial(decoder, "llama", intermediate_size=50, pad_token_id=0)
llama_with_biases = functools.partial(llama, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
gpt2 = functools.partial(decoder, "gpt2")
qwen2 = functools.partial(decoder, "qwen2", intermediate_size=50, pad_token_id=0)
wide = functools.partial(llama, hidden_size=2560, num_hidden_layers=1, head_dim=8)

_FAMILIES = {
    "llama": llama,
    "llama_with_biases": llama_with_biases,
    "gpt2": gpt2,
    "gpt_neox": functools.partial(decoder, "gpt_neox", max_position_embeddings=32),
    "opt": functools.partial(decoder, "opt", max_position_embeddings=32),
    "phi3": functools.partial(decoder, "phi3"),
    "qwen2": functools.partial(qwen2, tie_word_embeddings=True),
    "gemma": functools.partial(decoder, "gemma", intermediate_size=50, pad_token_id=0),
    "falcon": functools.partial(decoder, "falcon"),
    "falcon_with_two_keys": functools.partial(decoder, "falcon", num_kv_heads=2),
    "bert": functools.partial(model, "BertForMaskedLM"),
    "t5": functools.partial(decoder, "T5ForConditionalGeneration"),
    "bloom": functools.partial(decoder, "bloom"),
    "wide": wide,  # sums of its layers are large enough to be exchanged by pieces
    # Programs' uses of them.
    "eager_attention": functools.partial(qwen2, attn_implementation="eager"),
    "recomputed": lambda: checkpointed(llama_with_biases()),
    "wide_recomputed": lambda: checkpointed(wide()),
    "wide_adapted": lambda: adapted(wide()),
    "accumulated": gpt2,
    "adapted": lambda: adapted(llama()),
    "adapted_gpt2": lambda: adapted(gpt2()),
    "adapted_by_dora": lambda: adapted(llama_with_biases(), use_dora=True, modules_to_save=["norm"], target_modules=[
        "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    "adapted_vocabulary": lambda: adapted(llama(), modules_to_save=["lm_head"], target_modules=["embed_tokens", "q_proj", "k_proj", "o_proj"]),
    "under_init": llama,
    "own": Own,
}
_OPTIONS = {
    "accumulated": {"accumulation": 2},
    "under_init": {"under_init": True},
    "own": {"partition_config": {"layer_specs": [
        {"patterns": [r"blocks\.\d+\.attention\.mixed\.weight"], "shape": [3, -1]},
        {"patterns": [r"blocks\.\d+\.into\.weight"]},
        {"patterns": [r"blocks\.\d+\.(attention\.out|out_of)\.weight"], "partition_type": "row"}]}},
}


def _told_apart(make):
    """Biases and norms begin with values that tell them apart."""
    result = make().train()
    for parameter in result.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return result


PROGRAMS = zoo.Collection("padded", batch, loss, sorted_by_words=False)
for _name, _make in _FAMILIES.items():
    PROGRAMS.add(f"padded {_name}", functools.partial(_told_apart, _make), train_micro_batch_size_per_gpu=SAMPLES, **_OPTIONS.get(_name, {}))
