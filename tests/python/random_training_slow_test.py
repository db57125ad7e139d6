"""Half an hour of random_training.py. TRIREME_TEST_SEED and TRIREME_TEST_MINUTES choose others than a fixed seed
and 30."""
import json
import os

import random_training
from harness import Case, main


class RandomTraining(Case):
    """Models, stages, accumulation, saves and resumes drawn from a seed, in launches that live as long as the run."""

    def test_has_no_mismatch_no_leak_and_no_orphan(self):
        result = random_training.train(seed=int(os.environ.get("TRIREME_TEST_SEED", "2026")), cases=200,
                                       minutes=float(os.environ.get("TRIREME_TEST_MINUTES", "30")))
        print(json.dumps({key: value for key, value in result.items() if key != "wrong"}))
        self.assertEqual(result["wrong"], [], "\n".join(result["wrong"]))
        self.assertEqual(result["orphans"], [])
        self.assertGreaterEqual(result["cases"], 200)
        self.assertEqual(len(result["growth"]), 6)
        for rank, memory in result["growth"].items():
            with self.subTest(rank=rank):
                self.assertLess(memory["growth"], 0.02, memory)
                self.assertLessEqual(memory["files"][1], memory["files"][0] + 2, memory)
                self.assertLessEqual(memory["threads"][1], memory["threads"][0] + 2, memory)

    def test_of_another_seed_and_of_programs_own_optimizers_has_no_mismatch(self):
        result = random_training.train(seed=1, cases=12)
        self.assertEqual((result["wrong"], result["orphans"], result["cases"]), ([], [], 12))
        result = random_training.train(seed=1, cases=8, max_ranks=2, programs=True)
        self.assertEqual((result["wrong"], result["cases"]), ([], 8))
        self.assertLess(len(result["refused"]), 8)


if __name__ == "__main__":
    main()
