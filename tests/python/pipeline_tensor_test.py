"""Pipelines whose stages are cut over ranks, with data parallelism beside them: DeepSpeed's
PipeModelDataParallelTopology with tensor_parallel.autotp_size. Each rank compares losses, gradients and weights with
plain PyTorch."""
import unittest

from harness import Case, main

_BEGIN = """
import json, sys, torch, deepspeed
from torch import nn
from torch.nn import functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
deepspeed.init_distributed()
torch.set_num_threads(1)
VOCABULARY, HIDDEN, HEADS, LENGTH, STEPS = 31, 16, 4, 6, 3
# The layers that heuristics find, and the word embedding, which is the head too.
RULES = {"layer_specs": [{"patterns": [".*(q|k|v)_proj.*", ".*fc1.*", "0[.]weight"], "partition_type": "column"},
                         {"patterns": [".*o_proj.*", ".*fc2.*"], "partition_type": "row"}]}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (proj(x).view(batch, length, HEADS, -1).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, HIDDEN))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(HIDDEN), Attention(), nn.LayerNorm(HIDDEN)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(HIDDEN, 24), "fc2": nn.Linear(24, HIDDEN)})

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


def logits(word, x):
    return x @ word.weight.t()


def loss_of(outputs, labels):
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def layers_of(tied):
    word = lambda **more: TiedLayerSpec("word", nn.Embedding, VOCABULARY, HIDDEN, **more) if tied else LayerSpec(nn.Embedding, VOCABULARY, HIDDEN)
    head = word(forward_fn=logits) if tied else LayerSpec(nn.Linear, HIDDEN, VOCABULARY)
    return [word(), *(LayerSpec(Block) for _ in range(4)), LayerSpec(nn.LayerNorm, HIDDEN), head]


def batch(number):
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(number))
    return tokens[:, :-1], tokens[:, 1:]


class Plain(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(VOCABULARY, HIDDEN), *(Block() for _ in range(4)), nn.LayerNorm(HIDDEN)])
        if not tied:
            self.layers.append(nn.Linear(HIDDEN, VOCABULARY))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x if len(self.layers) == 7 else logits(self.layers[0], x)


def fill(named):
    with torch.no_grad():
        for name, parameter in named:
            seed = sum(map(ord, name))
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))


def trained(tied, micro_batches, clipping):
    model = Plain(tied)
    fill((name.removeprefix("layers."), parameter) for name, parameter in model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.0, 0.95), eps=1e-3, weight_decay=0.01)
    losses, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = sum(loss_of(model(inputs), labels) for inputs, labels in map(batch, range(step * micro_batches, (step + 1) * micro_batches))) / micro_batches
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clipping)
        losses.append(loss.item())
        gradients.append({name.removeprefix("layers."): p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    return losses, gradients, {name.removeprefix("layers."): p.detach() for name, p in model.named_parameters()}


def near(got, expected, what):
    difference = (got - expected).norm() / expected.norm().clamp_min(1e-3)
    assert difference < 2e-5, (what, difference.item())


# Gives its input and 25 features, which two ranks cannot share evenly.
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(HIDDEN, 25)

    def forward(self, x):
        return x, F.gelu(self.fc1(x))


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc2 = nn.Linear(25, HIDDEN)

    def forward(self, both):
        return both[0] + self.fc2(both[1])


def compare_stage_that_ends_within_a_block(schedule):
    rules = {"layer_specs": [{"patterns": [".*fc1.*"], "partition_type": "column"}, {"patterns": [".*fc2.*"], "partition_type": "row"}]}
    layers = [nn.Embedding(VOCABULARY, HIDDEN), Wide(), Narrow(), nn.Linear(HIDDEN, VOCABULARY)]
    plain = nn.Sequential(*layers)
    fill(plain.named_parameters())
    module = PipelineModule([LayerSpec(nn.Embedding, VOCABULARY, HIDDEN), LayerSpec(Wide), LayerSpec(Narrow), LayerSpec(nn.Linear, HIDDEN, VOCABULARY)],
                            topology=PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1), loss_fn=loss_of, schedule=schedule,
                            partition_method="uniform")
    fill(module.named_parameters())
    engine, *_ = deepspeed.initialize(model=module, config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "tensor_parallel": {"autotp_size": 2, "partition_config": rules}})
    loss = engine.train_batch(map(batch, range(4)))
    expected = sum(loss_of(plain(inputs), labels) for inputs, labels in map(batch, range(4))) / 4
    expected.backward()
    near(loss.cpu(), expected.detach(), "loss")
    for name, parameter in module.named_parameters():
        own = dict(plain.named_parameters())[name]
        near(safe_get_full_fp32_param(parameter), (own - 0.1 * own.grad).detach(), name)
    engine.destroy()


def compare(tied=False, stage=1, schedule="1f1b", chunks=1, **config):
    world = deepspeed.comm.get_world_size()
    data = world // 4
    module = PipelineModule(layers_of(tied), topology=PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=data), loss_fn=loss_of,
                            schedule=schedule, chunks=chunks, partition_method="uniform")
    fill(module.named_parameters())
    accumulation = 4 // data
    engine, *_ = deepspeed.initialize(model=module, config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.0, 0.95], "eps": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage}, "tensor_parallel": {"autotp_size": 2, **({"partition_config": RULES} if tied else {})}, **config})
    place = engine.grid.get_data_parallel_rank()
    losses, gradients, weights = trained(tied, 4, 0.5)
    own = {name: p for name, p in module.named_parameters() if not getattr(p, "ds_pipe_replicated", False)}
    assert any(map(engine.core.is_part, own.values()))
    assert not tied or all(engine.core.is_part(p) for name, p in module.named_parameters() if name == "0.weight")
    for step in range(STEPS):
        numbers = iter(range(step * 4 + place, (step + 1) * 4, data))
        loss = engine.train_batch(map(batch, numbers))
        near(loss.cpu(), torch.tensor(losses[step]), f"loss of step {step}")
        for name, parameter in own.items():
            gradient = safe_get_full_optimizer_state(parameter, "exp_avg")
            if gradient is not None:
                near(gradient, gradients[step][name], f"gradient of {name} in step {step}")
    for name, parameter in own.items():
        value = safe_get_full_fp32_param(parameter)
        if value is not None:
            near(value, weights[name], name)
    return engine
"""


class Axes(Case):
    def run_program(self, ranks, body):
        self.assertEqual(self.on_ranks(ranks, _BEGIN + body + "\nresult = 'compared'\n", as_deepspeed=True), "compared")

    def test_stages_of_slices_at_every_zero_stage(self):
        self.run_program(4, "for stage in range(4):\n    compare(stage=stage).destroy()\n")

    def test_stages_hand_on_some_tokens_of_each_slice(self):
        self.run_program(4, """
tokens = {"tensor_parallel": {"autotp_size": 2, "sequence_parallel": True}}
for stage, more in ((0, {}), (1, {}), (1, {"pipeline": {"activation_checkpoint_interval": 1}})):
    engine = compare(stage=stage, **tokens, **more)
    engine.count_exchanges()
    engine.train_batch(map(batch, range(4)))
    ways = {row.way for row in engine.exchanges()}
    assert {"scatter", "gather"} <= ways, engine.exchange_table()
    engine.destroy()
""")

    def test_tied_layers_and_other_schedules(self):
        self.run_program(4, """
for schedule, chunks in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2), ("dualpipe-v", 2)):
    compare(tied=True, stage=2, schedule=schedule, chunks=chunks).destroy()
""")

    def test_stages_that_end_within_a_block(self):
        self.run_program(4, "for schedule in (\"1f1b\", \"zb-h1\"):\n    compare_stage_that_ends_within_a_block(schedule)\n")

    def test_deterministic_sums_recomputed_layers_and_copied_weights(self):
        self.run_program(4, """
compare(tied=True, stage=2, deterministic=True).destroy()
compare(tied=True, stage=3, trireme={"gather": "copy"}, pipeline={"activation_checkpoint_interval": 1}).destroy()
""")

    def test_pipe_data_and_model_together(self):
        self.run_program(8, """
for stage, more in ((1, {}), (3, {}), (3, {"mics_shard_size": 1})):
    compare(tied=True, stage=stage, zero_optimization={"stage": stage, **more}).destroy()
""")


if __name__ == "__main__":
    main()
