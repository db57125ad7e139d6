"""Fine-tunes a small Llama through FSDP's or DeepSpeed's names, with fp32 masters (mixed) or with everything in bf16
(low).

    trireme launch --num_gpus 2 --as-fsdp train.py --dialect fsdp --mode low --lr 1e-5 --base base.pt --out low.json
    trireme launch --num_gpus 2 train.py --dialect deepspeed --mode mixed --lr 1e-5 --base base.pt --out mixed.json

Written for both libraries: `torch.distributed.fsdp` is PyTorch's without --as-fsdp, and `trireme` is named as programs
name DeepSpeed.
"""
import argparse
import json
import os
import pathlib
import time

import torch
import transformers

BATCH, LENGTH, CLIPPING = 4, 64, 1.0  # of a rank
ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def small_llama():
    """A small model of bytes, in fp32."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, vocab_size=256, use_cache=False))


def text_of(pattern):
    """The bytes of the repository's files that match, one file behind the other."""
    root = pathlib.Path(__file__).resolve().parents[2]
    return torch.tensor(list(b"".join(path.read_bytes() for path in sorted(root.glob(pattern)))))


def batch(text, step, rank, ranks):
    """[BATCH, LENGTH] tokens of the rank's own: pieces of `text` at places that the step draws."""
    draws = torch.randint(len(text) - LENGTH, (BATCH * ranks,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[place:place + LENGTH] for place in draws[rank * BATCH:(rank + 1) * BATCH]])


def train_by_fsdp(model, options):
    """Yields (loss, norm of gradients) of each step."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    policy = {}
    if options.mode == "mixed":
        model = model.float()  # as Accelerate does since 0.30 where mixed precision is on
        policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, **ADAMW)
    text = text_of(options.text)
    for step in range(options.steps):
        ids = batch(text, step, rank, ranks)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach().float()
        dist.all_reduce(loss)
        yield loss.item() / ranks, norm.item()
    dist.destroy_process_group()


def train_by_deepspeed(model, options):
    """As train_by_fsdp()."""
    import trireme as deepspeed
    deepspeed.init_distributed()
    bf16 = {"enabled": True}
    if options.mode == "low":
        bf16.update(bf16_master_weights_and_grads=True, bf16_optimizer_states=True)
    engine, *_ = deepspeed.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": CLIPPING, "zero_optimization": {"stage": 3}, "bf16": bf16,
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr, **ADAMW}}})
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    text = text_of(options.text)
    for step in range(options.steps):
        ids = batch(text, step, rank, ranks)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        loss = loss.detach().float()
        deepspeed.comm.all_reduce(loss)
        yield loss.item() / ranks, engine.get_global_grad_norm()
    engine.destroy()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dialect", choices=("fsdp", "deepspeed"), required=True)
    parser.add_argument("--mode", choices=("mixed", "low"), required=True, help="fp32 masters, or everything in bf16")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--base", type=pathlib.Path, help="weights to begin with, of torch.save(state_dict)")
    parser.add_argument("--text", default="src/tensor/*.cpp", help="files of the repository to learn")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="rank 0 writes a JSON file: losses, norms, seconds of each step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = small_llama()
    if options.base:
        model.load_state_dict(torch.load(options.base))
    model = model.to(torch.bfloat16)  # from_pretrained(…, torch_dtype=torch.bfloat16)
    steps, begin = [], time.perf_counter()
    for loss, norm in (train_by_fsdp if options.dialect == "fsdp" else train_by_deepspeed)(model, options):
        end = time.perf_counter()
        steps.append({"loss": loss, "norm": norm, "seconds": end - begin})
        begin = end
    if os.environ.get("RANK", "0") == "0":
        options.out.write_text(json.dumps({"dialect": options.dialect, "mode": options.mode, "lr": options.lr, "ranks": int(os.environ.get("WORLD_SIZE", "1")),
                                           "tokens": BATCH * LENGTH, "parameters": sum(p.numel() for p in model.parameters()), "steps": steps}))


if __name__ == "__main__":
    main()
