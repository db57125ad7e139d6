"""A GPT with tied embeddings, trained in two stages of a pipeline with ZeRO 1: layers of which each rank builds its
own.

    trireme launch --num_gpus 2 examples/python/pipeline.py [STEPS]
"""
import itertools
import sys

import torch
import trireme as deepspeed
from torch import nn
from trireme.pipe import LayerSpec, PipelineModule, TiedLayerSpec

WORDS, WIDTH, LENGTH = 32, 64, 16


class Embedding(nn.Embedding):
    """Words [batch, LENGTH] -> hidden [batch, LENGTH, WIDTH], and back to the logits of words."""

    def forward(self, words):
        return super().forward(words) + torch.arange(LENGTH)[:, None] / LENGTH

    def logits(self, hidden):
        return hidden @ self.weight.t()


class Block(nn.TransformerEncoderLayer):
    """[batch, LENGTH, WIDTH] -> the same."""

    def __init__(self):
        super().__init__(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, hidden):  # pylint: disable=arguments-differ
        return super().forward(hidden, nn.Transformer.generate_square_subsequent_mask(LENGTH), is_causal=True)


def batches(rank):
    """(words, the words that follow), micro-batch by micro-batch: each word is the one before plus a step."""
    for number in itertools.count():
        generator = torch.Generator().manual_seed(1000 * rank + number)
        begins, steps = torch.randint(WORDS, (8, 1), generator=generator), torch.randint(1, 4, (8, 1), generator=generator)
        words = (begins + steps * torch.arange(LENGTH + 1)) % WORDS
        yield words[:, :-1], words[:, 1:]


layers = [TiedLayerSpec("words", Embedding, WORDS, WIDTH), *[LayerSpec(Block) for _ in range(4)], LayerSpec(nn.LayerNorm, WIDTH),
          TiedLayerSpec("words", Embedding, WORDS, WIDTH, forward_fn=Embedding.logits)]
deepspeed.init_distributed()
model = PipelineModule(layers, num_stages=2, partition_method="type:block", seed_layers=True, activation_checkpoint_interval=1,
                       loss_fn=lambda logits, labels: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
config = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1},
          "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}
engine, *_ = deepspeed.initialize(model=model, config=config)
data = batches(engine.grid.get_data_parallel_id())
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 40):
    loss = engine.train_batch(data)
    if step % 10 == 9 and engine.global_rank == 0:
        print(f"step {step + 1} loss {loss.item():.3f}", flush=True)
engine.save_checkpoint("checkpoints")
