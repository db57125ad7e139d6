"""A few cases of random_training.py; random_training_slow_test.py has more."""
import random_training
from harness import Case, main


class RandomTraining(Case):
    """Models, stages, accumulation, saves and resumes drawn from a seed."""

    def test_gives_the_losses_and_weights_of_plain_pytorch(self):
        result = random_training.train(seed=1, cases=2, max_ranks=2)
        self.assertEqual(result["wrong"], [])
        self.assertEqual(result["orphans"], [])
        self.assertEqual(result["cases"], 2)

    def test_of_programs_own_optimizers_schedulers_groups_and_buffers_too(self):
        result = random_training.train(seed=1, cases=2, max_ranks=2, programs=True)
        self.assertEqual(result["wrong"], [])
        self.assertEqual(result["cases"], 2)
        self.assertLess(len(result["refused"]), 2)


if __name__ == "__main__":
    main()
