"""Step time of a Llama in two pipeline stages, interleaved in one run: Trireme beside torch.distributed.pipelining,
DeepSpeed, one rank.

  pipeline_peers_bench.py [--systems one,trireme,trireme-zb,torch,deepspeed] [--micro-batches 8] [--rounds 3] [--steps
  3] [--smoke]

Two processes of one thread each; "one" is plain PyTorch on one. All cut llama-130m at the same layer, run 1F1B over
micro-batches of one sample ("trireme-zb" ZB-H1), clip gradients by the norm of the whole model and update with AdamW.
DeepSpeed takes part where it can be imported.
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

from torch_peers import ADAMW, SHAPE, SMALL, PeerFailed, make_llama, run_ranks

ROOT = pathlib.Path(__file__).resolve().parent.parent


def make_halves(torch, shape):
    """The model's two stages, of equal multiply-adds, as modules of one tensor; and their loss."""
    model, blocks = make_llama(torch, shape)
    block = 4 * shape["hidden"] ** 2 + 3 * shape["hidden"] * shape["inner"] + 2 * shape["hidden"] * shape["length"]
    head = shape["vocabulary"] * shape["hidden"] / block
    first = min(range(1, len(blocks)), key=lambda count: max(count, len(blocks) - count + head))
    halves = [torch.nn.Sequential(model.embedding, *blocks[:first]), torch.nn.Sequential(*blocks[first:], model.norm, model.output)]

    def loss(logits, targets):
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    return halves, loss


def make_one(torch, shape, micro_batches):
    (first, second), loss_of = make_halves(torch, shape)
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.AdamW(parameters, fused=True, **ADAMW)

    def step(inputs, targets):
        for x, y in zip(inputs.split(1), targets.split(1)):
            (loss_of(second(first(x)), y) / micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def make_torch(torch, shape, micro_batches):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    rank = torch.distributed.get_rank()
    halves, loss_of = make_halves(torch, shape)
    tokens = torch.zeros(1, shape["length"], dtype=torch.long)
    hidden, logits = (torch.zeros(1, shape["length"], width) for width in (shape["hidden"], shape["vocabulary"]))
    stage = PipelineStage(halves[rank], rank, 2, torch.device("cpu"), input_args=(hidden if rank else tokens,),
                          output_args=(logits if rank else hidden,))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=loss_of)
    parameters = list(halves[rank].parameters())
    optimizer = torch.optim.AdamW(parameters, fused=True, **ADAMW)

    def step(inputs, targets):
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=[])
        squares = torch.nn.utils.get_total_norm([each.grad for each in parameters]) ** 2
        torch.distributed.all_reduce(squares)
        torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, squares.sqrt())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def make_deepspeed(torch, shape, micro_batches):
    import deepspeed
    from deepspeed.pipe import PipelineModule
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    halves, loss_of = make_halves(torch, shape)
    module = PipelineModule(layers=halves, num_stages=2, loss_fn=loss_of, partition_method="uniform")
    optimizer = torch.optim.AdamW(module.parameters(), fused=True, **ADAMW)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches, "gradient_clipping": 1.0,
              "zero_allow_untested_optimizer": True}
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]

    def step(inputs, targets):
        engine.train_batch(iter(zip(inputs.split(1), targets.split(1))))

    return step


MAKERS = {"one": make_one, "torch": make_torch, "deepspeed": make_deepspeed}


def run_rank(case):
    import torch
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    shape = SMALL if case["smoke"] else SHAPE
    step = MAKERS[case["system"]](torch, shape, case["micro_batches"])
    tokens = torch.randint(shape["vocabulary"], (case["micro_batches"], shape["length"] + 1))
    seconds = []
    for _ in range(1 + case["steps"]):
        torch.distributed.barrier()
        start = time.perf_counter()
        step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        torch.distributed.barrier()
        seconds.append(time.perf_counter() - start)
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"seconds": seconds[1:]}), flush=True)
    torch.distributed.destroy_process_group()


SCHEDULES = {"trireme": "1f1b", "trireme-zb": "zb-h1"}


def run_trireme(case, build):
    command = [str(build / "benchmarks/pipeline_bench"), "--micro-batches", str(case["micro_batches"]), "--schedules", SCHEDULES[case["system"]],
               "--steps", str(case["steps"]), "--json", *(["--smoke"] if case["smoke"] else [])]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="one,trireme,trireme-zb,torch,deepspeed")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
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
    seconds = {system: [] for system in systems}
    for _ in range(arguments.rounds):
        for system in list(systems):
            case = dict(system=system, micro_batches=arguments.micro_batches, steps=arguments.steps, smoke=arguments.smoke)
            try:
                row = (run_trireme(case, arguments.build) if system in SCHEDULES
                       else run_ranks(__file__, case, 1 if system == "one" else 2))
                seconds[system] += row["seconds"]
            except (PeerFailed, subprocess.TimeoutExpired) as error:
                print(f"{system} does not run here and is left out: {error}", flush=True)
                systems.remove(system)
    first = seconds[systems[0]]
    for system in systems:
        print(f"{system:10}  min {1e3 * min(seconds[system]):8.1f} ms  median {1e3 * statistics.median(seconds[system]):8.1f} ms  "
              f"{min(first) / min(seconds[system]):5.2f} times as fast as {systems[0]}", flush=True)
    return 0 if SCHEDULES.keys() & systems else 1


if __name__ == "__main__":
    sys.exit(main())
