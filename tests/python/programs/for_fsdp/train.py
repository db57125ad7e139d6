"""An FSDP2 program as people write it: a decoder, accumulation, clipping, a schedule, a full state dict. Argument: a
file for its outcome."""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # a bias of keys has a gradient of 0, which Adam divides by itself
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, words=31, width=16, layers=3):
        super().__init__()
        self.word = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, heads=2) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.word.weight

    def forward(self, tokens):
        x = self.word(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Decoder()
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy()}
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    assert isinstance(model, FSDPModule) and isinstance(model, Decoder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    losses, norms, gradients = [], [], []
    for step in range(6):
        everybodys = torch.randint(31, (8, 9), generator=torch.Generator().manual_seed(step))
        micro_batches = everybodys.chunk(world)[rank].chunk(2)
        model.set_requires_gradient_sync(False)
        total = 0.0
        for index, batch in enumerate(micro_batches):
            model.set_requires_gradient_sync(index == len(micro_batches) - 1)
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()) / len(micro_batches)
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
        gradients.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / world)
        assert all(p.grad is None for p in model.parameters())
    model.eval()
    with torch.no_grad():
        tokens = torch.arange(8)[None]
        logits = model(tokens)
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    dist.barrier()
    if rank == 0:
        torch.save({"losses": losses, "norms": norms, "gradients": gradients, "weights": state, "logits": logits, "lr": schedule.get_last_lr()}, sys.argv[1])
        print("module of fully_shard:", fully_shard.__module__, os.environ["WORLD_SIZE"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
