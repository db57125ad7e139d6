"""Step time and memory of Python programs, interleaved in one run: Trireme's package beside plain PyTorch, DDP, FSDP2,
DeepSpeed.

  python_bench.py [--systems nocomm,trireme,as_fsdp,ddp,fsdp2,deepspeed] [--models llama-130m,llama-9m,tiny64] [--dtypes
  fp32,bf16]
                  [--ranks 2] [--rounds 3] [--steps 10] [--memory] [--smoke]

as_fsdp is fsdp2's program with trireme.fsdp's names. nocomm is plain PyTorch whose ranks exchange nothing; with --ranks
1 it is one-process training. All sharded systems run ZeRO stage 3 (FSDP2's full sharding). Model, batch per rank,
threads (one), AdamW and clipping are alike. DeepSpeed and Trireme take part where they can be imported
(PYTHONPATH=build/release/python). --memory polls the proportional set size instead, peak above what it was before the
model was built; its times do not count.
"""
import argparse
import importlib.util
import json
import math
import statistics
import sys
import threading
import time

from peers_bench import pss_mib
from torch_peers import MAKERS, MODELS, PeerFailed, make_as_fsdp, make_batch, make_nocomm, make_trireme, run_ranks

WARM_UP = 3
SYSTEMS = {"nocomm": make_nocomm, "trireme": make_trireme, "as_fsdp": make_as_fsdp, **MAKERS}
SAMPLES = {"tiny64": 16, "llama-9m": 2}  # per rank; 1 of the others


def run_rank(case):
    """One rank; rank 0 prints what it measured."""
    import torch
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    shape, bf16 = MODELS[case["model"]], case["dtype"] == "bf16"
    start_mib, peak_mib, done = pss_mib(), [0.0], threading.Event()

    def poll():
        while not done.wait(0.01):
            peak_mib[0] = max(peak_mib[0], pss_mib())

    torch.distributed.barrier()
    if case["memory"]:
        threading.Thread(target=poll, daemon=True).start()
    step = SYSTEMS[case["system"]](torch, shape, bf16).step
    seconds, loss = [], 0.0
    for index in range(WARM_UP + case["steps"]):
        batch = make_batch(torch, shape, index, SAMPLES.get(case["model"], 1), bf16)
        torch.distributed.barrier()
        start = time.perf_counter()
        loss = step(*batch)
        if index >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    torch.distributed.barrier()
    done.set()
    if torch.distributed.get_rank() == 0:
        pss = peak_mib[0] - start_mib if case["memory"] else 0
        print(json.dumps({"seconds": seconds, "pss_mib": pss, "loss": loss}), flush=True)
    torch.distributed.destroy_process_group()


def report(title, results, memory):
    base = min((second for row in next(iter(results.values())) for second in row["seconds"]), default=math.nan)
    middle = statistics.median([second for row in next(iter(results.values())) for second in row["seconds"]] or [math.nan])
    for system, rows in results.items():
        if not rows:
            continue
        seconds = [second for row in rows for second in row["seconds"]]
        pss = f"  {max(row['pss_mib'] for row in rows):6.0f} MiB PSS" if memory else ""
        print(f"{title}  {system:10}  min {1e3 * min(seconds):8.2f} ms  median {1e3 * statistics.median(seconds):8.2f} ms  "
              f"{min(seconds) / base:5.2f} / {statistics.median(seconds) / middle:5.2f} x {next(iter(results))}  "
              f"loss {rows[0]['loss']:.5f}{pss}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="nocomm,trireme,as_fsdp,ddp,fsdp2,deepspeed")
    parser.add_argument("--models", default="llama-130m,llama-9m,tiny64")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="a tiny model in bf16, once")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        return run_rank(json.loads(arguments.rank_of))
    systems = arguments.systems.split(",")
    for system, package in (("deepspeed", "deepspeed"), ("trireme", "trireme"), ("as_fsdp", "trireme")):
        if system in systems and importlib.util.find_spec(package) is None:
            print(f"{system} cannot be imported: left out")
            systems.remove(system)
    if arguments.smoke:
        arguments.models, arguments.dtypes, arguments.rounds, arguments.steps = "small", "bf16", 1, 1
    failed = False
    for model in arguments.models.split(","):
        for dtype in arguments.dtypes.split(","):
            results = {system: [] for system in systems}
            for _ in range(arguments.rounds):
                for system in systems:
                    case = dict(system=system, model=model, dtype=dtype, steps=arguments.steps, memory=arguments.memory)
                    try:
                        results[system].append(run_ranks(__file__, case, arguments.ranks))
                    except PeerFailed as error:
                        failed = True
                        print(f"{model} {dtype}  {system:10}  failed: {error}", flush=True)
            report(f"{model} {dtype}", results, arguments.memory)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
