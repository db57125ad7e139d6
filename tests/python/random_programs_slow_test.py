"""200 programs of random_training.py with optimizers, schedulers, groups and buffers of their own. TRIREME_TEST_SEED
chooses another seed.

By itself: ctest --test-dir build/release -R python.random_programs_slow_test
"""
import json
import os

import random_training
from harness import Case, main


class RandomPrograms(Case):
    """Against plain PyTorch, on 1 and 2 ranks, with saves and resumes."""

    def test_train_as_in_plain_pytorch_or_are_refused_by_name(self):
        result = random_training.train(seed=int(os.environ.get("TRIREME_TEST_SEED", "2026")), cases=200, max_ranks=2, programs=True)
        print(json.dumps({key: value for key, value in result.items() if key not in ("wrong", "growth")}))
        self.assertEqual(result["wrong"], [], "\n".join(result["wrong"]))
        self.assertEqual(result["orphans"], [])
        self.assertEqual(result["cases"], 200)
        self.assertLess(len(result["refused"]), 100)


if __name__ == "__main__":
    main()
