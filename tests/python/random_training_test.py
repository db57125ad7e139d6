"""A few cases of random_training.py."""
import random_training
from harness import Case, main


class RandomTraining(Case):
    """Models, stages, accumulation, saves and resumes drawn from a seed."""

    def test_gives_the_losses_and_weights_of_plain_pytorch(self):
        result = random_training.train(seed=1, cases=12)
        self.assertEqual(result["wrong"], [])
        self.assertEqual(result["orphans"], [])
        self.assertEqual(result["cases"], 12)


if __name__ == "__main__":
    main()
