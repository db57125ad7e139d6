"""Programs written for DeepSpeed, unchanged: the losses that DeepSpeed 0.19.8 had."""
import deepspeed_programs as programs
from harness import Case, RankServer, main, result_of


class Programs(Case):
    """One after the other in the same two processes, so that this takes no longer than it must."""

    def test_have_the_losses_of_deepspeed(self):
        words = {name: programs.words_of(name, stages[0]) for name, stages in programs.STAGES.items()}
        script = programs.FOLDER / "run_all.py"
        found = result_of(RankServer.run(programs.RANKS, [script, self.folder, *words.values()], as_deepspeed=True))
        recorded = programs.recorded()
        self.assertEqual(sorted(recorded), sorted(words))
        for name, expected in recorded.items():
            with self.subTest(program=name):
                # The record is of another processor, whose kernels may sum in another order.
                self.assertLess(programs.difference(found[words[name]], expected), 1e-3)

    def test_reports_that_differ_are_found(self):
        self.assertEqual(programs.difference({"losses": [1.0, 2.0]}, {"losses": [1.0, 2.5]}), 0.2)
        self.assertEqual(programs.difference({"losses": [1.0]}, {"losses": [1.0, 2.5]}), float("inf"))
        self.assertEqual(programs.difference({}, {"losses": []}), float("inf"))


if __name__ == "__main__":
    main()
