"""A sample of random_features.py beside plain PyTorch. TRIREME_TEST_SEED chooses another seed, which is printed;
random_feature_ranks.py repeats a program by it and its number.

    random_features_test.py PROGRAM SEED FIRST COUNT     by hand, a line for each program
"""
import collections
import json
import os
import pathlib
import re
import sys
import tempfile
import unittest

import harness
from harness import RankServer, main

RankServer.imports = ("torch._dynamo", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert")
_RANKS = pathlib.Path(__file__).with_name("random_feature_ranks.py")


def _told(out):
    """{number: {rank: (verdict, text)}} of what ranks have printed."""
    told = collections.defaultdict(dict)
    for line in out.splitlines():
        if line.startswith('{"program"'):
            row = json.loads(line)
            told[row["program"]][row["rank"]] = (row["verdict"], row["text"])
    return told


def _verdict(told, ranks, status, err):
    """(verdict, text) of one program, of what its ranks said."""
    kinds = {verdict for verdict, _ in told.values()}
    if len(told) < ranks:
        own = next((f"{kind}: {text}" for kind, text in told.values() if kind != "right"), "")
        return ("hang" if "Timeout (" in err else "crash"), f"exit status {status} with {len(told)} of {ranks} ranks: {own}\n{err[-3000:]}"
    if "refused" in kinds and len(kinds) > 1:
        return "alone", "; ".join(f"rank {rank} {verdict}: {text}" for rank, (verdict, text) in told.items())
    for kind in ("hang", "raw", "wrong", "lost", "refused"):
        if kind in kinds:
            return kind, next(text for verdict, text in told.values() if verdict == kind)
    return "right", ""


def outcomes(seed, numbers, tell=lambda number, program, verdict, text: None):
    """{number: (program, verdict, text)}; programs of the same number of ranks share them until one ends them."""
    from random_features import draw_program  # which needs the packages  # pylint: disable=import-outside-toplevel
    programs, found = {number: draw_program(seed, number) for number in numbers}, {}
    for ranks in sorted({program.ranks for program in programs.values()}):
        left = [number for number, program in programs.items() if program.ranks == ranks]
        while left:
            with tempfile.TemporaryDirectory() as folder:  # where programs save, also those that crash
                words = [_RANKS, seed, *left[:25]]
                status, out, err = RankServer.run(ranks, words, environment={"TRIREME_TIMEOUT_S": "30"}, folder=folder, timeout_s=2400)
            told = _told(out)
            for number in left[:25]:
                verdict = _verdict(told[number], ranks, status, err)
                found[number] = (programs[number], *verdict)
                tell(number, *found[number])
                left = left[1:]
                if verdict[0] not in ("right", "wrong"):
                    break
    return found


def reasons(found):
    """{a refusal without its numbers and names: how often}."""
    shortened = (re.sub(r"'[^']*'|\[[^]]*\]|\d+", "_", text)[:200] for _, verdict, text in found.values() if verdict == "refused")
    return dict(collections.Counter(shortened).most_common())


class RandomFeatures(unittest.TestCase):
    """Programs of two and three features are right, or refused by name."""
    seed, count = int(os.environ.get("TRIREME_TEST_SEED", "2026")), 40

    def test_combine_as_in_plain_pytorch_or_are_refused_by_name(self):
        print(f"seed {self.seed}", flush=True)
        found = outcomes(self.seed, range(self.count))
        counts = collections.Counter(verdict for _, verdict, _ in found.values())
        print(json.dumps({"seed": self.seed, **counts, "reasons": reasons(found)}, indent=1), flush=True)
        bad = [f"{verdict}: program {number} of seed {self.seed} ({program.describe()}): {text}" for number, (program, verdict, text) in sorted(found.items())
               if verdict not in ("right", "refused")]
        self.assertEqual(bad, [], "\n".join(bad))
        self.assertLessEqual(counts["refused"], 0.15 * self.count)
        self.assertEqual(len(found), self.count)


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[2].isdigit():
        harness.PROGRAM = sys.argv[1]
        result = outcomes(int(sys.argv[2]), range(int(sys.argv[3]), int(sys.argv[3]) + int(sys.argv[4])),
                          lambda number, program, verdict, text: print(f"{verdict} {number} {program.describe()}: {text}", flush=True))
        print(json.dumps({**collections.Counter(verdict for _, verdict, _ in result.values()), "reasons": reasons(result)}, indent=1))
    else:
        main()
