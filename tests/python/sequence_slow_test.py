"""Five models of Hugging Face on parts of samples: two and four ranks, both kinds of attention, every ZeRO stage; by
heads also with padding."""
from harness import Case, main
from sequence_test import MODELS


class Models(Case):
    """Padding goes by heads alone, because a ring refuses masks; four ranks share two key heads."""

    def _compare(self, ranks):
        cases = [[name, attention, stage] for name in ("llama", "gpt2", "qwen2", "phi3", "bert") for attention in ("ulysses", "ring")
                 for stage in range(4)]
        differences = self.on_ranks(ranks, MODELS + f"result = [programs.difference(*case, {ranks}) for case in {cases}]", timeout_s=1200)
        for case, found in zip(cases, differences):
            with self.subTest(case, ranks=ranks):
                self.assertLess(found, 1e-5)

    def test_two_ranks(self):
        self._compare(2)

    def test_four_ranks(self):
        self._compare(4)

    def test_padding(self):
        for ranks in (2, 4):
            cases = [[name, "ulysses", stage] for name in ("llama", "gpt2", "qwen2", "phi3", "bert") for stage in (0, 3)]
            differences = self.on_ranks(ranks, MODELS + f"result = [programs.difference(*case, {ranks}, True) for case in {cases}]")
            for case, found in zip(cases, differences):
                with self.subTest(case, ranks=ranks):
                    self.assertLess(found, 1e-5)


if __name__ == "__main__":
    main()
