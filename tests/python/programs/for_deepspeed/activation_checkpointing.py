"""Activation checkpointing of a transformer's layers, with dropout inside of them."""
import argparse

import deepspeed
import torch
from torch import nn

from reporting import report


class Model(nn.Module):
    def __init__(self, width=16, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(40, width)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, 40)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = deepspeed.checkpointing.checkpoint(layer, x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0,
              "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "torch_adam": True}}, "zero_optimization": {"stage": args.stage},
              "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False, "number_checkpoints": 3}}
    deepspeed.init_distributed(dist_backend="gloo")
    deepspeed.checkpointing.configure(None, deepspeed_config=config)
    assert deepspeed.checkpointing.is_configured()
    torch.manual_seed(9)
    model = Model()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    torch.manual_seed(10 + engine.global_rank)
    losses = []
    for _ in range(6):
        ids = torch.randint(0, 40, (2, 9))
        logits = engine(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, 40), ids[:, 1:].reshape(-1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    report(losses=losses)


if __name__ == "__main__":
    main()
