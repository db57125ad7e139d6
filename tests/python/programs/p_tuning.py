"""P-tuning of a frozen language model, as programs for `deepspeed` do it: activation checkpointing, gradients over
several micro-batches.

    deepspeed --master_port 520 p_tuning.py --train_path data.json --ds_file ds_zero2_no_offload.json …

Knows nothing of Trireme. `--plain` trains the same by PyTorch alone, for comparison.
"""
import argparse
import json
import os

import torch
from torch.utils.checkpoint import checkpoint_sequential

VOCABULARY, WIDTH, LAYERS, HEADS = 128, 32, 4, 4


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_path", required=True)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--per_device_train_batch_size", type=int, default=1)
    parser.add_argument("--max_len", type=int, default=64)
    parser.add_argument("--max_src_len", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--warmup_ratio", type=float, default=0.1)
    parser.add_argument("--mode", default="glm2")
    parser.add_argument("--train_type", choices=["ptuning"], default="ptuning")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--ds_file", required=True)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--show_loss_step", type=int, default=10)
    parser.add_argument("--pre_seq_len", type=int, default=16)
    parser.add_argument("--prefix_projection", type=lambda text: text == "True", default=False)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--plain", action="store_true")
    return parser.parse_args()


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden):
        length = hidden.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        normed = self.norm1(hidden)
        hidden = hidden + self.attention(normed, normed, normed, attn_mask=future, need_weights=False)[0]
        return hidden + self.mlp(self.norm2(hidden))


class PrefixEncoder(torch.nn.Module):
    """The vectors that stand before each text: what P-tuning trains."""

    def __init__(self, length, projects):
        super().__init__()
        self.embedding = torch.nn.Embedding(length, WIDTH)
        self.projection = torch.nn.Identity()
        if projects:
            self.projection = torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Tanh(), torch.nn.Linear(2 * WIDTH, WIDTH))

    def forward(self):
        return self.projection(self.embedding.weight)


class LanguageModel(torch.nn.Module):
    def __init__(self, args):
        super().__init__()
        self.checkpoints = args.gradient_checkpointing
        self.words = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        for parameter in self.parameters():
            parameter.requires_grad = False
        self.prefix_encoder = PrefixEncoder(args.pre_seq_len, args.prefix_projection)

    def forward(self, input_ids, labels):
        prefix = self.prefix_encoder().expand(len(input_ids), -1, -1)
        hidden = torch.cat([prefix, self.words(input_ids)], dim=1)
        if self.checkpoints:
            hidden = checkpoint_sequential(self.blocks, 2, hidden, use_reentrant=False)
        else:
            hidden = self.blocks(hidden)
        logits = self.head(hidden[:, prefix.shape[1]:-1])
        return torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))


def samples_of(args):
    """(tokens, labels) of each line: what was asked gives no loss."""
    samples = []
    with open(args.train_path, encoding="utf-8") as file:
        for line in file:
            sample = json.loads(line)
            source = list(sample["text"].encode()[:args.max_src_len])
            tokens = (source + list(sample["answer"].encode()))[:args.max_len]
            labels = [-100] * len(source) + tokens[len(source):]
            samples.append((torch.tensor([tokens]), torch.tensor([labels])))
    return samples


def configuration_of(args):
    with open(args.ds_file, encoding="utf-8") as file:
        config = json.load(file)
    config["train_micro_batch_size_per_gpu"] = args.per_device_train_batch_size
    config["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    config["optimizer"] = {"type": "AdamW", "params": {"lr": args.learning_rate, "weight_decay": args.weight_decay}}
    return config


class PlainEngine:
    """PyTorch's way of the same steps."""

    def __init__(self, model, args):
        self.model, self.every, self.count = model, args.gradient_accumulation_steps, 0
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=args.weight_decay)

    def __call__(self, *inputs):
        return self.model(*inputs)

    def backward(self, loss):
        (loss / self.every).backward()

    def step(self):
        self.count += 1
        if self.count % self.every == 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    model = LanguageModel(args)
    if args.plain:
        engine = PlainEngine(model, args)
    else:
        import deepspeed
        deepspeed.init_distributed()
        engine, *_ = deepspeed.initialize(model=model, args=args, config=configuration_of(args), dist_init_required=True)
        print("launched as", args.local_rank, "with", os.environ["LOCAL_SIZE"], "seeing", os.environ.get("CUDA_VISIBLE_DEVICES"))
    step = 0
    for _ in range(args.num_train_epochs):
        for tokens, labels in samples_of(args):
            loss = engine(tokens, labels)
            engine.backward(loss)
            engine.step()
            step += 1
            if step % args.show_loss_step == 0:
                print(f"step {step} loss {loss.item():.6f}", flush=True)
    if not args.plain:
        print("updates", engine.global_steps)
        engine.save_checkpoint(args.output_dir, exclude_frozen_parameters=True)


if __name__ == "__main__":
    main()
