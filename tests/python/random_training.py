#!/usr/bin/env python3
"""Random training against plain PyTorch, in launches of 1, 2 and 3 ranks that live as long as the run.

    random_training.py PROGRAM [--seed S] [--cases N] [--minutes M] [--only K] [--max-ranks 3] [--programs]

Runs at least N cases, and as many as begin within M minutes. Case K of a seed is the same whatever else is run, so that
`--seed S --only K` repeats it. A case is split into segments, each an engine of its own that loads what the one before
saved, maybe at another number of ranks. With --programs the optimizers, schedulers, groups and buffers are the
program's own. PYTHONPATH must have the package and this folder.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
import uuid

import harness

_MARK = "TRIREME_TEST_RUN"  # in the environment of every process of a run


def _processes_with(mark):
    """Ids of processes whose environment has it."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{_MARK}={mark}\0".encode() in path.read_bytes() + b"\0":
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _launch(ranks, words, folder, mark):
    try:
        # Kernels that torch keeps for shapes that it has met are not told from a leak, so it keeps none.
        status, out, err = harness.launch(ranks, words, timeout_s=3600,
                                          environment={_MARK: mark, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"})
    except AssertionError as error:
        status, out, err = -1, "", str(error)
    if status:  # the others would wait for their turns
        (folder / "turn.new").write_text(str(1 << 40), encoding="ascii")
        os.replace(folder / "turn.new", folder / "turn")
    return status, out, err


def _growth(memory):
    """The growth of a rank's memory after the first half, in which it meets all models and shapes: medians of a tenth
    of the run."""
    window = max(len(memory) // 10, 1)
    first, last = memory[len(memory) // 2:][:window], memory[-window:]
    middle = lambda rows, column: statistics.median(row[column] for row in rows)
    names = ("rss", "anonymous", "shared", "threads", "files")
    result = {name: (middle(first, i), middle(last, i)) for i, name in enumerate(names)}
    return {"segments": len(memory), **result, "growth": result["rss"][1] / result["rss"][0] - 1}


def train(seed, cases, minutes=0.0, only=None, max_ranks=3, programs=False):
    """Runs it, with cases of random_programs.py where `programs` says so. {"cases", "segments", "wrong": [text],
    "growth": {"ranks.rank": {...}}, "orphans": [pid], "worst": {...}}."""
    first, last = (0, cases) if only is None else (only, only + 1)
    mark, result = uuid.uuid4().hex, {"seed": seed, "wrong": [], "growth": {}}
    began = time.time()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        script = pathlib.Path(__file__).parent / "random_ranks.py"
        words = [script, "--folder", folder, "--seed", seed, "--first", first, "--last", last, "--until",
                 began + 60 * minutes, "--max-ranks", max_ranks, *["--programs"] * programs]
        with concurrent.futures.ThreadPoolExecutor(max_ranks) as pool:
            done = list(pool.map(lambda ranks: _launch(ranks, words, folder, mark), range(1, max_ranks + 1)))
        for ranks, (status, out, err) in enumerate(done, 1):
            if status:
                now = (folder / "current").read_text() if (folder / "current").exists() else "the beginning"
                result["wrong"].append(f"exit status {status} of {ranks} ranks in {now}\n"
                                       f"{out[-3000:]}\n{err[-6000:]}")
        result.update(_read_reports(folder, result))
    time.sleep(0.2)
    result.update(orphans=_processes_with(mark), minutes=round((time.time() - began) / 60, 2))
    return result


def _read_reports(folder, result):
    segments, worst, seen, refused = 0, {}, set(), {}
    for path in sorted(folder.glob("report.*")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if rows:
            result["growth"][path.name.partition(".")[2]] = _growth([row["memory"] for row in rows])
        for row in rows:
            seen.add(row["case"])
            segments += "wrong" in row
            if "refused" in row:
                refused[row["case"]] = row["refused"]
            if row.get("wrong"):
                result["wrong"].append(f"case {row['case']}, segment {row['segment']}, {row['model']}: {row['wrong']}; "
                                       f"repeat it with --seed {result['seed']} --only {row['case']}")
            if row.get("finite") is False:
                result["wrong"].append(f"case {row['case']}: plain PyTorch diverges, so nothing is shown")
            worst[row["model"]] = max(worst.get(row["model"], 0), row.get("distance", 0))
    return {"cases": len(seen), "segments": segments, "worst": worst, "refused": refused}


def main():
    """By hand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--cases", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--max-ranks", type=int, default=3)
    parser.add_argument("--programs", action="store_true")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    result = train(options.seed, options.cases, options.minutes, options.only, options.max_ranks, options.programs)
    print(json.dumps({key: value for key, value in result.items() if key != "wrong"}, indent=1))
    print("\n".join(result["wrong"]) or "no mismatch")
    sys.exit(1 if result["wrong"] or result["orphans"] else 0)


if __name__ == "__main__":
    main()
