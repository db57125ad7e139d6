"""Programs that look at what they compute with (functions of their own, hooks, writes, sizes) train parts of sequences,
slices of layers and both as one process trains wholes."""
import json
import pathlib

from harness import Case, RankServer, main

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import

HERE = pathlib.Path(__file__).parent
LARGEST = 1e-5
_RUN = """
import sys
sys.path.insert(0, {here!r})
import json, os, pathlib
import parts_programs as programs
result = {{name: programs.compare(name, {sequence}, {tensor}, stage, optimizer) for name, stage, optimizer in {cases!r}}}
pathlib.Path(folder, os.environ["RANK"] + ".json").write_text(json.dumps(result))
"""


class Programs(Case):
    """Programs of parts_programs.py, which compare themselves on every rank."""

    def assert_right(self, sequence, tensor, cases, timeout_s=240):
        """`cases`: (name, ZeRO stage, optimizer)."""
        ranks = sequence * tensor
        self.on_ranks(ranks, _RUN.format(here=str(HERE), sequence=sequence, tensor=tensor, cases=cases), timeout_s=timeout_s)
        for rank in range(ranks):
            found = json.loads((self.folder / f"{rank}.json").read_text())
            self.assertEqual(set(found), {name for name, *_ in cases})
            for name, differences in found.items():
                self.assertLessEqual({"loss", "gradient", "weight"}, set(differences), name)
                for kind, (relative, where) in differences.items():
                    with self.subTest(name, sequence=sequence, tensor=tensor, rank=rank, kind=kind):
                        self.assertLessEqual(relative, LARGEST, where)


class Quick(Programs):
    def test_parts_of_sequences(self):
        self.assert_right(2, 1, [("LinearOfWholes", 3, "SGD"), ("NormByFunction", 2, "AdamW"), ("FusedLoss", 0, "SGD"), ("HookOfActivation", 1, "SGD"),
                                 ("TokensMaskedOut", 2, "AdamW"), ("TokenWritten", 3, "SGD")])

    def test_slices_of_layers(self):
        self.assert_right(1, 2, [("SwiGluByFunction", 3, "SGD"), ("GradientNormInLayer", 1, "SGD"), ("GradientsOfParameters", 2, "SGD"),
                                 ("BackwardOfSomeParameters", 0, "SGD"), ("TotalOfFunction", 2, "AdamW")])

    def test_both(self):
        self.assert_right(2, 2, [("Reversed", 0, "SGD"), ("NormInLayer", 2, "SGD"), ("OwnCheckpoint", 3, "AdamW")])

    def test_a_small_mistake_is_seen(self):
        found = self.on_ranks(2, f"import sys; sys.path.insert(0, {str(HERE)!r})" + """
import parts_programs as programs
result = programs.compare("Planted", 2, 1)
""")
        self.assertGreater(found["gradient"][0], LARGEST)
        self.assertGreater(found["weight"][0], LARGEST)


if __name__ == "__main__":
    main()
