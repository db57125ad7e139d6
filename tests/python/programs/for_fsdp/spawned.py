"""Starts its ranks itself, by torch.multiprocessing, and trains with torch's names of FSDP in them.

    spawned.py METHOD        spawn, or Process of the method spawn or forkserver
"""
import os
import socket
import sys

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


def of(name):
    return fully_shard.__module__.partition(".")[0] + " " + FullyShardedDataParallel.__module__.partition(".")[0] + " " + name


def train(rank, size, port):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.full((2, 4), rank + 1.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = model.weight.full_tensor()
    print(of(f"rank {rank}: {weight.flatten().tolist()}"), flush=True)
    dist.barrier()


if __name__ == "__main__":
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    print(of("program"), flush=True)
    if sys.argv[1] == "spawn":
        multiprocessing.spawn(train, args=(2, number), nprocs=2)
    else:
        started = [multiprocessing.get_context(sys.argv[1].removeprefix("process-")).Process(target=train, args=(rank, 2, number)) for rank in range(2)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        sys.exit(max(process.exitcode for process in started))
