"""Dropout inside of what torch's and DeepSpeed's checkpointing compute again, on parts of activations: the numbers of
the first forward come again, so that gradients are those of the run that keeps all activations."""
import unittest

from harness import Case, main

_PROGRAM = """
import torch, deepspeed
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from deepspeed.utils import safe_get_full_grad
deepspeed.init_distributed()
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2, self.how = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8), None

    def inner(self, x):
        return self.fc2(F.dropout(F.gelu(self.fc1(self.norm(x))), 0.5))

    def forward(self, x):
        return x + (self.how(self.inner, x) if self.how else self.inner(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.layers = nn.Embedding(17, 8), nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens):
        x = self.word(tokens)
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


HOW = {"keeps all": None, "torch's": lambda f, x: checkpoint(f, x, use_reentrant=False), "torch's reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
       "DeepSpeed's": deepspeed.checkpointing.checkpoint}


def gradients(how, cut):
    torch.manual_seed(3)
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **cut})
    for layer in model.layers:
        layer.how = HOW[how]
    torch.manual_seed(7)
    tokens = torch.randint(17, (2, 8), generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(2):  # the second step draws on
        loss = engine(engine.cut(input_ids=tokens)["input_ids"] if "sequence_parallel_size" in cut else tokens)
        engine.backward(loss)
        found += [float(loss), *(safe_get_full_grad(p).flatten().tolist() for p in model.parameters())]
        engine.step()
    engine.destroy()
    return found


cuts = {"slices": {"tensor_parallel": {"autotp_size": 2}}, "parts of sequences": {"sequence_parallel_size": 2}}
result = {name: {how: gradients(how, cut) for how in HOW} for name, cut in cuts.items()}
"""


class RecomputedDropout(Case):
    def test_draws_the_numbers_of_the_first_forward(self):
        for cut, by_way in self.on_ranks(2, _PROGRAM, as_deepspeed=True).items():
            for how, found in by_way.items():
                with self.subTest(cut=cut, how=how):
                    self.assertTrue(found == by_way["keeps all"], "other gradients")


if __name__ == "__main__":
    main()
