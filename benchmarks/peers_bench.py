"""Step time and memory of data-parallel systems on one Llama, interleaved in one run: Trireme beside DDP, FSDP2 and DeepSpeed.

  peers_bench.py [--systems nocomm,zero3,ddp,fsdp2,deepspeed] [--dtypes fp32,bf16] [--rounds 3] [--steps 6] [--memory] [--smoke]

nocomm and zero3 are train_bench's llama-130m (two C++ ranks that exchange nothing, and Trireme). The others train the same
shape from PyTorch: ranks, threads, batch, AdamW and clipping are alike. DeepSpeed takes part where it can be imported.
--memory polls the proportional set size instead, peak above what it was before the model was built; its times do not count.
"""
import argparse
import importlib.util
import json
import math
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHAPE = dict(vocabulary=32000, hidden=768, inner=2048, layers=12, heads=12, length=128)
SMALL = dict(vocabulary=64, hidden=32, inner=64, layers=2, heads=2, length=16)
ADAMW = dict(lr=3e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
WARM_UP = 3


def make_llama(torch, shape):
    """Untied Llama with RMSNorm, rotary embeddings and SwiGLU; returns (model, list of blocks)."""
    nn, functional = torch.nn, torch.nn.functional
    head = shape["hidden"] // shape["heads"]
    angles = torch.outer(torch.arange(shape["length"]), 1e4 ** (-torch.arange(0, head, 2) / head)).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()

    def rotate(x):
        a, b = x.chunk(2, -1)
        return x * cos.to(x.dtype) + torch.cat((-b, a), -1) * sin.to(x.dtype)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            hidden, inner = shape["hidden"], shape["inner"]
            self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=1e-6) for _ in range(2))
            self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
            self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
            self.down = nn.Linear(inner, hidden, bias=False)

        def forward(self, x):
            y = self.norms[0](x)
            q, k, v = (w(y).view(*y.shape[:2], -1, head).transpose(1, 2) for w in (self.q, self.k, self.v))
            y = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
            x = x + self.o(y.transpose(1, 2).flatten(2))
            y = self.norms[1](x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(shape["vocabulary"], shape["hidden"])
            self.blocks = nn.ModuleList(Block() for _ in range(shape["layers"]))
            self.norm = nn.RMSNorm(shape["hidden"], eps=1e-6)
            self.output = nn.Linear(shape["hidden"], shape["vocabulary"], bias=False)

        def forward(self, tokens, targets):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            logits = self.output(self.norm(x)).float()
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    torch.manual_seed(1234)
    model = Llama()
    return model, list(model.blocks)


def torch_step(torch, module, parameters, masters):
    """AdamW on `parameters`, or on fp32 `masters` of them."""
    optimizer = torch.optim.AdamW(masters or parameters, fused=True, **ADAMW)

    def step(tokens, targets):
        loss = module(tokens, targets)
        loss.backward()
        for master, parameter in zip(masters or (), parameters):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters or parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)
        return loss.item()

    return step


def make_ddp(torch, shape, bf16):
    model, _ = make_llama(torch, shape)
    model = model.bfloat16() if bf16 else model
    parameters = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in parameters] if bf16 else None
    return torch_step(torch, torch.nn.parallel.DistributedDataParallel(model), parameters, masters)


def make_fsdp2(torch, shape, bf16):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    model, blocks = make_llama(torch, shape)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if bf16 else MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in [*blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return torch_step(torch, model, list(model.parameters()), None)


def make_deepspeed(torch, shape, bf16):
    import deepspeed
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    model, _ = make_llama(torch, shape)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "bf16": {"enabled": bf16},
              "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(tokens, targets):
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


MAKERS = {"ddp": make_ddp, "fsdp2": make_fsdp2, "deepspeed": make_deepspeed}


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
    step = MAKERS[case["system"]](torch, shape, case["dtype"] == "bf16")
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
        print(json.dumps({"seconds": seconds, "pss_mib": peak_mib[0] - start_mib if case["memory"] else 0}), flush=True)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class PeerFailed(Exception):
    pass


def run_peer(case):
    """What rank 0 of two processes of this script printed."""
    environment = dict(os.environ, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1",
                       MASTER_PORT=str(free_port()), DS_ACCELERATOR="cpu", PYTHONWARNINGS="ignore", GLOO_SOCKET_IFNAME="lo",
                       PATH=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"])  # ninja, for DeepSpeed
    command = [sys.executable, __file__, "--rank-of", json.dumps(case)]
    with tempfile.TemporaryFile("w+") as log:  # the peers' many warnings are shown only where one failed
        ranks = [subprocess.Popen(command, env=dict(environment, RANK=str(rank), LOCAL_RANK=str(rank)),
                                  stdout=subprocess.PIPE, stderr=log, text=True) for rank in range(2)]
        outputs = [rank.communicate(timeout=900)[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            log.seek(0)
            raise PeerFailed(f"exit statuses {[rank.returncode for rank in ranks]}\n{log.read()[-2000:]}")
    return next(json.loads(line) for line in outputs[0].splitlines() if line.startswith('{"seconds"'))


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
                    results[system].append(run_peer(case) if system in MAKERS else run_trireme(case, arguments.build))
                except PeerFailed as error:
                    failed = True
                    print(f"{dtype}  {system:10}  failed: {error}", flush=True)
        base = min((second for row in results[systems[0]] for second in row["seconds"]), default=math.nan)
        for system, rows in results.items():
            if not rows:
                continue
            seconds = [second for row in rows for second in row["seconds"]]
            memory = f"  {max(row['pss_mib'] for row in rows):6.0f} MiB PSS" if arguments.memory else ""
            print(f"{dtype}  {system:10}  min {1e3 * min(seconds):8.1f} ms  median {1e3 * statistics.median(seconds):8.1f} ms"
                  f"  {min(seconds) / base:5.2f} x {systems[0]}{memory}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
