"""Training of a small GPT-2 over stages, layers that ranks share, copies and their shards. Knows nothing of Trireme.

    gpt2_training.py FOLDER                    trains, saves in FOLDER half-way, and generates
    gpt2_training.py FOLDER --resume partial   trains the second half from what is there (or `full`)

Degrees are arguments. Rank 0 writes what it saw as FOLDER/report.json.
"""
import argparse
import json
import math
import os

import torch
import transformers

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import translate_hf_state_dict_to_smdistributed_gpt2, translate_state_dict_to_hf_gpt2

VOCABULARY, LENGTH, PROMPT = 24, 16, 4


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--resume", choices=("partial", "full"))
    for name, default in (("pipeline_parallel_degree", 1), ("tensor_parallel_degree", 1), ("sharded_data_parallel_degree", 1), ("shard_optimizer_state", 0), ("microbatches", 4),
                          ("active_microbatches", 2), ("prescaled_batch", 1), ("fp16", 0), ("bf16", 0), ("manual_partition", 0), ("skip_tracing", 0), ("delayed_param", 0),
                          ("activation_checkpointing", 0), ("offload_activations", 0), ("tied", 1), ("train_batch_size", 32), ("steps", 24), ("layers", 4), ("seed", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("lr", 2e-2), ("min_lr", 1e-3), ("warmup", 0.2), ("weight_decay", 0.1), ("grad_clip", 1.0), ("static_loss_scale", 1.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--optimize", default="speed")
    parser.add_argument("--placement_strategy", default="cluster")
    parser.add_argument("--activation_strategy", default="each")
    return parser.parse_args()


def configuration(args):
    found = {"ddp": True, "pipeline_parallel_degree": args.pipeline_parallel_degree, "tensor_parallel_degree": args.tensor_parallel_degree, "microbatches": args.microbatches,
             "active_microbatches": args.active_microbatches, "prescaled_batch": args.prescaled_batch > 0, "optimize": args.optimize, "placement_strategy": args.placement_strategy,
             "fp16": args.fp16 > 0, "bf16": args.bf16 > 0, "shard_optimizer_state": args.shard_optimizer_state > 0, "auto_partition": not args.manual_partition,
             "default_partition": 0, "skip_tracing": args.skip_tracing > 0, "delayed_parameter_initialization": args.delayed_param > 0,
             "offload_activations": args.offload_activations > 0}
    if args.sharded_data_parallel_degree > 1:
        found.update({"sharded_data_parallel_degree": args.sharded_data_parallel_degree, "sdp_gradient_clipping": args.grad_clip, "sdp_reduce_bucket_size": int(5e8),
                      "sdp_param_persistence_threshold": int(1e6), "sdp_max_live_parameters": int(1e9), "sdp_hierarchical_allgather": True})
    return found


class Sequences(torch.utils.data.Dataset):
    """Tokens that go up by 1, 2 or 3, modulo the vocabulary."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        begin, by = torch.randint(VOCABULARY, (count, 1), generator=generator), torch.randint(1, 4, (count, 1), generator=generator)
        self.ids = (begin + by * torch.arange(LENGTH)) % VOCABULARY

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index], torch.ones_like(self.ids[index])


def loader_of(args, seed, steps):
    """Each copy's part of every global batch: by rdp_rank() where ranks that share layers get the same samples."""
    count, which = (smp.rdp_size(), smp.rdp_rank()) if args.prescaled_batch else (smp.dp_size(), smp.dp_rank())
    sampler = torch.utils.data.DistributedSampler(data := Sequences(args.train_batch_size * steps, seed), num_replicas=count, rank=which, shuffle=False, drop_last=True)
    return torch.utils.data.DataLoader(data, sampler=sampler, batch_size=args.train_batch_size // count, drop_last=True)


def build(args, dtype):
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=args.layers, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
                                     tie_word_embeddings=args.tied > 0, bos_token_id=0, eos_token_id=0, initializer_range=0.1)
    with smp.model_creation(tensor_parallelism=smp.tp_size() > 1, dtype=dtype, distribute_embedding=smp.tp_size() > 1, use_alibi=False, attention_in_fp32=False,
                            fp32_residual_addition=False, query_key_layer_scaling=False, fused_softmax=True, fused_dropout=False, fused_bias_gelu=True, flash_attention=True):
        return transformers.AutoModelForCausalLM.from_config(config)


def transformer_of(model):
    return model.get_module().transformer


def place(args, model):
    blocks = transformer_of(model).h
    for number, block in enumerate(blocks):
        smp.set_partition(block, number * smp.pp_size() // len(blocks))


def groups_of(model, weight_decay):
    """Biases and norms do not decay; a tensor of two modules is there once."""
    decay, rest, seen = [], [], set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                (rest if name == "bias" or isinstance(module, torch.nn.LayerNorm) else decay).append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def rate(args, step):
    if step < (warmup := args.warmup * args.steps):
        return (step + 1) / (warmup + 1)
    low = args.min_lr / args.lr
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (args.steps - warmup)))


@smp.step
def train_step(model, input_ids, attention_mask):
    found = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)
    model.backward(found["loss"])
    return found


@smp.step
def test_step(model, input_ids, attention_mask):
    found = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)
    right = (found["logits"][:, PROMPT - 1:-1].argmax(-1) == input_ids[:, PROMPT:]).float().mean()
    return {"loss": found["loss"], "right": right}


@smp.step
def generate_step(model, prompts):
    """The likeliest continuation, token by token."""
    ids = prompts
    while ids.size(1) < LENGTH:
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids


def mean_over_copies(value):
    parts = smp.allgather(value, smp.WORLD)
    return sum(parts) / len(parts)


def train(args, model, optimizer, scheduler, first, last):
    model.train()
    losses = []
    for number, (input_ids, attention_mask) in enumerate(loader_of(args, args.seed, args.steps)):
        if not first <= number < last:
            continue
        optimizer.zero_grad(set_to_none=True)
        found = train_step(model, input_ids, attention_mask)
        assert tuple(found.logits.concat().shape) == (*input_ids.shape, VOCABULARY), found.logits.concat().shape
        norm = optimizer.clip_master_grads(args.grad_clip) if args.sharded_data_parallel_degree == 1 else None
        optimizer.step()
        if not ((args.fp16 or args.bf16) and optimizer.overflow):
            scheduler.step()
            assert norm is None or norm > 0, norm
        losses.append(mean_over_copies(found.loss.reduce_mean().item()))
    return losses


def test(args, model):
    model.eval()
    losses, right = [], []
    with torch.no_grad():
        for input_ids, attention_mask in loader_of(args, args.seed + 1, 2):
            found = test_step(model, input_ids, attention_mask)
            losses.append(found["loss"].reduce_mean().item())
            right.append(found["right"].reduce_mean().item())
    return [mean_over_copies(sum(values) / len(values)) for values in (losses, right)]


def generate(args, model):
    """(prompts, what follows them) of the global batch."""
    model.eval()
    ids, _ = next(iter(loader_of(args, args.seed + 2, 1)))
    with torch.no_grad():
        found = generate_step(model, ids[:, :PROMPT].contiguous()).concat()
    assert torch.equal(found[:, :PROMPT].cpu(), ids[:, :PROMPT])
    return (found.cpu() == ids).float().mean().item()


def save(args, model, optimizer, scheduler, steps):
    content = {"cli_args": vars(args), "num_params": sum(p.numel() for p in model.get_module().parameters()), "total_steps": steps, "lr_scheduler": scheduler.state_dict(),
               "model_config": transformer_of(model).config}
    smp.save_checkpoint(args.folder, tag=f"trained-{steps}", partial=True, model=model, optimizer=optimizer, user_content=content, num_kept_partial_checkpoints=2)
    smp.save_checkpoint(args.folder, tag="full.pt", partial=False, model=model, optimizer=optimizer, user_content=content, translate_if_full=True)


def resume(args, scheduler):
    full = args.resume == "full"
    content = smp.resume_from_checkpoint(args.folder, tag="full.pt" if full else f"trained-{args.steps // 2}", partial=not full, strict=True, load_optimizer=True,
                                         translate_function=translate_hf_state_dict_to_smdistributed_gpt2 if full else None)
    scheduler.load_state_dict(content["lr_scheduler"])
    assert content["total_steps"] == args.steps // 2 and content["model_config"].n_embd == 32
    return content["total_steps"]


def check_full(args, model, dtype):
    """Plain transformers loads what was saved."""
    state = model.state_dict()
    if smp.rank() == 0:
        plain = transformers.GPT2LMHeadModel(transformer_of(model).config).to(dtype)
        plain.load_state_dict(translate_state_dict_to_hf_gpt2(torch.load(os.path.join(args.folder, "full.pt"), weights_only=False), max_seq_len=LENGTH))
        for name, tensor in plain.state_dict().items():
            assert torch.equal(tensor, state[name].cpu()), name


def main():
    args = parse()
    smp.init(configuration(args))
    assert smp.state.cfg.fp16 == (args.fp16 > 0)
    assert smp.get_tp_group() == sorted(smp.get_tp_group()) and len(smp.get_tp_group()) == smp.tp_size() == args.tensor_parallel_degree
    assert smp.get_tp_group()[smp.tp_rank()] == smp.rank() and smp.mp_size() * smp.rdp_size() == smp.size()
    torch.manual_seed(args.seed)
    dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.get_default_dtype()
    model = build(args, dtype)
    model = smp.DistributedModel(model, trace_device="gpu", backward_passes_per_step=1)
    if args.manual_partition:
        place(args, model)
    if args.activation_checkpointing:
        for block in transformer_of(model).h:
            smp.set_activation_checkpointing(block)
    optimizer = torch.optim.AdamW(groups_of(model.get_module(), args.weight_decay), lr=args.lr, betas=(0.9, 0.95), eps=1e-3)
    optimizer = smp.DistributedOptimizer(optimizer, **({"static_loss_scale": None, "dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 1000, "min_scale": 1, "delayed_shift": 2,
                                                        "init_scale": 2.0**12}} if args.fp16 and args.static_loss_scale == 1 else {"static_loss_scale": args.static_loss_scale}))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(args, step))

    report = {"losses": []}
    first = resume(args, scheduler) if args.resume else 0
    if not args.resume:
        report["losses"] += train(args, model, optimizer, scheduler, 0, args.steps // 2)
        save(args, model, optimizer, scheduler, args.steps // 2)
        check_full(args, model, dtype)
        first = args.steps // 2
    report["losses"] += train(args, model, optimizer, scheduler, first, args.steps)
    report["test"] = test(args, model)
    report["generated"] = mean_over_copies(generate(args, model))

    every = report["losses"]
    assert every[-1] < (0.7 if args.resume else 0.4) * every[0], every
    assert report["test"][1] > 0.6 and report["generated"] > 0.35, report
    assert smp.allgather(report, smp.WORLD) == [report] * smp.size()
    report["weights"] = {name: tensor.double().abs().sum().item() for name, tensor in model.state_dict().items()}
    if smp.rank() == 0:
        with open(os.path.join(args.folder, "report.json"), "w", encoding="utf-8") as file:
            json.dump(report, file)
    smp.barrier()


if __name__ == "__main__":
    main()
