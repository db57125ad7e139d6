"""Trains a small language model on the bytes of Python's own library, with ZeRO-3.

    trireme launch --num_gpus 2 python from_scratch.py [STEPS]
"""
import itertools
import pathlib
import sys

import torch
from torch import nn

import trireme

SEQUENCE, WIDTH = 64, 64
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_optimization": {"stage": 3},
}


class LanguageModel(nn.Module):
    """Next-byte prediction; nothing in it knows of ranks."""

    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(256, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        hidden = self.embed(tokens) + self.position.weight[:tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.layers(hidden, mask=mask, is_causal=True))


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    text = torch.frombuffer(bytearray(pathlib.Path(pathlib.__file__).read_bytes()), dtype=torch.uint8).long()
    samples = text[:text.numel() // (SEQUENCE + 1) * (SEQUENCE + 1)].view(-1, SEQUENCE + 1)
    torch.manual_seed(0)
    with trireme.zero.Init(config_dict_or_path=CONFIG):  # no rank ever holds the whole model
        model = LanguageModel()
    engine, _, loader, _ = trireme.initialize(model=model, config=CONFIG, training_data=samples)
    batches = (batch for _ in itertools.count() for batch in loader)  # as many epochs as it takes
    while engine.global_steps < steps:
        batch = next(batches).to(engine.device)
        loss = nn.functional.cross_entropy(engine(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0 and engine.micro_steps % 20 == 0:
            print(f"step {engine.global_steps} loss {loss.item():.4f}", flush=True)
    engine.save_checkpoint("checkpoints")


if __name__ == "__main__":
    main()
