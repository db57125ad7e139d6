"""Step time of one Hugging Face Llama whose layers two ranks share: Trireme beside DTensor and DeepSpeed's AutoTP,
interleaved in one run.

  tensor_peers_bench.py [--systems one,trireme,overlap,dtensor,autotp] [--rounds 3] [--steps 4] [--limit-s 300]
  [--smoke]

one is a single rank of plain PyTorch, half of whose time is what two ranks without any exchange would take. overlap is
trireme with tp_overlap_comm. dtensor is torch's parallelize_module() with column and row styles, and loss_parallel().
autotp takes part where deepspeed can be imported; it compiles operators of its own the first time (TORCH_EXTENSIONS_DIR
keeps them). A system that does not run is named with its reason. Each rank has one thread; batches, AdamW and fp32 are
alike. Needs transformers.
"""
import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import sys
import time

from torch_peers import ADAMW, SHAPE, SMALL, PeerFailed, run_ranks

ROOT = pathlib.Path(__file__).resolve().parent.parent
WARM_UP, SAMPLES = 2, 2


def make_model(shape):
    import torch
    import transformers
    torch.manual_seed(1234)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=shape["vocabulary"], hidden_size=shape["hidden"], intermediate_size=shape["inner"], num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"], max_position_embeddings=shape["length"], use_cache=False, attn_implementation="sdpa"))


def make_one(torch, model):
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def step(ids):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()
    return step


def make_engine(name, model, **section):
    package = __import__(name)
    config = {"train_micro_batch_size_per_gpu": SAMPLES, "tensor_parallel": {"autotp_size": 2, **section}, "zero_optimization": {"stage": 0}, "gradient_clipping": 0,
              "optimizer": {"type": "AdamW", "params": ADAMW}}
    engine, *_ = package.initialize(model=model, config=config)

    def step(ids):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.item()
    return step


def make_dtensor(torch, model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
    mesh = init_device_mesh("cpu", (2,))
    plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()), "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    for layer in range(len(model.model.layers)):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.{layer}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.{layer}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **ADAMW)

    def step(ids):
        logits = model(input_ids=ids).logits
        with loss_parallel():
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.full_tensor().item() if hasattr(loss, "full_tensor") else loss.item()
    return step


def run_rank(case):
    """One rank of a system; rank 0 prints its times and the last loss."""
    import torch
    torch.set_num_threads(1)
    shape, system = SMALL if case["smoke"] else SHAPE, case["system"]
    is_ours = system in ("trireme", "overlap")
    if is_ours:
        import trireme
        trireme.init_distributed()
        rank = trireme.comm.get_rank()
    else:
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
    model = make_model(shape)
    step = {"one": lambda: make_one(torch, model), "dtensor": lambda: make_dtensor(torch, model), "trireme": lambda: make_engine("trireme", model),
            "overlap": lambda: make_engine("trireme", model, tp_overlap_comm=True), "autotp": lambda: make_engine("deepspeed", model)}[system]()
    seconds, loss = [], 0
    if system == "one" and rank != 0:
        torch.distributed.barrier()
        return
    for index in range(WARM_UP + case["steps"]):
        ids = torch.randint(shape["vocabulary"], (SAMPLES, shape["length"]), generator=torch.Generator().manual_seed(9000 + index % 4))
        start = time.perf_counter()
        loss = step(ids)
        if index >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    if rank == 0:
        print(json.dumps({"seconds": seconds, "loss": loss}), flush=True)
    if not is_ours:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="one,trireme,dtensor,autotp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit-s", type=int, default=300, help="for one system in one round")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, once")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        return run_rank(json.loads(arguments.rank_of))
    systems = arguments.systems.split(",")
    if "autotp" in systems and importlib.util.find_spec("deepspeed") is None:
        print("autotp      did not run: deepspeed is not installed (pip install deepspeed)")
        systems.remove("autotp")
    if arguments.smoke:
        arguments.rounds = arguments.steps = 1
    results = {system: [] for system in systems}
    for _ in range(arguments.rounds):
        for system in systems:
            try:
                results[system].append(run_ranks(__file__, dict(system=system, steps=arguments.steps, smoke=arguments.smoke), limit_s=arguments.limit_s))
            except PeerFailed as error:
                print(f"{system:10}  did not run: {error}", flush=True)
    base = min((second for row in results[systems[0]] for second in row["seconds"]), default=float("nan"))
    for system, rows in results.items():
        seconds = [second for row in rows for second in row["seconds"]]
        if seconds:
            print(f"{system:10}  min {1e3 * min(seconds):8.1f} ms  median {1e3 * statistics.median(seconds):8.1f} ms  {min(seconds) / base:5.2f} x {systems[0]}"
                  f"  loss {rows[0]['loss']:.6f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
