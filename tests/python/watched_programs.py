"""Programs that are watched by what a configuration switches on, each beside the same program unwatched: losses and
weights of every rank are the same bits, and what was written has the program's own losses.

    trireme launch --num_gpus 2 --as-deepspeed tests/python/watched_programs.py FOLDER SEED COUNT
"""
import hashlib
import json
import os
import pathlib
import random
import sys

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.nn import functional as F

STEPS, SIZE, WORDS = 3, 16, 32
WATCHES = ("wall_clock_breakdown", "comms_logger", "timeline", "flops_profiler", "csv_monitor", "record")
AXES = {"": 1, "pipeline": 2, "sequence": 2, "tensor": 2}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(SIZE), nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x):
        samples, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(samples, tokens, 3, 4, SIZE // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(WORDS, SIZE), nn.ModuleList([Block(), Block()]), nn.Linear(SIZE, WORDS)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM  # pylint: disable=import-outside-toplevel
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, hidden_size=SIZE, intermediate_size=2 * SIZE, num_hidden_layers=2, num_attention_heads=4,
                                        num_key_value_heads=4, max_position_embeddings=32))


def loss_of(output, labels):
    return F.cross_entropy(output.float().flatten(0, 1), labels.flatten())


def draw_program(seed, number):
    """(features, what watches them)."""
    draw = random.Random(f"{seed} {number}")
    axis = draw.choice(list(AXES))
    features = {"axis": axis, "stage": draw.randrange(4), "dtype": draw.choice(["fp32", "fp16", "bf16"]), "accumulation": draw.choice([1, 2]),
                "offload": draw.random() < 0.3, "recompute": draw.choice(["none", "full", "selective"])}
    return features, draw.sample([name for name in WATCHES if (name, axis) != ("flops_profiler", "pipeline")], 3)


def config(features, watched, folder):
    ours = {"recompute": features["recompute"]}
    made = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": features["accumulation"], "trireme": ours,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": {"stage": features["stage"]}}
    if features["axis"] == "pipeline":
        made["gradient_accumulation_steps"] *= 2
        if features["recompute"] == "full":
            ours["recompute"], made["pipeline"] = "none", {"activation_checkpoint_interval": 1}
    if features["dtype"] != "fp32":
        made[features["dtype"]] = {"enabled": True, **({"initial_scale_power": 8} if features["dtype"] == "fp16" else {})}
    if features["offload"]:
        made["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if features["axis"] == "sequence":
        made["sequence_parallel_size"] = 2
    if features["axis"] == "tensor":
        made["tensor_parallel"] = {"autotp_size": 2}
    options = {"wall_clock_breakdown": True, "comms_logger": {"enabled": True, "verbose": True}, "flops_profiler": {"enabled": True, "output_file": f"{folder}/flops"},
               "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "csv"}}
    own = {"timeline": {"enabled": True, "output_path": f"{folder}/timeline", "start_step": 1, "steps": 0}, "record": f"{folder}/record"}
    made.update({name: value for name, value in options.items() if name in watched})
    ours.update({name: value for name, value in own.items() if name in watched})
    return made


def train(features, watched, folder):
    """(losses of each step, {parameter: digest of its bits})."""
    torch.manual_seed(5)
    axis = features["axis"]
    if axis == "pipeline":
        model = PipelineModule([nn.Embedding(WORDS, SIZE), Block(), Block(), nn.Linear(SIZE, WORDS)], num_stages=2, loss_fn=loss_of)
    else:
        model = llama() if axis == "tensor" else Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=[*model.parameters()], config=config(features, watched, folder))
    generator = torch.Generator().manual_seed(dist.get_rank() // AXES[axis])

    def batch():
        ids = torch.randint(0, WORDS, (2, 8), generator=generator)
        return ids, ids.roll(-1, 1)

    losses = []
    for _ in range(STEPS):
        if axis == "pipeline":
            losses.append([engine.train_batch(iter([batch() for _ in range(engine.gradient_accumulation_steps())])).item()])
            continue
        losses.append([])
        for _ in range(engine.gradient_accumulation_steps()):
            ids, labels = batch()
            output = engine(input_ids=ids).logits if axis == "tensor" else engine(ids)
            loss = loss_of(output, labels)
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
    engine.destroy()
    return losses, {name: hashlib.sha1(p.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for name, p in model.named_parameters()}


def wrong_files(losses, watched, folder):
    """The events that lack among those written, or have other losses than the program."""
    names = {"timeline": "timeline/rank-0.json", "flops_profiler": "flops", "csv_monitor": "csv/Train_Samples_train_loss.csv", "record": "record/report.html"}
    wrong = [f"no {names[name]}" for name in watched if name in names and not (folder / names[name]).exists()]
    told = {}
    if "record" in watched:
        lines = [json.loads(line) for line in (folder / "record/metrics.jsonl").read_text().splitlines()]
        told["record"] = [line["loss"] for line in lines if "event" not in line]
    if "csv_monitor" in watched:
        told["csv_monitor"] = [float(line.split(",")[1]) for line in (folder / names["csv_monitor"]).read_text().splitlines()[1:]]
    means = [sum(window) / len(window) for window in losses]
    for name, found in told.items():
        if len(found) != len(means) or any(abs(one - mean) > 1e-6 * mean for one, mean in zip(found, means)):
            wrong.append(f"{name}: {found}; the program's: {means}")
    return wrong


def main():
    place, seed, count = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:4])
    deepspeed.init_distributed()
    for number in range(count):
        features, watched = draw_program(seed, number)
        folder = place / str(number)
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        plain, seen = train(features, [], folder), train(features, watched, folder)
        wrong = [f"losses {seen[0]}, unwatched {plain[0]}"] if seen[0] != plain[0] else []
        wrong += [name for name, digest in plain[1].items() if seen[1][name] != digest]
        if dist.get_rank() == 0:
            wrong += wrong_files(seen[0], watched, folder)
        sys.stdout.write(json.dumps({"program": number, "rank": dist.get_rank(), "features": features, "watched": watched, "wrong": wrong}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    os.environ.setdefault("TRIREME_TIMEOUT_S", "60")
    main()
