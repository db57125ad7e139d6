"""The engine that façades stand on: it trains under its own name, and a step of it, or of a pipeline, is one call that
waits for nothing."""
import ast
import json
import pathlib
import unittest.mock

import torch
import trireme
from harness import Case, main
from trireme import config as configs
from trireme._native import core
from trireme.engine import Engine
from trireme.pipe import PipelineModule
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
        self.assertEqual(loads.call_count, 1)  # what the program gave


class Crossing(Case):
    """A configuration crosses into the library, and back, as an object."""

    def test_values_come_back_as_they_went(self):
        options = {"a": [1, -2, 2.5, True, None, "ü", {"b": [], "c": {}}], "most": 2**64 - 1, "least": -2**63, "e": 1e300}
        found = core.options_of(options)
        self.assertEqual((found, list(map(type, found["a"]))), (options, list(map(type, options["a"]))))
        # as in a text
        self.assertEqual(core.options_of({"a": (2**64, 10**400, -10**400, float("inf"))}), {"a": [2.0**64, None, None, None]})

    def test_what_json_has_not_is_refused(self):
        circle = []
        circle.append(circle)
        for value, error, words in ((torch.ones(1), TypeError, "Object of type Tensor is not JSON serializable"), ({1: 2}, TypeError, "keys must be str"),
                                    ({"k" * 10_001: 1}, trireme.errors.ConfigError, "a key of 10001 bytes"),
                                    ([0] * 200_001, trireme.errors.ConfigError, "more than 200000 values"),
                                    (circle, trireme.errors.ConfigError, "deeper than 500 levels, or inside of themselves"),
                                    ("\ud800", trireme.errors.ConfigError, "has half of a character; correct it")):
            with self.subTest(words), self.assertRaisesRegex(error, words):
                core.options_of({"a": value})

    def test_none_crosses_as_text(self):
        stub = ast.parse((pathlib.Path(trireme.__file__).parent / "_core.pyi").read_text())
        texts = {f"{node.name}({argument.arg})" for node in ast.walk(stub) if isinstance(node, ast.FunctionDef) for argument in node.args.args
                 if argument.arg in ("config", "options", "section", "partition_config") and ast.unparse(argument.annotation) == "str"}
        self.assertEqual(texts, set())


class Calls:
    """An engine's core that tells which of its members were asked for; as one on a device it does not know yet how a
    step ended."""

    def __init__(self, core):
        self.core, self.asked, self.changes = core, [], None

    def __getattr__(self, name):
        self.asked.append(name)
        return getattr(self.core, name)

    def train_batch(self, next, changes):  # pylint: disable=redefined-builtin
        self.asked.append("train_batch")
        self.changes = changes
        return self.core.train_batch(next, changes)[0], None


class PipelineStep(Case):
    def setUp(self):
        config = {**CONFIG, "zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2}
        layers = [torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)]
        self.engine, self.optimizer, *_ = trireme.initialize(model=PipelineModule(layers, num_stages=1, loss_fn=torch.nn.functional.mse_loss), config=config)
        self.addCleanup(self.engine.destroy)
        self.batches = iter(lambda: (torch.ones(2, 3), torch.zeros(2, 1)), None)

    def test_it_is_one_call_that_waits_for_nothing(self):
        core = self.engine.core = Calls(self.engine.core)
        self.engine.train_batch(self.batches)
        self.engine.train_batch(self.batches)
        allowed = {"train_batch", "failure", "device", "known_hyperparameters"}
        self.assertEqual(sorted(set(core.asked) - allowed), [])
        self.assertEqual(core.asked.count("train_batch"), 2)

    def test_it_takes_what_the_program_has_changed(self):
        core = self.engine.core = Calls(self.engine.core)
        self.engine.train_batch(self.batches)
        self.assertEqual(core.changes, [])
        self.optimizer.param_groups[0]["weight_decay"] = 0.25
        self.engine.train_batch(self.batches)
        self.assertEqual([(number, values["weight_decay"]) for number, values in core.changes], [(0, 0.25)])
        self.assertEqual(core.core.hyperparameters(0)["weight_decay"], 0.25)

    def test_it_tells_whether_the_weights_changed(self):
        applied = []
        follow = self.engine._follow_step  # pylint: disable=protected-access
        with unittest.mock.patch.object(self.engine, "_follow_step", side_effect=lambda known: (applied.append(known), follow(known))):
            self.engine.train_batch(self.batches)
        self.assertEqual(applied, [True])
        self.assertEqual(self.engine.get_lr(), [self.engine.core.get_lr()])


if __name__ == "__main__":
    main()
