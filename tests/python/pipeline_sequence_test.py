"""Pipelines whose stages have parts of sequences: DeepSpeed's PipelineModule with sequence_parallel_size. Each rank
compares losses, gradients and weights with plain PyTorch."""
import unittest

from harness import Case, main

_BEGIN = """
import torch, deepspeed
from torch import nn
from torch.nn import functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_optimizer_state
deepspeed.init_distributed()
torch.set_num_threads(1)
VOCABULARY, HIDDEN, HEADS, LENGTH, STEPS = 31, 16, 4, 9, 2
RANK = deepspeed.comm.get_rank()


# Makes positions by the length that it reads, and hands them and the padding on.
class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(VOCABULARY, HIDDEN)

    weight = property(lambda self: self.word.weight)

    def forward(self, given):
        ids, mask = given
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        return self.word(ids), positions, mask


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.places, self.qkv, self.o = nn.LayerNorm(HIDDEN), nn.Embedding(LENGTH, HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, given):
        x, positions, mask = given
        batch, length, _ = x.shape
        y = self.norm(x + self.places(positions))
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(y).chunk(3, -1))
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()[None, None] & mask[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return x + self.o(y.transpose(1, 2).reshape(batch, length, HIDDEN)), positions, mask


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, given):
        return self.head(self.norm(given[0]))


def loss_of(outputs, labels):
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def logits(first, given):
    return F.linear(given[0], first.word.weight)


def batch(number):
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(number))
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, -2:] = False
    labels = tokens[:, 1:].clone()
    labels[:, :number % 3 * 2] = -100
    return (tokens[:, :-1], mask), labels


def layers_of(tied):
    first = TiedLayerSpec("word", First, tied_weight_attr=["word.weight"]) if tied else LayerSpec(First)
    last = TiedLayerSpec("word", First, forward_fn=logits, tied_weight_attr=["word.weight"]) if tied else LayerSpec(Last)
    return [first, *(LayerSpec(Block) for _ in range(4)), last]


class Plain(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.layers = nn.ModuleList([First(), *(Block() for _ in range(4)), *([] if tied else [Last()])])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return logits(self.layers[0], x) if len(self.layers) == 5 else x


def fill(named):
    with torch.no_grad():
        for name, parameter in named:
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(sum(map(ord, name)))))


def near(got, expected, what):
    difference = (got - expected).norm() / expected.norm()
    assert difference < 2e-6, (what, difference.item())


def make(tied=False, stage=1, schedule="1f1b", chunks=1, **config):
    module = PipelineModule(layers_of(tied), num_stages=2, loss_fn=loss_of, schedule=schedule, chunks=chunks, partition_method="uniform")
    fill(module.named_parameters())
    data = deepspeed.comm.get_world_size() // 4
    engine, *_ = deepspeed.initialize(model=module, config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4 // data, "gradient_clipping": 0.5, "sequence_parallel_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.0, 0.95], "eps": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage}, **config})
    assert (engine.dp_world_size, engine.sequence_parallel_size) == (data, 2)
    assert groups.get_data_parallel_world_size() == data and groups._get_sequence_parallel_world_size() == 2
    return module, engine


def compare(tied=False, **how):
    module, engine = make(tied, **how)
    data, place = engine.dp_world_size, groups.get_data_parallel_rank()
    plain = Plain(tied)
    fill((name.removeprefix("layers."), parameter) for name, parameter in plain.named_parameters())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, betas=(0.0, 0.95), eps=1e-3, weight_decay=0.01)
    expected = {name.removeprefix("layers."): parameter for name, parameter in plain.named_parameters()}
    own = {name: p for name, p in module.named_parameters() if not getattr(p, "ds_pipe_replicated", False)}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = sum(loss_of(plain(inputs), labels) for inputs, labels in map(batch, range(step * 4, step * 4 + 4))) / 4
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        near(engine.train_batch(map(batch, range(step * 4 + place, step * 4 + 4, data))).cpu(), loss.detach(), f"loss of step {step}")
        for name, parameter in own.items():
            gradient = safe_get_full_optimizer_state(parameter, "exp_avg")
            if gradient is not None:
                near(gradient, expected[name].grad, f"gradient of {name} in step {step}")
        optimizer.step()
    for name, parameter in own.items():
        if (value := safe_get_full_fp32_param(parameter)) is not None:
            near(value, expected[name].detach(), name)
    loss, outputs = engine.eval_batch(iter([batch(100)]), return_logits=True, num_micro_batches=1)
    with torch.no_grad():
        whole = plain(batch(100)[0])
    near(loss.cpu(), loss_of(whole, batch(100)[1]), "evaluated loss")
    assert (outputs is not None) == module.has_last_part()
    if outputs is not None:
        assert outputs.shape == whole.shape, outputs.shape
        near(outputs, whole, "logits")
    engine.destroy()
"""


class StagesOfSequences(Case):
    def run_program(self, ranks, body):
        self.assertEqual(self.on_ranks(ranks, _BEGIN + body + "\nresult = 'compared'\n", as_deepspeed=True), "compared")

    def test_at_every_zero_stage(self):
        self.run_program(4, "for stage in range(4):\n    compare(stage=stage)\n")

    def test_tied_layers_and_other_schedules(self):
        self.run_program(4, """
for schedule, chunks in (("gpipe", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)):
    compare(tied=True, stage=2, schedule=schedule, chunks=chunks)
""")

    def test_in_a_ring_with_layers_that_are_computed_again(self):
        self.run_program(4, """
compare(stage=3, trireme={"sequence_attention": "ring"}, pipeline={"activation_checkpoint_interval": 1})
""")

    def test_beside_data_parallel_ranks(self):
        self.run_program(8, "compare(stage=2)\n")

    def test_other_batches_of_one_sequence_are_refused(self):
        self.run_program(4, """
module, engine = make()
try:
    engine.train_batch(map(batch, range(RANK % 2, RANK % 2 + 4)))
    raise AssertionError("other batches were taken")
except RuntimeError as error:
    assert "ranks that share a sequence get the same micro-batches" in str(error), error
""")


if __name__ == "__main__":
    main()
