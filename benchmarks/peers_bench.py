"""Step time and memory of data-parallel systems on one Llama, interleaved in one run: Trireme beside DDP, FSDP2 and
DeepSpeed.

  peers_bench.py [--systems nocomm,zero3,ddp,fsdp2,deepspeed] [--dtypes fp32,bf16] [--rounds 3] [--steps 6] [--memory]
  [--smoke]

nocomm and zero3 are train_bench's llama-130m (two C++ ranks that exchange nothing, and Trireme). The others train the
same shape from PyTorch: ranks, threads, batch, AdamW and clipping are alike. DeepSpeed takes part where it can be
imported. --memory polls the proportional set size instead, peak above what it was before the model was built; its times
do not count.
"""
import argparse
import importlib.util
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time

from torch_peers import MAKERS, SHAPE, SMALL, PeerFailed, run_ranks

ROOT = pathlib.Path(__file__).resolve().parent.parent
WARM_UP = 3


def pss_mib():
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) / 1024 for line in rollup if line.startswith("Pss:"))


def run_rank(case):
    """One rank of a PyTorch system; rank 0 prints what train_bench's rank 0 prints."""
    import torch
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    shape = SMALL if case["smoke"] else SHAPE
    start_mib, peak_mib, done = pss_mib(), [0.0], threading.Event()

    def poll():
        while not done.wait(0.01):
            peak_mib[0] = max(peak_mib[0], pss_mib())

    poller = threading.Thread(target=poll, daemon=True)
    torch.distributed.barrier()
    if case["memory"]:
        poller.start()
    step = MAKERS[case["system"]](torch, shape, case["dtype"] == "bf16").step
    seconds, rank = [], torch.distributed.get_rank()
    for index in range(WARM_UP + case["steps"]):
        generator = torch.Generator().manual_seed(9000 + index % 4)
        tokens = torch.randint(shape["vocabulary"], (2, shape["length"] + 1), generator=generator)[rank:rank + 1]
        torch.distributed.barrier()
        start = time.perf_counter()
        step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        if index >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    torch.distributed.barrier()
    done.set()
    if rank == 0:
        print(json.dumps({"seconds": seconds, "mib": peak_mib[0] - start_mib if case["memory"] else 0}), flush=True)
    torch.distributed.destroy_process_group()


def run_trireme(case, build):
    model = "tiny64" if case["smoke"] else "llama-130m"
    command = [str(build / "benchmarks/train_bench"), "--models", model, "--dtypes", case["dtype"], "--systems", case["system"],
               "--rounds", "1", "--steps", str(case["steps"]), "--json", *(["--memory"] if case["memory"] else [])]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="nocomm,zero3,ddp,fsdp2,deepspeed")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, once")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / os.environ.get("PRESET", "release"))
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        return run_rank(json.loads(arguments.rank_of))
    systems = arguments.systems.split(",")
    if "deepspeed" in systems and importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is not installed (pip install deepspeed): left out")
        systems.remove("deepspeed")
    if arguments.smoke:
        arguments.rounds = arguments.steps = 1
    failed = False
    for dtype in arguments.dtypes.split(","):
        results = {system: [] for system in systems}
        for _ in range(arguments.rounds):
            for system in systems:
                case = dict(system=system, dtype=dtype, steps=arguments.steps, memory=arguments.memory, smoke=arguments.smoke)
                try:
                    results[system].append(run_ranks(__file__, case) if system in MAKERS else run_trireme(case, arguments.build))
                except PeerFailed as error:
                    failed = True
                    print(f"{dtype}  {system:10}  failed: {error}", flush=True)
        base = min((second for row in results[systems[0]] for second in row["seconds"]), default=math.nan)
        for system, rows in results.items():
            if not rows:
                continue
            seconds = [second for row in rows for second in row["seconds"]]
            memory = f"  {max(row['mib'] for row in rows):6.0f} MiB PSS" if arguments.memory else ""
            print(f"{dtype}  {system:10}  min {1e3 * min(seconds):8.1f} ms  median {1e3 * statistics.median(seconds):8.1f} ms"
                  f"  {min(seconds) / base:5.2f} x {systems[0]}{memory}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
