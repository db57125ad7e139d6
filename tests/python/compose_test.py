"""Which features of Python programs go together with which settings. Makes the second part of docs/compose.md."""
import copy
import json
import os
import pathlib
import unittest

import harness
from harness import main

_HERE = pathlib.Path(__file__).resolve().parent
_PAGE = _HERE.parents[1] / "docs" / "compose.md"
_HEADING = "\n## From Python\n"
_WORDS = """
Made by `compose_test.py`, which trains two ranks with each feature of Python programs under each setting, on the host, and compares losses
and weights: with plain PyTorch at ZeRO 0, elsewhere with a run without the feature, or with the feature's own at ZeRO 0. `yes`, it is the same
training; a number, it is refused with the text below. On the host nothing is offloaded, and the setting changes nothing.
`TRIREME_UPDATE_DOCS=1` before `compose_test.py` writes this part anew.

"""


def _table(verdicts):
    settings = list(next(iter(verdicts.values())))
    refusals = []
    lines = ["| | " + " | ".join(settings) + " |", "|---" * (len(settings) + 1) + "|"]
    for feature, row in verdicts.items():
        cells = []
        for verdict in row.values():
            kind, _, text = verdict.partition(": ")
            if kind == "refused" and text not in refusals:
                refusals.append(text)
            cells.append(str(refusals.index(text) + 1) if kind == "refused" else kind)
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n" + "".join(f"{number}. {text}\n" for number, text in enumerate(refusals, 1))


class Compose(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        status, out, err = harness.launch(2, [_HERE / "compose_ranks.py"])
        if status:
            raise AssertionError(f"exit status {status}\n{out[-6000:]}\n{err[-6000:]}")
        verdicts = json.loads(out.splitlines()[-1])
        cls.verdicts = {feature: row for feature, row in verdicts.items() if row}
        cls.left_out = [feature for feature, row in verdicts.items() if not row]

    def test_features_train_as_they_would_alone_or_are_refused(self):
        for feature, row in self.verdicts.items():
            for setting, verdict in row.items():
                with self.subTest(feature=feature, setting=setting):
                    self.assertFalse(verdict.startswith("flaw"), verdict)

    def test_the_table_is_that_of_the_documentation(self):
        if self.left_out:
            self.skipTest(f"not installed: {', '.join(self.left_out)}")
        before, _, written = _PAGE.read_text().partition(_HEADING)
        made = _WORDS + _table(self.verdicts)
        if "TRIREME_UPDATE_DOCS" in os.environ:
            _PAGE.write_text(before + _HEADING + made)
        else:
            self.assertEqual(written, made, "TRIREME_UPDATE_DOCS=1 compose_test.py writes docs/compose.md anew")

    def test_another_loss_or_weight_is_found(self):
        from compose_ranks import ROUNDING, SIXTEEN_BITS, Feature, difference, in_plain_pytorch  # pylint: disable=import-outside-toplevel
        run = in_plain_pytorch(Feature(), 2)
        self.assertIsNone(difference(run, run, 0))
        other = copy.deepcopy(run)
        other.losses[2] *= 1 + 1e-7
        self.assertIsNotNone(difference(other, run, 0))
        self.assertIsNone(difference(other, run, ROUNDING))
        other.losses[2] *= 1.1
        self.assertIsNotNone(difference(other, run, SIXTEEN_BITS))
        other = copy.deepcopy(run)
        other.weights["last.bias"] += 1e-3
        self.assertIsNotNone(difference(other, run, ROUNDING))
        self.assertIsNone(difference(other, run, SIXTEEN_BITS))
        other.weights["last.bias"] += 1e-2
        self.assertIsNotNone(difference(other, run, SIXTEEN_BITS))


if __name__ == "__main__":
    main()
