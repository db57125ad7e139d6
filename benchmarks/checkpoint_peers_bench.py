"""Saving and loading the training state of one Llama on two ranks, interleaved in one run: Trireme beside plain writes
and reads, torch.save, PyTorch DCP (FSDP2) and DeepSpeed.

  checkpoint_peers_bench.py [--systems trireme,torch,dcp,dcp_async,deepspeed1,deepspeed3] [--rounds 3] [--dir FOLDER]
  [--smoke]

trireme stands for all ways of checkpoint_bench, which says what they are. The others hold the same shape in PyTorch,
fp32 with AdamW's moments. save: the call; save+sync: until fsync of every file (DeepSpeed and torch.save leave that
out); load: from the page cache; blocked: what an asynchronous call keeps training from. DeepSpeed takes part where it
can be imported, DCP where numpy can.
"""
import argparse
import importlib.util
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from torch_peers import SHAPE, SMALL, PeerFailed, make_deepspeed, make_fsdp2, make_ddp, run_ranks

ROOT = pathlib.Path(__file__).resolve().parent.parent


def sync(folder):
    for file in pathlib.Path(folder).rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())


def torch_ways(torch, shape, folder):
    """One file by rank 0; every rank reads it."""
    peer = make_ddp(torch, shape, False)
    rank, file = torch.distributed.get_rank(), os.path.join(folder, "all.pt")

    def save():
        if rank == 0:
            torch.save({"model": peer.module.state_dict(), "optimizer": peer.optimizer.state_dict()}, file)

    def load():
        state = torch.load(file, map_location="cpu", weights_only=True)
        peer.module.load_state_dict(state["model"])
        peer.optimizer.load_state_dict(state["optimizer"])

    return peer, save, load


def dcp_ways(torch, shape, folder, asynchronous=None):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    peer = make_fsdp2(torch, shape, False)

    def state():
        model, optimizer = get_state_dict(peer.module, peer.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save():
        if asynchronous is None:
            return dcp.save(state(), checkpoint_id=folder)
        start = time.perf_counter()
        pending = dcp.async_save(state(), checkpoint_id=folder)
        asynchronous.append(time.perf_counter() - start)
        return pending.result()

    def load():
        loaded = state()
        dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(peer.module, peer.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])

    return peer, save, load


def deepspeed_ways(torch, shape, folder, stage):
    peer = make_deepspeed(torch, shape, False, stage)

    def load():
        if not peer.engine.load_checkpoint(folder, tag="t")[0]:
            raise RuntimeError("DeepSpeed found nothing to load")

    return peer, lambda: peer.engine.save_checkpoint(folder, tag="t"), load


def run_rank(case):
    import torch
    torch.set_num_threads(1)
    torch.distributed.init_process_group("cpu:gloo" if case["system"] == "dcp_async" else "gloo")
    rank, shape, folder, blocked = torch.distributed.get_rank(), SMALL if case["smoke"] else SHAPE, case["folder"], []
    peer, save, load = {
        "torch": lambda: torch_ways(torch, shape, folder),
        "dcp": lambda: dcp_ways(torch, shape, folder),
        "dcp_async": lambda: dcp_ways(torch, shape, folder, blocked),
        "deepspeed1": lambda: deepspeed_ways(torch, shape, folder, 1),
        "deepspeed3": lambda: deepspeed_ways(torch, shape, folder, 3),
    }[case["system"]]()
    tokens = torch.randint(shape["vocabulary"], (1, shape["length"] + 1))
    peer.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def timed(work):
        torch.distributed.barrier()
        start = time.perf_counter()
        work()
        torch.distributed.barrier()
        return time.perf_counter() - start

    row = {"save": timed(save)}
    row["save+sync"] = row["save"] + timed(lambda: rank == 0 and sync(folder))
    if blocked:
        row["blocked"] = blocked[0]
    row["load"] = timed(load)
    if rank == 0:
        files = [file for file in pathlib.Path(folder).rglob("*") if file.is_file()]
        print(json.dumps({"seconds": row, "bytes": sum(file.stat().st_size for file in files)}), flush=True)
    torch.distributed.destroy_process_group()


def run_trireme(arguments, folder):
    """{way: seconds} of one round of checkpoint_bench."""
    command = [str(arguments.build / "benchmarks/checkpoint_bench"), "--rounds", "1", "--dir", str(folder), "--json",
               *(["--model", "llama-9m"] if arguments.smoke else [])]
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return result["bytes"], {way: row["seconds"][0] for way, row in result["ways"].items()}


def add(results, system, size, seconds):
    for way, value in seconds.items():
        results.setdefault((system, way), (size, []))[1].append(value)


def one_round(arguments, systems, results):
    """True when every system came to its end."""
    well = True
    for system in systems:
        folder = arguments.dir / system
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            if system == "trireme":
                add(results, system, *run_trireme(arguments, folder))
            else:
                row = run_ranks(__file__, dict(system=system, folder=str(folder), smoke=arguments.smoke))
                add(results, system, row["bytes"], row["seconds"])
        except PeerFailed as error:
            well = False
            print(f"{system:12} failed: {error}", flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return well


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="trireme,torch,dcp,dcp_async,deepspeed1,deepspeed3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=pathlib.Path, default=None, help="where the files go (default: a temporary folder)")
    parser.add_argument("--smoke", action="store_true", help="a small model, once")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / os.environ.get("PRESET", "release"))
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        return run_rank(json.loads(arguments.rank_of))
    systems = arguments.systems.split(",")
    for package, prefix in (("deepspeed", "deepspeed"), ("numpy", "dcp")):  # torch's object collectives need numpy
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed (pip install {package}): {prefix} is left out")
            systems = [system for system in systems if not system.startswith(prefix)]
    results, well = {}, True
    with tempfile.TemporaryDirectory() as temporary:
        arguments.dir = arguments.dir or pathlib.Path(temporary)
        for _ in range(1 if arguments.smoke else arguments.rounds):
            well = one_round(arguments, systems, results) and well
    print(f"{'system':12} {'way':11} {'GB':>5} {'min s':>8} {'median':>8} {'GB/s (median)':>14}")
    for (system, way), (size, seconds) in results.items():
        median = statistics.median(seconds)
        print(f"{system:12} {way:11} {size / 1e9:5.2f} {min(seconds):8.3f} {median:8.3f} {size / 1e9 / median:14.2f}", flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
