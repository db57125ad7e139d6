"""Ranks that share layers train as one process does: a Llama at ZeRO 0 and 3. And what compares them sees mistakes."""
import pathlib
import unittest

from harness import Case, RankServer, main

RankServer.imports = ("torch._dynamo", "transformers")

HERE = pathlib.Path(__file__).parent
PROGRAMS = f"import sys; sys.path.insert(0, {str(HERE)!r}); import tensor_programs as programs\n"
LARGEST = 1e-5
_HAS_AXIS = "import trireme; result = hasattr(trireme._native.core.EngineBase, 'check_same_inputs')"


class Families(Case):
    """Cases are (family, ranks of a layer, ZeRO stage)."""

    _has_axis = None

    def compare(self, ranks, cases, planted=None, timeout_s=240):
        """{case: {kind: [difference, where]}}. Skips: this library has no axis "tensor"."""
        if any(tensor > 1 for _, tensor, _ in cases):
            if Families._has_axis is None:
                Families._has_axis = self.on_ranks(0, _HAS_AXIS)
            if not Families._has_axis:
                raise unittest.SkipTest("engines of this library do not share layers")
        found = self.on_ranks(ranks, PROGRAMS + f"result = [programs.differences(*case, {planted!r}) for case in {cases!r}]", timeout_s=timeout_s)
        return dict(zip(map(tuple, cases), found))

    def assert_equal_to_plain(self, ranks, cases, **options):
        for case, differences in self.compare(ranks, cases, **options).items():
            for kind, (relative, where) in differences.items():
                if case[1] > 1 and kind in ("gradients", "weights"):
                    continue  # safe_get_full_*() are of slices
                with self.subTest(case, ranks=ranks, kind=kind):
                    self.assertLessEqual(relative, LARGEST, where)


class Quick(Families):
    def test_two_ranks_that_share_layers_train_as_one_process(self):
        self.assert_equal_to_plain(2, [["llama", 2, 0], ["llama", 2, 3]])

    def test_ranks_that_take_other_samples_train_as_one_process(self):
        self.assert_equal_to_plain(2, [["gpt2", 1, 0], ["t5", 1, 3]])

    def test_a_small_mistake_is_seen(self):
        for planted, kinds in (("gradient", {"gradients", "weights"}), ("weight", {"weights"}), ("loss", {"losses", "norms", "gradients"})):
            (differences,) = self.compare(2, [["llama", 1, 2]], planted).values()
            for kind in kinds:
                with self.subTest(planted=planted, kind=kind):
                    self.assertGreater(differences[kind][0], LARGEST)


if __name__ == "__main__":
    main()
