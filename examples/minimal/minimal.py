"""The twin of main.cpp: the same model, data and configuration, and the same losses, bit for bit.

    trireme launch --num_gpus 2 python minimal.py
"""
import torch

import trireme

trireme.init_distributed()                    # ranks from `trireme launch`, torchrun, mpirun or srun; without them, one
rank = trireme.comm.get_rank()
torch.manual_seed(rank)                       # every rank draws its own data; rank 0's weights become everybody's
net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
engine, *_ = trireme.initialize(model=net, config="ds_config.json")
for step in range(1, 201):
    inputs = torch.randn(16, 8).to(engine.device)
    loss = torch.nn.functional.mse_loss(engine(inputs), inputs.sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
    if rank == 0 and step % 50 == 0:
        print(f"step {step} loss {loss.item():.6g}")
engine.save_checkpoint("checkpoints")
