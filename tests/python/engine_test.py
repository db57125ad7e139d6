"""The engine that façades stand on trains under its own name."""
import json
import unittest.mock

import torch
import trireme
from harness import Case, main
from trireme import config as configs
from trireme.engine import Engine
from trireme.training.optimizers import EngineOptimizer

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 2},
          "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 10, "warmup_type": "linear"}}}


def model():
    torch.manual_seed(4)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def steps(engine, count=3):
    """The losses of a few steps."""
    losses = []
    for number in range(count):
        loss = engine(torch.full((2, 3), 0.5 + number)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


class Neutral(Case):
    def test_it_trains_as_deepspeeds_does(self):
        engine = Engine(model(), CONFIG)
        self.addCleanup(engine.destroy)
        other, *_ = trireme.initialize(model=model(), config=CONFIG)
        self.addCleanup(other.destroy)
        self.assertEqual(steps(engine), steps(other))
        self.assertEqual(engine.resolved_config, other.resolved_config)
        self.assertIs(type(engine.optimizer), EngineOptimizer)
        self.assertNotIsInstance(engine, trireme.DeepSpeedEngine)

    def test_it_has_no_members_of_a_facade(self):
        engine = Engine(model(), CONFIG)
        self.addCleanup(engine.destroy)
        with self.assertRaisesRegex(AttributeError, "neither the engine nor its module, Sequential, has an attribute 'monitor'"):
            engine.monitor  # pylint: disable=pointless-statement

    def test_a_checkpoint_goes_on_where_it_was_saved(self):
        engine = Engine(model(), CONFIG)
        self.addCleanup(engine.destroy)
        steps(engine)
        engine.save_checkpoint(self.folder)
        expected = steps(engine)
        engine.load_checkpoint(self.folder)
        self.assertEqual(steps(engine), expected)

    def test_a_configuration_is_read_once(self):
        read = configs.core.Config
        with unittest.mock.patch.object(configs.core, "Config", side_effect=read) as reads, unittest.mock.patch.object(json, "loads", side_effect=json.loads) as loads:
            engine, *_ = trireme.initialize(model=model(), config=CONFIG)
        self.addCleanup(engine.destroy)
        self.assertEqual(reads.call_count, 1)
        self.assertEqual(loads.call_count, 2)  # what the program gave, and what it resolves to


if __name__ == "__main__":
    main()
