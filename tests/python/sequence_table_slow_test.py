"""All programs of zoo/sequence/: two and four ranks, Ulysses and ring."""
from harness import main
from sequence_table_test import Table


class All(Table):
    def test_two_ranks(self):
        self.assertGreater(len(self.check(timeout_s=900)), 150)

    def test_two_ranks_in_a_ring(self):
        self.check("--attention", "ring", timeout_s=900)

    def test_four_ranks(self):
        self.assertGreater(len(self.check("--ranks", 4, timeout_s=900)), 50)

    def test_four_ranks_in_a_ring(self):
        self.check("--ranks", 4, "--attention", "ring", timeout_s=900)

    def test_two_sequences_of_two_ranks(self):
        self.check("--ranks", 4, "--groups", 2, timeout_s=900)


if __name__ == "__main__":
    main()
