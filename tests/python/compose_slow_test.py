"""torch.compile by inductor, whose compilation takes its time, trains as plain PyTorch does."""
import json
import pathlib
import unittest

import harness
from harness import main

_RANKS = pathlib.Path(__file__).resolve().parent / "compose_ranks.py"


class ComposeSlow(unittest.TestCase):
    def test_a_model_that_inductor_compiles_has_the_gradients_of_plain_pytorch(self):
        feature = "torch.compile, inductor"
        status, out, err = harness.launch(2, [_RANKS, feature])
        self.assertEqual(status, 0, f"{out[-6000:]}\n{err[-6000:]}")
        self.assertEqual(json.loads(out.splitlines()[-1])["settings"], {feature: {"ZeRO 3": "yes"}})


if __name__ == "__main__":
    main()
