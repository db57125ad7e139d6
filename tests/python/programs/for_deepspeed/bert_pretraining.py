"""Masked language modelling by a small encoder, as BERT is pre-trained: decay by group, accumulation, a learning rate
set by hand."""
import argparse
import json
import os
import tempfile

import deepspeed
import torch
from torch import nn

from reporting import report

VOCABULARY, WIDTH, LENGTH, MASK = 96, 32, 16, 3


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.transform = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = self.words.weight

    def forward(self, batch, log=False):
        input_ids, labels = batch
        x = self.words(input_ids) + self.positions(torch.arange(LENGTH, device=input_ids.device))
        x = self.encoder(self.LayerNorm(x))
        scores = self.decoder(torch.tanh(self.transform(x)))
        return nn.functional.cross_entropy(scores.view(-1, VOCABULARY), labels.view(-1), ignore_index=-1)


def prepare_optimizer_parameters(model):
    no_decay = ["bias", "LayerNorm", "norm1", "norm2"]
    named = list(model.named_parameters())
    return [{"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
            {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0}]


def warmup_linear(x, warmup=0.25):
    return x / warmup if x < warmup else max(0.0, 1.0 - x)


def batch_of(step, rank):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    ids = torch.randint(4, VOCABULARY, (4, LENGTH), generator=generator) // 3 * 3
    masked = torch.rand(ids.shape, generator=generator) < 0.2
    return ids.masked_fill(masked, MASK), ids.masked_fill(~masked, -1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=8)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    with tempfile.TemporaryDirectory() as folder:
        args.deepspeed_config = os.path.join(folder, "deepspeed_bsz64_config.json")
        with open(args.deepspeed_config, "w", encoding="utf-8") as file:
            json.dump({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "steps_per_print": 1000,
                       "optimizer": {"type": "Adam", "params": {"lr": 4e-3, "weight_decay": 0.01, "torch_adam": True}},
                       "gradient_clipping": 1.0, "zero_optimization": {"stage": args.stage}}, file)
        torch.manual_seed(42)
        model = Bert()
        network, optimizer, _, _ = deepspeed.initialize(args=args, model=model,
                                                        model_parameters=prepare_optimizer_parameters(model))
    losses, global_step = [], 0
    for step in range(2 * args.max_steps):
        loss = network.forward(batch_of(step, network.global_rank))
        network.backward(loss)
        losses.append(loss.item())
        if network.is_gradient_accumulation_boundary():
            rate = 4e-3 * warmup_linear(global_step / args.max_steps)
            for param_group in optimizer.param_groups:
                param_group["lr"] = rate
            network.step()
            global_step += 1
        else:
            network.step()
    report(losses=losses, rates=network.get_lr(), steps=[network.global_steps, global_step, network.gradient_accumulation_steps()])


if __name__ == "__main__":
    main()
