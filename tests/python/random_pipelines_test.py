"""A sample of random_pipelines.py: 6 pipelines of two and four stages, on four ranks."""
import json
import pathlib
import unittest

from harness import RankServer, main

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import

_RANKS = pathlib.Path(__file__).with_name("random_pipelines.py")
SEEDS = {4: (512, 6)}  # by ranks: the first seed, and how many; all schedules and ZeRO stages


class RandomPipelines(unittest.TestCase):
    seeds = SEEDS

    def test_have_the_losses_gradients_and_weights_of_plain_pytorch(self):
        for ranks, (first, count) in self.seeds.items():
            status, out, err = RankServer.run(ranks, [_RANKS, first, count], environment={"TRIREME_TIMEOUT_S": "30"}, timeout_s=1000)
            self.assertEqual(status, 0, out[-3000:] + err[-6000:])
            outcomes = json.loads(out.splitlines()[-1])
            self.assertEqual(len(outcomes), count)
            for seed, description, difference in outcomes:
                with self.subTest(seed=seed, pipeline=description):
                    self.assertLess(difference, 1e-4)


if __name__ == "__main__":
    main()
