"""Two models with one loss: an encoder and a decoder, each with an engine, a stage and an optimizer of its own.

    trireme launch --num_gpus 2 python two_models.py
"""
import torch
from torch import nn

import trireme


def config(stage, lr):
    return {"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": stage},
            "optimizer": {"type": "Adam", "params": {"lr": lr}}}


def main():
    trireme.init_distributed()
    torch.manual_seed(trireme.comm.get_rank())
    encoder, *_ = trireme.initialize(model=nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4)), config=config(3, 3e-3))
    decoder, *_ = trireme.initialize(model=nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 32)), config=config(2, 1e-3))
    basis = torch.randn(4, 32, generator=torch.Generator().manual_seed(5))
    for step in range(1, 201):
        x = (torch.randn(16, 4) @ basis).to(encoder.device)  # 32 numbers that 4 explain
        loss = nn.functional.mse_loss(decoder(encoder(x)), x)
        loss.backward()  # one backward pass through both
        encoder.step()
        decoder.step()
        if encoder.global_rank == 0 and step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    encoder.save_checkpoint("checkpoints/encoder")
    decoder.save_checkpoint("checkpoints/decoder")


if __name__ == "__main__":
    main()
