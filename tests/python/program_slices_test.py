"""Models that bring their own slices, as Megatron's do: over an mpu, and in the stages of a pipeline. Each rank
compares losses, every gradient and weights with plain PyTorch."""
import unittest

from harness import Case, main

_BEGIN = """
import json, torch, deepspeed
from megatron import Enter, Leave
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
deepspeed.init_distributed()
torch.set_num_threads(1)
VOCABULARY, HIDDEN, INNER, LENGTH, STEPS = 31, 16, 24, 6, 3
RANK, WORLD = dist.get_rank(), dist.get_world_size()


class Mpu:
    size = 2
    pairs = [dist.new_group([first, first + 1]) for first in range(0, WORLD, 2)]
    get_model_parallel_world_size = lambda self: self.size
    get_model_parallel_rank = lambda self: RANK % self.size
    get_model_parallel_group = lambda self: self.pairs[RANK // self.size]


def pair():
    return Mpu().get_model_parallel_group()


class Block(nn.Module):
    # Whole with one slice; else this rank's slice of the two layers.
    def __init__(self, slices=1, marks=True):
        super().__init__()
        self.slices = slices
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, INNER // slices), nn.Linear(INNER // slices, HIDDEN, bias=False)
        self.bias = nn.Parameter(torch.zeros(HIDDEN))
        if slices > 1 and marks:
            for parameter in (self.up.weight, self.up.bias, self.down.weight):
                parameter.tensor_model_parallel = True

    def forward(self, x):
        y = self.norm(x)
        y = self.down(F.gelu(self.up(Enter.apply(y, pair()) if self.slices > 1 else y)))
        return x + (Leave.apply(y, pair()) if self.slices > 1 else y) + self.bias


def layers_of(slices, marks=True):
    return [nn.Embedding(VOCABULARY, HIDDEN), *(Block(slices, marks) for _ in range(3)), nn.Linear(HIDDEN, VOCABULARY)]


def cut(name, whole):
    # This rank's slice of a value of the whole model.
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name.partition(".")[2])
    return whole if dim is None else whole.chunk(2, dim)[RANK % 2]


def value_of(name, shape):
    return 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def fill(named, plain):
    with torch.no_grad():
        for name, parameter in named:
            parameter.copy_(cut(name, plain[name]))


def loss_of(outputs, labels):
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def batch(number):
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(number))
    return tokens[:, :-1], tokens[:, 1:]


def trained():
    model = nn.Sequential(*layers_of(1))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(value_of(name, parameter.shape))
    begin = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.0, 0.95), eps=1e-3, weight_decay=0.01)
    losses, gradients, norms = [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = sum(loss_of(model(inputs), labels) for inputs, labels in map(batch, range(step * 4, (step + 1) * 4))) / 4
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        losses.append(loss.detach())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    return begin, losses, gradients, norms, {name: p.detach() for name, p in model.named_parameters()}


def near(got, expected, what):
    difference = (got - expected).norm() / expected.norm().clamp_min(1e-3)
    assert difference < 1e-5, (what, difference.item())


def config_of(stage, data, **more):
    return {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4 // data, "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.0, 0.95], "eps": 1e-3, "weight_decay": 0.01}},
            "zero_optimization": {"stage": stage}, **more}


def compare_states(engine, module, gradients):
    for name, parameter in module.named_parameters():
        gradient = safe_get_full_optimizer_state(parameter, "exp_avg")
        near(gradient, cut(name, gradients[name]), f"gradient of {name}")


def compare(stage, **more):
    data = WORLD // 2
    begin, losses, gradients, norms, weights = trained()
    module = nn.Sequential(*layers_of(2))
    fill(module.named_parameters(), begin)
    engine, *_ = deepspeed.initialize(model=module, config=config_of(stage, data, **more), mpu=Mpu())
    assert engine.dp_world_size == data, engine.dp_world_size
    for step in range(STEPS):
        total = 0
        for number in range(step * 4 + RANK // 2, (step + 1) * 4, data):
            inputs, labels = batch(number)
            loss = loss_of(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
            total = total + loss.detach() / 4
        dist.all_reduce(total)
        near(total / 2, losses[step], f"loss of step {step}")
        near(torch.tensor(engine.get_global_grad_norm()), norms[step], f"norm of step {step}")
        compare_states(engine, module, gradients[step])
    for name, parameter in module.named_parameters():
        near(safe_get_full_fp32_param(parameter), cut(name, weights[name]), name)
    return engine


def compare_stages(stage, schedule="1f1b"):
    data = WORLD // 4
    begin, losses, gradients, norms, weights = trained()
    specs = [LayerSpec(nn.Embedding, VOCABULARY, HIDDEN), *(LayerSpec(Block, 2) for _ in range(3)), LayerSpec(nn.Linear, HIDDEN, VOCABULARY)]
    module = PipelineModule(specs, topology=PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=data), loss_fn=loss_of,
                            partition_method="uniform", schedule=schedule)
    fill(module.named_parameters(), begin)
    engine, *_ = deepspeed.initialize(model=module, config=config_of(stage, data))
    place = engine.grid.get_data_parallel_rank()
    for step in range(STEPS):
        loss = engine.train_batch(map(batch, range(step * 4 + place, (step + 1) * 4, data)))
        near(loss.cpu(), losses[step], f"loss of step {step}")
        near(torch.tensor(engine.get_global_grad_norm()), norms[step], f"norm of step {step}")
        compare_states(engine, module, gradients[step])
    for name, parameter in module.named_parameters():
        near(safe_get_full_fp32_param(parameter), cut(name, weights[name]), name)
    return engine


def refused(make):
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
"""


class ProgramSlices(Case):
    def run_program(self, ranks, body):
        self.assertEqual(self.on_ranks(ranks, _BEGIN + body + "\nresult = 'compared'\n", as_deepspeed=True), "compared")

    def test_over_an_mpu_at_every_zero_stage(self):
        self.run_program(4, "for stage in range(4):\n    compare(stage).destroy()\n")

    def test_beside_other_features(self):
        self.run_program(4, """
compare(3, trireme={"gather": "copy"}).destroy()
compare(2, deterministic=True).destroy()
compare(1, zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}}).destroy()
""")

    def test_in_the_stages_of_a_pipeline(self):
        self.run_program(4, "for stage in range(4):\n    compare_stages(stage).destroy()\ncompare_stages(1, 'zb-h1').destroy()\n")

    def test_checkpoints_keep_the_slices_of_each_rank(self):
        self.run_program(4, """
import tempfile
names = [tempfile.mkdtemp() if RANK == 0 else None]
dist.broadcast_object_list(names)
engine = compare(3)
engine.save_checkpoint(names[0])
before = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
engine.destroy()
module = nn.Sequential(*layers_of(2))
fill(module.named_parameters(), trained()[0])
engine, *_ = deepspeed.initialize(model=module, config=config_of(1, 2), mpu=Mpu())
engine.load_checkpoint(names[0])
for name, parameter in module.named_parameters():
    assert torch.equal(safe_get_full_fp32_param(parameter), before[name]), name
assert "the program has cut its layers itself" in refused(lambda: engine.save_16bit_model(names[0]))
engine.destroy()
dist.barrier()
if RANK == 0:
    import shutil
    shutil.rmtree(names[0])
""")

    def test_slices_that_are_not_marked_are_refused(self):
        self.run_program(2, """
module = nn.Sequential(*layers_of(2, marks=False))
fill(module.named_parameters(), trained()[0])
said = refused(lambda: deepspeed.initialize(model=module, config=config_of(1, 1), mpu=Mpu()))
assert "parameter '1.up.weight' has other values on rank 1" in said and "tensor_model_parallel = True" in said, said
""")

    def test_other_batches_on_the_ranks_of_an_mpu_are_refused(self):
        self.run_program(2, """
module = nn.Sequential(*layers_of(2))
fill(module.named_parameters(), trained()[0])
for name, parameter in module.named_parameters():  # so that no gradient of a whole parameter shows it
    parameter.requires_grad_(hasattr(parameter, "tensor_model_parallel"))
engine, *_ = deepspeed.initialize(model=module, config=config_of(1, 1), mpu=Mpu())
said = refused(lambda: engine(batch(RANK)[0]))
assert "args[0] has other values on another rank" in said, said
""")


if __name__ == "__main__":
    main()
