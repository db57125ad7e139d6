"""Which features of Python programs go together with which settings and with each other. Makes the second part of
docs/compose.md."""
import copy
import json
import os
import pathlib
import unittest

from harness import RankServer, main

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import

_HERE = pathlib.Path(__file__).resolve().parent
_PAGE = _HERE.parents[1] / "docs" / "compose.md"
_HEADING = "\n## From Python\n"
_WORDS = """
Made by `compose_test.py`, which trains two ranks with each feature of Python programs under each setting, and with each pair of features at
ZeRO 3, on the host. It compares the gradient of every parameter in every step, before clipping and relative to that gradient's norm, the
global norm, the losses and the trained weights with those of one process that trains with plain PyTorch. `yes`, they are the same; a number,
it is refused with the text below. On the host nothing is offloaded, and the setting changes nothing. `compose_slow_test.py` does the same
with `torch.compile` by inductor. `TRIREME_UPDATE_DOCS=1` before `compose_test.py` writes this part anew.

"""


class _Table:
    """Rows of verdicts; refusals are numbered over all rows."""

    def __init__(self):
        self.refusals = []

    def cell(self, verdict):
        kind, _, text = verdict.partition(": ")
        if kind == "refused" and text not in self.refusals:
            self.refusals.append(text)
        return str(self.refusals.index(text) + 1) if kind == "refused" else kind

    def row(self, name, verdicts):
        return f"| {name} | " + " | ".join(self.cell(verdict) if verdict else "" for verdict in verdicts) + " |"


def _page(told):
    settings, pairs, table = told["settings"], told["pairs"], _Table()
    columns = list(next(iter(settings.values())))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [table.row(name, row.values()) for name, row in settings.items()]
    names = list(settings)
    lines += ["", "| | " + " | ".join(names[1:]) + " |", "|---" * len(names) + "|"]
    lines += [table.row(name, [pairs.get(name, {}).get(other) for other in names[1:]]) for name in names[:-1]]
    return "\n".join(lines) + "\n\n" + "".join(f"{number}. {text}\n" for number, text in enumerate(table.refusals, 1))


class Compose(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        status, out, err = RankServer.run(2, [_HERE / "compose_ranks.py"])
        if status:
            raise AssertionError(f"exit status {status}\n{out[-6000:]}\n{err[-6000:]}")
        cls.told = json.loads(out.splitlines()[-1])
        cls.left_out = [feature for feature, row in cls.told["settings"].items() if not row]
        print(f"{cls.told['compared']} runs compared with plain PyTorch; the largest difference of a gradient is {cls.told['largest']:.2g} of its norm")

    def test_features_train_as_in_plain_pytorch_or_are_refused(self):
        for table in (self.told["settings"], self.told["pairs"]):
            for feature, row in table.items():
                for other, verdict in (row or {}).items():
                    with self.subTest(feature=feature, other=other):
                        self.assertFalse(verdict.startswith("flaw"), verdict)

    def test_the_table_is_that_of_the_documentation(self):
        if self.left_out:
            self.skipTest(f"not installed: {', '.join(self.left_out)}")
        before, _, written = _PAGE.read_text().partition(_HEADING)
        written, mark, after = written.partition("\n## ")  # where another part of the page begins
        made = _WORDS + _page(self.told)
        if "TRIREME_UPDATE_DOCS" in os.environ:
            _PAGE.write_text(before + _HEADING + made + mark + after)
        else:
            self.assertEqual(written, made, "TRIREME_UPDATE_DOCS=1 compose_test.py writes docs/compose.md anew")

    def test_another_gradient_norm_loss_or_weight_is_found(self):
        from compose_ranks import ROUNDING, SIXTEEN_BITS, Feature, difference, in_plain_pytorch  # pylint: disable=import-outside-toplevel
        run = in_plain_pytorch(Feature(), 2)
        self.assertIsNone(difference(run, run, 0))

        def change_gradient(other, factor):
            other.gradients[1]["last.bias"] *= factor

        def change_norm(other, factor):
            other.norms[0] *= factor

        def change_loss(other, factor):
            other.losses[2] *= factor

        for change in (change_gradient, change_norm, change_loss):
            with self.subTest(change=change.__name__):
                other = copy.deepcopy(run)
                change(other, 1 + 1e-6)
                self.assertIsNotNone(difference(other, run, 0))
                self.assertIsNone(difference(other, run, ROUNDING))
                change(other, 2)
                self.assertIsNotNone(difference(other, run, SIXTEEN_BITS))
        other = copy.deepcopy(run)
        other.weights["last.bias"] += 1e-3
        self.assertIsNotNone(difference(other, run, ROUNDING))
        self.assertIsNone(difference(other, run, SIXTEEN_BITS))
        other.weights["last.bias"] += 1e-2
        self.assertIsNotNone(difference(other, run, SIXTEEN_BITS))
        other = copy.deepcopy(run)
        del other.gradients[0]["last.bias"]
        self.assertIsNotNone(difference(other, run, SIXTEEN_BITS))


if __name__ == "__main__":
    main()
