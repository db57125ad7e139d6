"""The rows of comm_bench.cpp for Gloo (torch.distributed of the same wheel): [--ranks N] [--repetitions R] [--smoke].

Prints one JSON line: {"system": "gloo", "rows": [{"operation", "bytes", "seconds": [...]}]}.
"""
import argparse
import json
import os
import time


def measure(dist, operation, nbytes, repetitions, run):
    calls = 100 if nbytes <= 64 << 10 else 10 if nbytes <= 4 << 20 else 1
    for _ in range(min(calls, 5)):
        run()
    seconds = []
    for _ in range(repetitions):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        seconds.append((time.perf_counter() - start) / calls)
    return {"operation": operation, "bytes": nbytes, "seconds": seconds}


def run_rank(rank, arguments):
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=arguments.ranks)
    rows = [measure(dist, "barrier", 0, arguments.repetitions, dist.barrier)]
    for nbytes in (4 << 10, 256 << 10, 4 << 20, 64 << 20):
        if arguments.smoke and nbytes > 256 << 10:
            break
        whole = torch.ones(nbytes // 4)
        shards = list(whole.chunk(arguments.ranks))
        own = shards[rank].clone()
        cases = {
            "all_gather": lambda: dist.all_gather(shards, own),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, whole),
            "all_reduce": lambda: dist.all_reduce(whole, dist.ReduceOp.MAX),
            "broadcast": lambda: dist.broadcast(whole, 0),
        }
        rows += [measure(dist, name, nbytes, arguments.repetitions, run) for name, run in cases.items()]
    if rank == 0:
        print(json.dumps({"system": "gloo", "ranks": arguments.ranks, "rows": rows}), flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="everything once, up to 256 KiB")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.repetitions = 1
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 12000))
    import torch.multiprocessing
    torch.multiprocessing.spawn(run_rank, args=(arguments,), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
