"""Step time of a Llama whose stages own parts of it (trireme.smp), interleaved in one run beside the same cut as a
PipelineModule, torch.distributed.pipelining and one rank; and what a layer of another stage costs.

  smp_bench.py [--systems one,smp,module,torch] [--micro-batches 8] [--rounds 3] [--steps 3] [--tied] [--smoke]
  smp_bench.py --layer [--static-mode] [--rounds 3] [--smoke]

Two processes of one thread each; "one" is plain PyTorch on one. All train llama-130m, cut at the same layer, under 1F1B
over micro-batches of one sample, and update with AdamW; none clips gradients. --layer: the host's time for one layer of
transformers' Llama and one micro-batch on the stage that has none of its parameters, forward; with --static-mode under
smp's `static_mode`.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import pipeline_peers_bench as peers
from torch_peers import ADAMW, SHAPE, SMALL, PeerFailed, make_llama, run_ranks


def head_of(shape):
    """The cost of the head, in blocks."""
    block = 4 * shape["hidden"] ** 2 + 3 * shape["hidden"] * shape["inner"] + 2 * shape["hidden"] * shape["length"]
    return shape["vocabulary"] * shape["hidden"] / block


def first_of(shape, blocks):
    """How many of so many blocks are on the first stage, as peers.make_halves() cuts."""
    head = head_of(shape)
    first, last = (head, 0) if shape.get("tied") else (0, head)  # a tied head is where the embedding is
    return min(range(1, blocks), key=lambda count: max(count + first, blocks - count + last))


def simulated_speed_up(shape, micro_batches):
    """The speed-up of a tied model, by the order in which its visits run and their shares of the work."""
    from trireme._native import core
    first = first_of(shape, shape["layers"])
    times = [first, shape["layers"] - first, head_of(shape)]
    order = core.visits_schedule([0, 1, 0], micro_batches, 4, times)
    return 3 * micro_batches * sum(times) / order.simulate(of_part=times).makespan


def make_smp(torch, shape, micro_batches):
    import trireme.smp as smp
    smp.init({"pipeline_parallel_degree": 2, "microbatches": micro_batches, "auto_partition": False, "default_partition": 0})
    module, blocks = make_llama(torch, shape)
    for part in (*blocks[first_of(shape, len(blocks)):], module.norm, *(() if shape.get("tied") else (module.output,))):
        smp.set_partition(part, 1)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), **ADAMW))

    @smp.step
    def train(inputs, targets):
        loss = model(inputs, targets)
        model.backward(loss)
        return loss

    def step(inputs, targets):
        optimizer.zero_grad()
        train(inputs, targets)
        optimizer.step()

    return step


def make_module(torch, shape, micro_batches):
    import trireme as deepspeed
    deepspeed.init_distributed()
    from trireme.pipe import PipelineModule
    halves, loss_of = peers.make_halves(torch, shape)
    module = PipelineModule(layers=halves, num_stages=2, loss_fn=loss_of, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches,
              "optimizer": {"type": "AdamW", "params": {key: list(value) if isinstance(value, tuple) else value for key, value in ADAMW.items()}}}
    engine = deepspeed.initialize(model=module, config=config)[0]

    def step(inputs, targets):
        engine.train_batch(iter(zip(inputs.split(1), targets.split(1))))

    return step


def make_plain(torch, shape, micro_batches):
    model, _ = make_llama(torch, shape)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(inputs, targets):
        for x, y in zip(inputs.split(1), targets.split(1)):
            (model(x, y) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def make_torch(torch, shape, micro_batches):
    torch.distributed.init_process_group("gloo")
    return peers.make_torch(torch, shape, micro_batches)


MAKERS = {"one": make_plain, "smp": make_smp, "module": make_module, "torch": make_torch}


def make_layers(torch, smoke, static):
    """A step over transformers' Llama with all layers on stage 1, and the seconds that stage 0 spends on each of
    them."""
    import transformers
    import trireme.smp as smp
    layers = 3 if smoke else 13
    config = transformers.LlamaConfig(num_hidden_layers=layers, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
                                      vocab_size=256, max_position_embeddings=64, tie_word_embeddings=False, use_cache=False)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "auto_partition": False, "default_partition": 0, "static_mode": static})
    torch.manual_seed(0)
    module = transformers.LlamaForCausalLM(config)
    for part in (*module.model.layers, module.model.norm, module.lm_head):
        smp.set_partition(part, 1)
    begin, spent = [0.0], []
    # The first one is sent something, which is not what a layer costs.
    module.model.layers[1].register_forward_pre_hook(lambda *_: begin.__setitem__(0, time.perf_counter()))
    module.model.layers[-1].register_forward_hook(lambda *_: spent.append((time.perf_counter() - begin[0]) / (layers - 1)))
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))

    @smp.step
    def train(tokens):
        loss = model(input_ids=tokens, labels=tokens).loss
        model.backward(loss)
        return loss

    def step(tokens):
        optimizer.zero_grad()
        train(tokens)
        optimizer.step()

    return step, spent


def run_rank(case):
    import torch
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if case["system"] == "layer":
        step, spent = make_layers(torch, case["smoke"], case["static"])
        for number in range(3 + case["steps"]):
            if number == 3:  # sizes are known, and stages run ahead
                spent.clear()
            step(torch.randint(256, (4, 32)))
        if rank == 0:
            print(json.dumps({"seconds": spent}), flush=True)
        return
    shape = dict(SMALL if case["smoke"] else SHAPE, tied=case["tied"])
    step = MAKERS[case["system"]](torch, shape, case["micro_batches"])
    tokens = torch.randint(shape["vocabulary"], (case["micro_batches"], shape["length"] + 1), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    seconds = []
    for _ in range(2 + case["steps"]):  # smp's first step tells sizes and runs one micro-batch at a time
        start = time.perf_counter()
        step(inputs, targets)
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        print(json.dumps({"seconds": seconds[2:]}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="one,smp,module,torch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tied", action="store_true", help="the head is the embedding; one and smp alone")
    parser.add_argument("--layer", action="store_true", help="a layer of another stage")
    parser.add_argument("--static-mode", action="store_true", help="--layer under smp's `static_mode`")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, once")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        return run_rank(json.loads(arguments.rank_of))
    if arguments.smoke:
        arguments.rounds = arguments.steps = 1
    case = dict(micro_batches=arguments.micro_batches, steps=arguments.steps, smoke=arguments.smoke, tied=arguments.tied, static=arguments.static_mode)
    if arguments.layer:
        spent = [1e3 * one for _ in range(arguments.rounds) for one in run_ranks(__file__, {**case, "system": "layer"}, 2)["seconds"]]
        print(f"a layer of another stage, forward, one micro-batch: min {min(spent):.3f} ms  median {statistics.median(spent):.3f} ms")
        return 0
    systems = [system for system in arguments.systems.split(",") if not arguments.tied or system in ("one", "smp")]
    seconds = {system: [] for system in systems}
    for _ in range(arguments.rounds):
        for system in list(systems):
            try:
                seconds[system] += run_ranks(__file__, {**case, "system": system}, 1 if system == "one" else 2)["seconds"]
            except (PeerFailed, subprocess.TimeoutExpired) as error:
                print(f"{system} does not run here and is left out: {error}", flush=True)
                systems.remove(system)
    for system in systems:
        print(f"{system:10}  min {1e3 * min(seconds[system]):8.1f} ms  median {1e3 * statistics.median(seconds[system]):8.1f} ms  "
              f"{min(seconds[systems[0]]) / min(seconds[system]):5.2f} times as fast as {systems[0]}", flush=True)
    if arguments.tied and "smp" in systems:
        print(f"simulated: {simulated_speed_up(SMALL if arguments.smoke else SHAPE | {'tied': True}, arguments.micro_batches):.2f} times as fast", flush=True)
    return 0 if "smp" in systems else 1


if __name__ == "__main__":
    sys.exit(main())
