"""Step time of Trireme's package with each of the configuration's listeners beside the same without, interleaved in one
run of the same ranks.

  observe_bench.py [--models tiny64,llama-9m] [--ranks 2] [--rounds 20] [--steps 10] [--smoke]

Rows: off; wall_clock_breakdown; comms_logger; tensorboard; timeline (all steps, with and without operators). ZeRO stage
3 in fp32 with gather="copy", so that there are gathers to tell of; one thread. A round makes a new engine for each row.
Times are of rank 0, each step begun at a barrier that is not timed; a ratio is the row's minimum or median over that of
`off`.
"""
import argparse
import json
import statistics
import sys
import tempfile
import time

from torch_peers import ADAMW, MODELS, make_batch, make_model, run_ranks

WARM_UP = 3
SAMPLES = {"tiny64": 16, "llama-9m": 2, "small": 2}


def keys_of(row, folder):
    """The keys that a row adds to the configuration."""
    timeline = {"enabled": True, "output_path": f"{folder}/timeline", "start_step": 1, "steps": 0, "operators": row == "timeline"}
    return {"off": {}, "wall_clock": {"wall_clock_breakdown": True}, "comms_logger": {"comms_logger": {"enabled": True}},
            "tensorboard": {"tensorboard": {"enabled": True, "output_path": folder}},
            "timeline": {"trireme": {"timeline": timeline}}, "timeline, no operators": {"trireme": {"timeline": timeline}}}[row]


def run_rank(case):
    """One rank; rank 0 prints the seconds of each row's steps."""
    import logging

    import torch
    import trireme
    from trireme.deepspeed import comm
    torch.set_num_threads(1)
    trireme.init_distributed(dist_backend="gloo", verbose=False)
    logging.getLogger("trireme").setLevel(logging.WARNING)  # a terminal is not what is measured
    shape, seconds = MODELS[case["model"]], {row: [] for row in case["rows"]}
    for _ in range(case["rounds"]):
        for row in case["rows"]:
            model, _ = make_model(torch, shape)
            keys = keys_of(row, case["folder"])
            config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, **keys, "trireme": {"gather": "copy", **keys.get("trireme", {})}}
            engine = trireme.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), config=config)[0]
            for index in range(WARM_UP + case["steps"]):
                tokens, targets = make_batch(torch, shape, index, SAMPLES.get(case["model"], 1), False)
                torch.distributed.barrier()
                start = time.perf_counter()
                engine.backward(engine(tokens, targets))
                engine.step()
                if index >= WARM_UP:
                    seconds[row].append(time.perf_counter() - start)
            engine.destroy()
            comm.configure(enabled=False)
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"seconds": seconds}), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny64,llama-9m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, once")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        run_rank(json.loads(arguments.rank_of))
        return
    if arguments.smoke:
        arguments.models, arguments.rounds, arguments.steps = "small", 1, 1
    for model in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            case = {"system": "trireme", "model": model, "folder": folder, "rounds": arguments.rounds, "steps": arguments.steps,
                    "rows": ["off", "wall_clock", "comms_logger", "tensorboard", "timeline, no operators", "timeline"]}
            rows = run_ranks(__file__, case, arguments.ranks)["seconds"]
        least, middle = min(rows["off"]), statistics.median(rows["off"])
        for row, seconds in rows.items():
            print(f"{model}  {row:24}  min {1e3 * min(seconds):8.3f} ms  median {1e3 * statistics.median(seconds):8.3f} ms  "
                  f"{min(seconds) / least:6.3f} / {statistics.median(seconds) / middle:6.3f} x off", flush=True)


if __name__ == "__main__":
    sys.exit(main())
