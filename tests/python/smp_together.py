"""A program of smp by a description of what it combines, which compares itself with plain PyTorch on every rank:
losses, results, the gradients of all parameters, the norm, weights.

    smp_together.py '{"pp": 2, "tp": 2, …}'   on pp · tp · rdp ranks; rank 0 tells a list of what is wrong

DEFAULTS has what a description may say.
"""
import contextlib
import copy
import json
import os
import random
import sys

import torch
import torch.nn.functional as F
from torch import nn

import trireme.smp as smp
from trireme.errors import StateError
from trireme.utils import safe_get_full_grad

DEFAULTS = {"pp": 1, "tp": 1, "rdp": 1, "microbatches": 2, "prescaled": True, "optimize": "speed", "precision": None, "shard": None, "net": "blocks", "tied": False, "batch_norm": False,
            "values": False, "hooks": False, "frozen": False, "frozen_later": False, "table": False, "indexed": False, "losses": 1, "checkpointed": None, "offloads": False, "delayed": False,
            "by_hand": False, "schedule": "interleaved", "clip": None, "scheduler": False, "optimizer": "adamw", "steps": 3, "saves": None, "loads": None, "save_after": 1, "placement": "cluster",
            "partition_method": "ordered", "evaluates": True, "dropout": 0.0, "summed": False, "seed": 1}
WIDTH, CLASSES, VOCABULARY, TOKENS = 16, 5, 32, 8
SCALE = 256.0


class Block(nn.Module):
    def __init__(self, own, batch_norm, dropout):
        super().__init__()
        linear = smp.nn.DistributedLinear if own else nn.Linear
        self.up, self.down, self.dropout = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH), nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(WIDTH) if batch_norm else nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Blocks(nn.Module):
    def __init__(self, spec):
        super().__init__()
        drawn = random.Random(spec["seed"])
        self.spec = spec
        self.begin, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.Sequential(*(Block(drawn.random() < 0.5, spec["batch_norm"] and drawn.random() < 0.5, spec["dropout"]) for _ in range(4)))
        if spec["tied"]:
            self.blocks[3].up.weight = self.blocks[0].up.weight
        if spec["hooks"]:
            self.blocks[1].register_forward_hook(lambda module, arguments, result: result * 1.5)
            self.blocks[2].down.bias.register_hook(lambda gradient: gradient * 0.5)

    def forward(self, x, table=None):
        x = self.begin(x)
        if table is not None:
            x = x @ table
        if self.spec["values"]:
            for block in self.blocks:
                x = block(x)
                x = x * 1.25 if x.detach().mean().item() > 0 else x * 0.75
        else:
            x = self.blocks(x)
        if self.spec["indexed"]:
            weight = self.blocks[0].up.weight
            x = x * (1 + weight[3] + weight[:5, 2:].mean()) + weight[:WIDTH, ::2].sum(1) * weight[0, 0] + weight[[1, 5]].sum(0)
        if self.spec["hooks"] and x.requires_grad:
            x.register_hook(lambda gradient: gradient * 2)
        return self.head(x)


class Own(nn.Module):
    """smp's own transformer."""

    def __init__(self, spec):
        super().__init__()
        layers = {"num_attention_heads": 2, "attention_head_size": 8, "hidden_size": 16, "intermediate_size": 32, "attention_dropout_prob": spec["dropout"],
                  "hidden_dropout_prob": spec["dropout"], "activation": "gelu", "causal_mask_size": TOKENS, "pre_layernorm": True, "post_layernorm": False, "num_layers": 3}
        self.model = smp.nn.DistributedTransformerLMHead(vocab_size=VOCABULARY, num_positions=TOKENS, **layers)

    def forward(self, ids):
        positions = torch.arange(ids.size(1), device=ids.device).expand_as(ids)
        return self.model((ids, torch.zeros_like(ids, dtype=torch.float32), None, positions, None))


def of_transformers(spec):
    import transformers  # pylint: disable=import-outside-toplevel

    common = {"vocab_size": VOCABULARY, "tie_word_embeddings": spec["tied"], "use_cache": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    drop = spec["dropout"]
    if spec["net"] == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, n_positions=TOKENS, resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop, **common))
    if spec["net"] == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, max_position_embeddings=TOKENS,
                                                                    hidden_dropout_prob=drop, attention_probs_dropout_prob=drop, **common))
    if spec["net"] == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32,
                                                                      max_position_embeddings=TOKENS, attention_dropout=drop, **common))
    return transformers.T5ForConditionalGeneration(transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=drop, decoder_start_token_id=0, **common))


def make(spec):
    return {"blocks": Blocks, "own": Own}.get(spec["net"], of_transformers)(spec)


def freeze(net, spec):
    names = [name for name, _ in net.named_parameters()]
    for index, (name, parameter) in enumerate(net.named_parameters()):
        if index in (len(names) // 3, len(names) // 3 + 1, len(names) - 1):
            parameter.requires_grad_(not spec)


def losses_of(model, spec, batch, table):
    """([losses], result)."""
    if spec["net"] == "blocks":
        logits = model(batch[0], table) if table is not None else model(batch[0])
        losses = [F.cross_entropy(logits, batch[1], reduction="sum" if spec["summed"] else "mean")]
    elif spec["net"] == "own":
        logits = model(batch[0])
        logits = logits[0] if isinstance(logits, tuple) else logits
        losses = [F.cross_entropy(logits.flatten(0, 1), batch[0].flatten())]
    else:
        found = model(input_ids=batch[0], labels=batch[0], **({"attention_mask": batch[1]} if spec["table"] else {}))
        losses, logits = [found.loss], found.logits
    return losses + [0.1 * logits.float().square().mean()] * (spec["losses"] - 1), logits


def batch_of(spec, step):
    generator = torch.Generator().manual_seed(100 + step)
    count = 4 * spec["microbatches"] * spec["tp"] * spec["rdp"] if not spec.get("samples") else spec["samples"]
    if spec["net"] == "blocks":
        return torch.randn(count, 6, generator=generator), torch.randint(CLASSES, (count,), generator=generator)
    mask = torch.ones(count, TOKENS, dtype=torch.long)
    mask[::3, -2:] = 0
    return torch.randint(1, VOCABULARY, (count, TOKENS), generator=generator), mask


def optimizer_of(spec, parameters):
    parameters = list(parameters)
    if spec["optimizer"] == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if spec["optimizer"] == "momentum" else 0.0)


def sections(spec, batch):
    """{(copy, micro-batch): [the samples of each rank that shares layers]}."""
    place = {"rdp": smp.rdp_rank(), "tp": smp.tp_rank(), "dp": smp.dp_rank()}
    told = [json.loads(text) for text in smp.state.world.gather(json.dumps(place))]
    found = {}
    for one in told:
        count, which = (spec["rdp"], one["rdp"]) if spec["prescaled"] else (smp.dp_size(), one["dp"])
        own = [tensor.chunk(count)[which] for tensor in batch]
        for index in range(spec["microbatches"]):
            of_copy = found.setdefault((one["rdp"], index), {})
            of_copy[0 if spec["prescaled"] else one["tp"]] = [tensor.chunk(spec["microbatches"])[index] for tensor in own]
    return {key: [parts[number] for number in sorted(parts)] for key, parts in found.items()}


class Wrong(list):
    """Texts of what differs, and by how much."""

    def __init__(self, precision):
        super().__init__()
        self.tolerance = 5e-2 if precision else 1e-5
        self.worst = 0.0

    def compare(self, what, found, expected, factor=1.0):
        if found.shape != expected.shape:
            self.append(f"{what}: {tuple(found.shape)} for {tuple(expected.shape)}")
            return
        found, expected = found.detach().double(), expected.detach().double()
        if found.numel() == 0:
            return
        far = ((found - expected).norm() / max(expected.norm().item(), 0.02 * expected.numel() ** 0.5)).item()
        self.worst = max(self.worst, far)
        if not far <= factor * self.tolerance:
            self.append(f"{what}: {far:.2e} apart, {found.flatten()[:3].tolist()} for {expected.flatten()[:3].tolist()}")


class Plain:
    """Plain PyTorch that adds up micro-batches of all copies, with masters where weights have 16 bits."""

    def __init__(self, net, spec):
        self.net, self.spec = net, spec
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(spec["precision"])
        self.named = list(net.named_parameters())
        if self.dtype:
            net.to(self.dtype)
            self.masters = {name: nn.Parameter(p.detach().float(), requires_grad=p.requires_grad) for name, p in self.named}
        else:
            self.masters = dict(self.named)
        self.optimizer = optimizer_of(spec, self.masters.values())

    def __call__(self, *arguments, **keywords):
        cast = lambda value: value.to(self.dtype) if self.dtype and isinstance(value, torch.Tensor) and value.is_floating_point() else value
        found = self.net(*map(cast, arguments), **{name: cast(value) for name, value in keywords.items()})
        if isinstance(found, torch.Tensor):
            return found.float()
        if isinstance(found, tuple):
            return tuple(one.float() if isinstance(one, torch.Tensor) and one.is_floating_point() else one for one in found)
        return found

    def step(self, parts, table):
        """{(copy, micro-batch): (losses, result)}; gradients are in `gradients`."""
        self.gradients, found = {}, {}
        for key, tensors in parts.items():
            self.net.zero_grad()
            losses, result = losses_of(self, self.spec, tensors, table)
            if self.spec["dropout"] == 0:
                (sum(losses) * SCALE if self.spec["precision"] == "fp16" else sum(losses)).backward()
            for name, parameter in self.named:
                if parameter.grad is not None:
                    gradient = parameter.grad.float() / (len(parts) * (SCALE if self.spec["precision"] == "fp16" else 1))
                    self.gradients[name] = self.gradients[name] + gradient if name in self.gradients else gradient
            found[key] = [loss.detach() for loss in losses], result.detach()
        self.net.zero_grad()
        return found

    def update(self, clip):
        for name, master in self.masters.items():
            master.grad = self.gradients.get(name)
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), clip) if clip else None
        self.optimizer.step()
        for master in self.masters.values():
            master.grad = None
        if self.dtype:
            with torch.no_grad():
                for name, parameter in self.named:
                    parameter.copy_(self.masters[name])
        return norm


def mark(net, spec):
    if spec["net"] == "blocks":
        for module in net.modules():
            if type(module) is nn.Linear and min(module.in_features, module.out_features) >= WIDTH:  # pylint: disable=unidiomatic-typecheck
                smp.set_tensor_parallelism(module, True)
    elif spec["net"] != "own":
        smp.set_tensor_parallelism(net, True)


def layers_of(net, spec):
    if spec["net"] == "blocks":
        return list(net.blocks)
    if spec["net"] == "own":
        return list(net.model.transformer.seq_layers)
    if spec["net"] == "t5":
        return [*net.encoder.block, *net.decoder.block]
    return list({"gpt2": lambda: net.transformer.h, "bert": lambda: net.bert.encoder.layer, "llama": lambda: net.model.layers}[spec["net"]]())


def configured(spec):
    found = {"partitions": spec["pp"], "tensor_parallel_degree": spec["tp"], "microbatches": spec["microbatches"], "ddp": True, "prescaled_batch": spec["prescaled"],
             "optimize": spec["optimize"], "pipeline": spec["schedule"], "placement_strategy": spec["placement"], "partition_method": spec["partition_method"],
             "offload_activations": spec["offloads"]}
    if spec["precision"]:
        found[spec["precision"]] = True
    if spec["shard"] == 1:
        found["shard_optimizer_state"] = True
    elif spec["shard"]:
        found.update(sharded_data_parallel_degree=spec["rdp"], sdp_gradient_clipping=1e9)
    if spec["by_hand"]:
        found.update(auto_partition=False, default_partition=0)
    return found


def run(spec, folder):
    """(what is wrong on this rank, [losses], the worst difference)."""
    spec = {**DEFAULTS, **spec}
    smp.init(configured(spec))
    torch.manual_seed(spec["seed"])
    reference = make(spec)
    torch.manual_seed(spec["seed"])
    with smp.delay_param_initialization() if spec["delayed"] else contextlib.nullcontext():
        net = make(spec)
    if not spec["delayed"]:
        reference = copy.deepcopy(net) if spec["net"] != "blocks" else reference
    if spec["frozen"]:
        freeze(net, True)
        freeze(reference, True)
    mark(net, spec)
    if spec["by_hand"]:
        layers = layers_of(net, spec)
        for index, layer in enumerate(layers):
            smp.set_partition(layer, index * spec["pp"] // len(layers))
    plain, wrong = Plain(reference, spec), Wrong(spec["precision"])
    model = smp.DistributedModel(net)
    if spec["checkpointed"] in ("each", "contiguous", "group_2") and spec["net"] == "blocks" and not spec["values"]:
        smp.set_activation_checkpointing(net.blocks, strategy=spec["checkpointed"])
    elif spec["checkpointed"]:
        for layer in layers_of(net, spec):
            smp.set_activation_checkpointing(layer)
    scale = {"static_loss_scale": SCALE} if spec["precision"] == "fp16" else {}
    optimizer = smp.DistributedOptimizer(optimizer_of(spec, model.parameters()), **scale)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in ((optimizer, plain.optimizer) if spec["scheduler"] else ())]

    @smp.step(non_split_inputs=["table"])
    def train_step(batch, table):
        losses, result = losses_of(model, spec, batch, table)
        if spec["losses"] > 1 and spec["seed"] % 2:
            for loss in losses:
                model.backward(loss, retain_graph=True)
        else:
            model.backward(sum(losses))
        return [loss.detach() for loss in losses], result.detach()

    @smp.step(non_split_inputs=["table"])
    def test_step(batch, table):
        losses, result = losses_of(model, spec, batch, table)
        return losses[0], result, losses[0].item()

    def own_of(parts):
        """The arguments of this rank."""
        mine = 0 if spec["prescaled"] else smp.tp_rank()
        return [torch.cat([parts[smp.rdp_rank(), index][mine][number] for index in range(spec["microbatches"])]) for number in range(2)]

    def compare_results(what, losses, results, expected, ranks_parts):
        for index in range(spec["microbatches"]):
            of_loss, of_result = expected[smp.rdp_rank(), index]
            for number, one in enumerate(losses):
                wrong.compare(f"{what} loss {number} of micro-batch {index}", one.outputs[index], of_loss[number])
            rows = of_result
            if not spec["prescaled"]:
                rows = of_result.split([part[0].size(0) for part in ranks_parts[smp.rdp_rank(), index]])[smp.tp_rank()]
            wrong.compare(f"{what} result of micro-batch {index}", results.outputs[index], rows)

    first, told = 0, []
    if spec["loads"]:
        first = spec["save_after"]
        content = smp.resume_from_checkpoint(os.path.join(folder, "saved"), tag="one", partial=spec["loads"] == "partial")
        if content["step"] != first:
            wrong.append(f"user_content: {content}")
    table = torch.eye(WIDTH) * 1.5 + 0.1 if spec["table"] and spec["net"] == "blocks" else None
    for step in range(spec["steps"]):
        batch = batch_of(spec, step)
        ranks_parts = sections(spec, batch)
        parts = {key: [torch.cat(tensors) for tensors in zip(*of_ranks)] for key, of_ranks in ranks_parts.items()}
        if spec["frozen_later"] and step == 1:
            freeze(net, True)
            freeze(reference, True)
        expected = plain.step(parts, table)
        if step >= first:
            optimizer.zero_grad()
            losses, results = train_step(own_of(ranks_parts), table)
            told.append([[loss.item() for loss in one.outputs] for one in losses])
            if spec["dropout"] == 0:
                compare_results(f"step {step}", losses, results, expected, ranks_parts)
                local = dict(model.local_named_parameters())
                for name, parameter in plain.named:
                    if name in local:
                        try:
                            gradient = safe_get_full_grad(local[name])
                        except StateError:
                            gradient = None
                        if (gradient is None or not gradient.abs().max() > 0) and (name not in plain.gradients or not plain.gradients[name].abs().max() > 0):
                            continue
                        if gradient is None or name not in plain.gradients:
                            wrong.append(f"step {step} gradient of {name}: {gradient is None} for {name not in plain.gradients}")
                        else:
                            wrong.compare(f"step {step} gradient of {name}", gradient, plain.gradients[name])
            norm = optimizer.clip_master_grads(spec["clip"]) if spec["clip"] else None
            optimizer.step()
        norm_of_plain = plain.update(spec["clip"])
        if step >= first and spec["clip"] and spec["dropout"] == 0:
            wrong.compare(f"step {step} norm", torch.tensor(float(norm)), norm_of_plain.float())
        for one in schedulers[0 if step >= first else 1:]:
            one.step()
        if step >= first and spec["precision"] and optimizer.overflow:
            wrong.append(f"step {step}: overflow")
        if spec["saves"] and step + 1 == spec["save_after"]:
            smp.save_checkpoint(os.path.join(folder, "saved"), tag="one", partial=spec["saves"] == "partial", model=model, optimizer=optimizer, user_content={"step": step + 1})
    whole = model.state_dict()
    if spec["dropout"] == 0:
        for name, tensor in reference.state_dict().items():
            if not tensor.is_floating_point() or ("running" in name and spec["rdp"] > 1):
                continue
            wrong.compare(f"weight {name}", whole[name].float(), tensor.float(), 3)
    if spec["evaluates"]:
        model.eval()
        reference.eval()
        ranks_parts = sections(spec, batch_of(spec, 50))
        with torch.no_grad():
            losses, results, values = test_step(own_of(ranks_parts), table)
            if spec["dropout"] == 0:
                expected = {key: losses_of(plain, spec, [torch.cat(tensors) for tensors in zip(*of_ranks)], table) for key, of_ranks in ranks_parts.items()}
                if spec["rdp"] == 1 or not spec["batch_norm"]:
                    compare_results("evaluation", [losses], results, expected, ranks_parts)
        if [loss.item() for loss in losses.outputs] != values:
            wrong.append(f"values {values} of losses {[loss.item() for loss in losses.outputs]}")
        told.append(values)
    return list(wrong), told, wrong.worst


def main():
    spec, folder = json.loads(sys.argv[1]), sys.argv[2]
    wrong, told, worst = run(spec, folder)
    of_ranks = [json.loads(text) for text in smp.state.world.gather(json.dumps([wrong, worst]))]
    if smp.rank() == 0:
        result = {"wrong": [f"rank {rank}: {one}" for rank, (found, _) in enumerate(of_ranks) for one in found], "losses": told, "worst": max(one for _, one in of_ranks)}
        print("\nTEST_RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
