"""Training on one GPU, interleaved in one run: Trireme from C++ and from Python beside plain libtorch, PyTorch, FSDP2
and DeepSpeed.

  gpu_bench.py [--models llama-1b,mlp1024] [--systems nocomm,zero3,offload,plain,trireme,fsdp2,deepspeed] [--dtype bf16]
               [--samples 1] [--length 4096] [--rounds 3] [--steps 10] [--profile] [--undecided] [--smoke]

nocomm (plain libtorch), zero3 and offload are train_bench's, in C++. The others train the same shape from PyTorch:
plain, Trireme and DeepSpeed at ZeRO stage 3, FSDP2 with `fully_shard` on each block, all eager, with AdamW and
clipping. A round's steps follow one another and its end alone is waited for. Memory is the most that the allocator gave
out, after 10 steps and at the end: --steps 1000 shows whether it grows. --profile adds the share of the steps in which
no kernel and no copy ran. Without a GPU there is nothing to measure: --smoke then runs the PyTorch systems that can on
the host, once, for their code alone.
"""
import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

from torch_peers import ADAMW, PeerFailed, make_batch, make_model, run_ranks, torch_peer

ROOT = pathlib.Path(__file__).resolve().parent.parent
WARM_UP = 3
IN_CPP = ("nocomm", "zero3", "offload", "offloadparam")
MODELS = {"llama-1b": dict(vocabulary=128256, hidden=2048, inner=8192, layers=16, heads=32, kv_heads=8, tied=True, theta=5e5),
          "mlp1024": dict(width=1024, layers=64, samples=8),
          "small": dict(vocabulary=64, hidden=32, inner=64, layers=2, heads=2, kv_heads=1, tied=True, theta=1e4)}


def make_plain(torch, case, shape, device):
    model, _ = make_model(torch, shape)
    model = model.to(device)
    bf16 = case["dtype"] == "bf16"
    model = model.bfloat16() if bf16 else model
    parameters = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in parameters] if bf16 else None
    return torch_peer(torch, model, parameters, masters, clips=not case["undecided"], reads_loss=False).step


def make_fsdp2(torch, case, shape, device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model, blocks = make_model(torch, shape)
    model = model.to(device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case["dtype"] == "bf16" else MixedPrecisionPolicy()
    mesh = init_device_mesh(device.type, (1,))
    for module in [*blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return torch_peer(torch, model, list(model.parameters()), None, clips=not case["undecided"], reads_loss=False).step


def make_engine(torch, case, shape, device, package):
    package.init_distributed()
    model, _ = make_model(torch, shape)
    model = model.to(device)
    bf16 = case["dtype"] == "bf16"
    config = {"train_micro_batch_size_per_gpu": shape.get("samples", case["samples"]),
              "gradient_clipping": 0.0 if case["undecided"] else 1.0,
              "bf16": {"enabled": bf16, "check_grad_overflow": not case["undecided"]}, "zero_optimization": {"stage": 3},
              "data_types": {"grad_accum_dtype": "fp32"},
              "optimizer": {"type": "AdamW", "params": dict(ADAMW, betas=list(ADAMW["betas"]))}}
    engine = package.initialize(model=model, config=config)[0]

    def step(inputs, targets):
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def make_trireme(torch, case, shape, device):
    import trireme
    return make_engine(torch, case, shape, device, trireme)


def make_deepspeed(torch, case, shape, device):
    import deepspeed
    return make_engine(torch, case, shape, device, deepspeed)


IN_PYTHON = {"plain": make_plain, "trireme": make_trireme, "fsdp2": make_fsdp2, "deepspeed": make_deepspeed}


def idle_share(torch, run):
    """The share of `run` in which the GPU did nothing, between the first and the last thing that it did."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    spans = sorted((event.time_range.start, event.time_range.end) for event in profile.events()
                   if event.device_type == torch.autograd.DeviceType.CUDA)
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1 - busy / (end - spans[0][0])


def run_rank(case):
    """One system of PyTorch; prints what train_bench's rank 0 prints."""
    import torch
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    shape = dict(MODELS[case["model"]], length=case["length"])
    step = IN_PYTHON[case["system"]](torch, case, shape, device)
    samples = shape.get("samples", case["samples"])
    batches = [tuple(part.to(device) for part in make_batch(torch, shape, index, samples, case["dtype"] == "bf16"))
               for index in range(4)]
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    peak_mib = (lambda: torch.cuda.max_memory_allocated() / 2**20) if on_gpu else (lambda: 0.0)
    for index in range(WARM_UP):
        step(*batches[index % 4])
    wait()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    after_10, start = 0.0, time.perf_counter()
    for index in range(case["steps"]):
        loss = step(*batches[index % 4])
        after_10 = peak_mib() if index == 9 else after_10
    wait()
    row = dict(seconds=[(time.perf_counter() - start) / case["steps"]], mib=peak_mib(), mib_after_10=after_10, loss=float(loss))
    if case["profile"] and on_gpu:
        row["idle"] = idle_share(torch, lambda: [step(*batches[index % 4]) for index in range(5)])
    print(json.dumps(row), flush=True)


def run_cpp(case, build):
    command = [str(build / "benchmarks/train_bench"), "--models", case["model"], "--dtypes", case["dtype"], "--systems", case["system"],
               "--device", "cuda", "--ranks", "1", "--rounds", "1", "--steps", str(case["steps"]), "--threads", str(os.cpu_count()),
               "--samples", str(case["samples"]), "--length", str(case["length"]), "--json",
               *(["--undecided"] if case["undecided"] else [])]
    try:
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    except subprocess.CalledProcessError as error:
        raise PeerFailed(error) from error


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-1b,mlp1024")
    parser.add_argument("--systems", default="nocomm,zero3,plain,trireme,fsdp2,deepspeed")
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "bf16"))
    parser.add_argument("--samples", type=int, default=1, help="of a Llama's step")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="the share in which the GPU is idle, of the systems in Python")
    parser.add_argument("--undecided", action="store_true", help="no clipping, no look for overflows")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, once, on the host where there is no GPU")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / os.environ.get("PRESET", "release"))
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    return parser.parse_args()


def has_gpu():
    import torch
    return torch.cuda.is_available()


def main():
    arguments = parse()
    if arguments.rank_of:
        return run_rank(json.loads(arguments.rank_of))
    systems = arguments.systems.split(",")
    for kind, given, known in (("system", systems, [*IN_CPP, *IN_PYTHON]), ("model", arguments.models.split(","), MODELS)):
        for name in set(given) - set(known):
            print(f"gpu_bench: there is no {kind} {name}; there are {', '.join(known)}")
            return 2
    if "deepspeed" in systems and importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is not installed (pip install deepspeed): left out")
        systems.remove("deepspeed")
    if not has_gpu():
        if not arguments.smoke:
            print("gpu_bench: there is no GPU, and nothing to measure")
            return 0
        print("there is no GPU: only the code of the systems in Python is run, on the host")
        systems = [s for s in systems if s not in IN_CPP]
    if arguments.smoke:
        arguments.models, arguments.rounds, arguments.steps, arguments.length = "small", 1, 1, 16
    if not systems:
        print("gpu_bench: no system is left to run")
        return 2
    failed = False
    print(f"{'model':9} {'system':12} {'min ms':>9} {'median':>9} {'/ first':>8} {'samples/s':>10} {'MiB':>8} {'after 10':>8}  idle")
    for model in arguments.models.split(","):
        rows = {system: [] for system in systems}
        for _ in range(arguments.rounds):
            for system in systems:
                case = dict(system=system, model=model, dtype=arguments.dtype, samples=arguments.samples, length=arguments.length,
                            steps=arguments.steps, profile=arguments.profile, undecided=arguments.undecided, gpu=True)
                try:
                    rows[system].append(run_cpp(case, arguments.build) if system in IN_CPP else run_ranks(__file__, case, 1))
                except PeerFailed as error:
                    failed = True
                    print(f"{model:9} {system:12} failed: {error}", flush=True)
        first = min((row["seconds"][0] for row in rows[systems[0]]), default=float("nan"))
        samples = MODELS[model].get("samples", arguments.samples)
        for system, measured in rows.items():
            if measured:
                print_row(model, system, measured, first, samples)
    return 1 if failed else 0


def print_row(model, system, measured, first, samples):
    seconds = [row["seconds"][0] for row in measured]
    idle = [f"{100 * row['idle']:.1f} %" for row in measured if "idle" in row]
    print(f"{model:9} {system:12} {1e3 * min(seconds):9.2f} {1e3 * statistics.median(seconds):9.2f} {min(seconds) / first:8.2f}"
          f" {samples / min(seconds):10.2f} {max(row['mib'] for row in measured):8.0f}"
          f" {max(row['mib_after_10'] for row in measured):8.0f}  {' '.join(idle)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
