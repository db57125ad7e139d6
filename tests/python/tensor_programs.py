"""Models of Hugging Face, each trained by plain PyTorch in one process and by an engine whose ranks share layers; every
rank does both.

    trireme launch --num_gpus 4 python tests/python/tensor_programs.py FAMILY TENSOR STAGE prints what differs, on rank
    0

"llama@tokens" is a "llama" whose ranks have some tokens each between layers.
"wide@overlap" is a "wide" whose ranks exchange large sums by pieces.
"""
import functools
import sys

import torch
import torch.distributed as dist
import transformers
import trireme
from zoo import hugging_face
from zoo.hugging_face import adapted, checkpointed

STEPS, SAMPLES, LENGTH, VOCABULARY, HIDDEN, CLIPPING = 10, 4, 14, 66, 32, 0.5
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-4, "weight_decay": 0.1}
# Rounding noise would be most of a gradient that is zero by mathematics, as those of the biases of keys are.
SMALLEST = 1e-4


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
    """A language model as a program writes it, whose partition_config stands in OPTIONS."""

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

FAMILIES = {
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
# Options of the configuration beside those of config().
OPTIONS = {
    "accumulated": {"gradient_accumulation_steps": 2},
    "own": {"tensor_parallel": {"partition_config": {"layer_specs": [
        {"patterns": [r"blocks\.\d+\.attention\.mixed\.weight"], "shape": [3, -1]},
        {"patterns": [r"blocks\.\d+\.into\.weight"]},
        {"patterns": [r"blocks\.\d+\.(attention\.out|out_of)\.weight"], "partition_type": "row"}]}}},
}


# The suffixes of a family's name: a key of tensor_parallel that is on.
KEYS = {"tokens": "sequence_parallel", "overlap": "tp_overlap_comm"}


def _base(family):
    return family.partition("@")[0]


def _options(family):
    base, _, key = family.partition("@")
    options = OPTIONS.get(base, {})
    return {**options, "tensor_parallel": {**options.get("tensor_parallel", {}), KEYS[key]: True}} if key else options


def build(family):
    """The model, the same everywhere. Biases and norms begin with values that tell them apart."""
    torch.manual_seed(1)
    model = FAMILIES[_base(family)]().train()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def batch(step, rank=0, ranks=1):
    """The batch of `rank` among `ranks` that take other samples. The end of each sample is padding, so that ranks'
    losses count alike."""
    ids = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(ids)
    mask[:, -3:] = 0
    whole = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {name: tensor.chunk(ranks)[rank] for name, tensor in whole.items()}


@functools.cache
def plain(family):
    """(losses, norms of gradients, the first step's gradients, weights at the end), by names."""
    model = build(family)
    optimizer, losses, norms, gradients = torch.optim.AdamW(model.parameters(), **ADAMW), [], [], {}
    for step in range(STEPS):
        loss = model(**batch(step)).loss
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}


def config(tensor, stage, ranks, tensor_parallel=None, **more):
    """The configuration of an engine that takes the samples of a batch in one step."""
    result = {"train_micro_batch_size_per_gpu": SAMPLES * tensor // ranks // more.get("gradient_accumulation_steps", 1), "gradient_clipping": CLIPPING,
              "zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": ADAMW}, **more}
    return result if tensor == 1 else {**result, "tensor_parallel": {"autotp_size": tensor, **(tensor_parallel or {})}}


# Mistakes that a comparison must see: what each does to an engine's model and batches.
PLANTED = {
    "gradient": lambda model: [p for p in model.parameters() if p.dim() > 1][-2].register_hook(lambda gradient: gradient * 1.0001),
    "weight": lambda model: [p for p in model.parameters() if p.dim() > 1][2].data.view(-1)[3].add_(1e-3),
    "loss": lambda model: model.register_forward_hook(lambda module, inputs, output: output.__setitem__("loss", output["loss"] * 1.0001)),
}


def engines(family, tensor, stage, ranks, planted=None):
    """As plain(), by an engine over all ranks; None of parameters without a gradient."""
    options = config(tensor, stage, ranks, **_options(family))
    with trireme.zero.Init(config_dict_or_path=options, enabled=_base(family) == "under_init" and stage == 3):
        model = build(family)
    if planted:
        PLANTED[planted](model)
    engine, *_ = trireme.initialize(model=model, config=options)
    data = engine.get_data_parallel_rank(), engine.dp_world_size
    assert data[1] == ranks // tensor, f"{data[1]} ranks take other samples, of {ranks} with {tensor} for each layer"
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        found = []
        for micro in range(engine.gradient_accumulation_steps()):
            if micro:
                engine.step()
            part = {name: tensor.chunk(engine.gradient_accumulation_steps())[micro] for name, tensor in batch(step, *data).items()}
            loss = engine(**part).loss
            engine.backward(loss)
            found.append(loss.item())
        losses.append(sum(found) / len(found))
        if step == 0:
            gradients = {name: trireme.utils.safe_get_full_grad(p) for name, p in model.named_parameters() if p.requires_grad}
        engine.step()
        norms.append(engine.get_global_grad_norm())
    weights = {name: trireme.utils.safe_get_full_fp32_param(p).detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    engine.destroy()
    after = {name: p.detach() for name, p in model.named_parameters()}
    losses = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(losses)
    return (losses / ranks).tolist(), norms, gradients, weights, after


def _apart(found, expected, smallest=0.0):
    """The largest difference of tensors, relative to norms, and the name."""
    worst = (0.0, "")
    for name, value in expected.items():
        other = found.get(name)
        if other is None or other.shape != value.shape:
            return float("inf"), f"{name}: {None if other is None else list(other.shape)} in place of {list(value.shape)}"
        worst = max(worst, (((other - value).norm() / value.norm().clamp(min=max(smallest, 1e-12))).item(), name))
    return worst


def differences(family, tensor, stage, planted=None):
    """{"losses", "norms", "gradients", "weights", "after destroy()": [the largest relative difference on any rank,
    where]}. Collective."""
    trireme.init_distributed()
    ranks = trireme.comm.get_world_size()
    expected = plain(_base(family))
    found = engines(family, tensor, stage, ranks, planted)
    numbers = lambda one: {str(step): torch.tensor([value], dtype=torch.float64) for step, value in enumerate(one)}
    total = torch.stack([gradient.norm() for gradient in expected[2].values()]).norm().item()
    own = {"losses": _apart(numbers(found[0]), numbers(expected[0])), "norms": _apart(numbers(found[1]), numbers(expected[1])),
           "gradients": _apart(found[2], expected[2], SMALLEST * total), "weights": _apart(found[3], {name: expected[3][name] for name in expected[2]}),
           "after destroy()": _apart(found[4], expected[3])}
    every = [None] * ranks
    dist.all_gather_object(every, own)
    return {kind: max(one[kind] for one in every) for kind in own}


if __name__ == "__main__":
    result = differences(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    if trireme.comm.get_rank() == 0:
        for what, (relative, where) in result.items():
            print(f"{what:16} {relative:.1e} {where}")
