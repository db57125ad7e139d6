"""Reads the JSON lines of comm_bench and comm_gloo_bench.py from its input, prints one table and one JSON line. Used by
comm.sh."""
import argparse
import collections
import json
import statistics
import sys


def touched_bytes(operation, nbytes, ranks):
    """Bytes that one rank reads and writes in the copies which the operation needs; as in comm_bench.cpp."""
    others, part = nbytes * (ranks - 1) / ranks, nbytes / ranks
    return {
        "memcpy": 2 * nbytes,
        "all_gather": 2 * part + 2 * others,
        "reduce_scatter": 2 * others + nbytes + part,
        "all_reduce": 2 * others + nbytes + part + 2 * part + 2 * others,
    }.get(operation, 2 * nbytes)


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    seconds = collections.defaultdict(list)
    ranks = 2
    for line in sys.stdin:
        run = json.loads(line)
        ranks = run["ranks"]
        for row in run["rows"]:
            seconds[row["operation"], row["bytes"], run["system"]] += row["seconds"]
    memcpy = {nbytes * ranks: statistics.median(times) for (name, nbytes, _), times in seconds.items() if name == "memcpy"}
    print(f"{'operation':15} {'bytes':>10} {'min us':>10} {'median us':>10} {'of memcpy':>10} {'gloo min':>10} {'gloo median':>11} {'faster':>7}")
    rows = []
    for (name, nbytes, system), times in seconds.items():
        if system != "trireme" or name == "memcpy":
            continue
        gloo = seconds[name, nbytes, "gloo"]
        median = statistics.median(times)
        ideal = touched_bytes(name, nbytes, ranks) / (2 * nbytes / ranks) * memcpy[nbytes] if nbytes else None
        row = {"operation": name, "bytes": nbytes, "min_us": min(times) * 1e6, "median_us": median * 1e6,
               "of_memcpy": ideal / median if ideal else None, "gloo_min_us": min(gloo) * 1e6,
               "gloo_median_us": statistics.median(gloo) * 1e6, "faster": statistics.median(gloo) / median}
        rows.append(row)
        share = f"{row['of_memcpy']:.0%}" if ideal else "-"
        print(f"{name:15} {nbytes:10} {row['min_us']:10.1f} {row['median_us']:10.1f} {share:>10} {row['gloo_min_us']:10.1f} "
              f"{row['gloo_median_us']:11.1f} {row['faster']:6.1f}x")
    print(json.dumps({"benchmark": "comm", "ranks": ranks, "rows": rows}))


if __name__ == "__main__":
    main()
