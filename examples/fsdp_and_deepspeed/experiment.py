"""The experiment of "From DeepSpeed to FSDP and back again" in small, on two ranks of this machine: where precision
decides whether a model learns.

    python examples/fsdp_and_deepspeed/experiment.py --out DIR takes about a minute on two cores; writes figures.png and
    tables.md

Needs torch, transformers and matplotlib beside trireme.
Source: https://huggingface.co/blog/deepspeed-to-fsdp-and-back
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

import torch

import train

HERE = pathlib.Path(__file__).parent
RANKS, SMOOTHED = 2, 15
# Title, the runs (dialect, mode, learning rate).
FIGURES = [
    ("1: the same learning rate", [("deepspeed", "mixed", 1e-5), ("fsdp", "low", 1e-5)]),
    ("2: FSDP's times four", [("deepspeed", "mixed", 1e-5), ("fsdp", "low", 4e-5)]),
    ("3: a larger one for both", [("deepspeed", "mixed", 5e-4), ("fsdp", "low", 5e-4)]),
    ("4: FSDP's two modes, 1e-5", [("deepspeed", "mixed", 1e-5), ("fsdp", "mixed", 1e-5), ("fsdp", "low", 1e-5)]),
]


def pretrain(path, steps=400):
    """A model that has read this repository's pages, in fp32, by plain PyTorch."""
    model, text = train.small_llama(), train.text_of("docs/*.md")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        ids = train.batch(text, step, 0, RANKS)
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), path)


def run(dialect, mode, lr, folder, steps):
    """The record that train.py writes of a run, which is made once."""
    out = folder / f"{dialect}-{mode}-{lr:g}.json"
    if not out.exists():
        launch = [options.trireme, "launch", "--num_gpus", str(RANKS), "--prefix", "none", *(["--as-fsdp"] if dialect == "fsdp" else [])]
        subprocess.run([*launch, sys.executable, HERE / "train.py", "--dialect", dialect, "--mode", mode, "--lr", str(lr), "--steps", str(steps),
                        "--base", folder / "base.pt", "--out", out], check=True)
    return json.loads(out.read_text())


def smooth(values):
    return [statistics.fmean(values[max(0, i - SMOOTHED + 1):i + 1]) for i in range(len(values))]


def draw(folder, steps):
    """figures.png: losses above, norms of gradients below."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(2, len(FIGURES), figsize=(18, 7), sharex=True)
    looks = {("deepspeed", "mixed"): ("tab:blue", "-"), ("fsdp", "low"): ("tab:orange", "-"), ("fsdp", "mixed"): ("tab:green", "--")}
    for column, (title, runs) in enumerate(FIGURES):
        for dialect, mode, lr in runs:
            found = run(dialect, mode, lr, folder, steps)
            color, line = looks[dialect, mode]
            for row, key in enumerate(("loss", "norm")):
                axes[row][column].plot(smooth([step[key] for step in found["steps"]]), color=color, linestyle=line, label=f"{dialect}, {mode}, {lr:g}")
        axes[0][column].set_title(title)
        axes[0][column].legend()
        axes[1][column].set_xlabel("step")
    axes[0][0].set_ylabel("loss")
    axes[1][0].set_ylabel("norm of gradients")
    figure.tight_layout()
    figure.savefig(folder / "figures.png", dpi=70)


def peak_flops():
    """Operations a second of a product of fp32 matrices on one core."""
    a = torch.randn(1024, 1024)
    best = min(_seconds(lambda: a @ a) for _ in range(10))
    return 2 * 1024 ** 3 / best


def _seconds(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def table(folder, steps):
    """Table 3: tokens per second and rank, seconds per step, and the part of the peak's operations that 6 x parameters
    x tokens are."""
    lines, peak = ["| | tokens/s per rank | ms per step | MFU |", "|---|---|---|---|"], peak_flops()
    for dialect, mode in (("fsdp", "mixed"), ("fsdp", "low"), ("deepspeed", "mixed")):
        found = run(dialect, mode, 1e-5, folder, steps)
        seconds = statistics.median(step["seconds"] for step in found["steps"][5:])
        used = 6 * found["parameters"] * found["tokens"] / seconds / peak
        lines.append(f"| {dialect}, {mode} | {found['tokens'] / seconds:.0f} | {1000 * seconds:.1f} | {used:.2f} |")
    return lines


def main():
    torch.set_num_threads(1)
    folder = options.out
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "base.pt").exists():
        print("a model learns this repository's pages …", flush=True)
        pretrain(folder / "base.pt")
    for _, runs in FIGURES:
        for dialect, mode, lr in runs:
            print(f"{dialect}, {mode}, learning rate {lr:g}", flush=True)
            run(dialect, mode, lr, folder, options.steps)
    draw(folder, options.steps)
    lines = ["| run | loss of the first 15 steps | of the last 15 |", "|---|---|---|"]
    for dialect, mode, lr in sorted({one for _, runs in FIGURES for one in runs}):
        losses = [step["loss"] for step in run(dialect, mode, lr, folder, options.steps)["steps"]]
        lines.append(f"| {dialect}, {mode}, {lr:g} | {statistics.fmean(losses[:SMOOTHED]):.3f} | {statistics.fmean(losses[-SMOOTHED:]):.3f} |")
    text = "\n".join([*lines, "", *table(folder, options.steps), ""])
    (folder / "tables.md").write_text(text)
    print(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a folder; runs that stand there are not repeated")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--trireme", default="trireme", help="the program")
    options = parser.parse_args()
    main()
