"""engine.step() over a device that has not told yet how the step ended: nobody waits for it until somebody asks."""
import torch
import trireme
from harness import Case, main

_WAIT = {"hyperparameters", "was_step_applied", "get_lr", "get_mom", "get_global_grad_norm", "loss_scale", "skipped_steps"}


class Untold:
    """An engine's core on the host that answers as one on a device does before the device has told."""

    def __init__(self, core):
        self.core, self.asked, self.changes = core, [], None
        self.before = core.hyperparameters(0)

    def __getattr__(self, name):
        if name in _WAIT:
            self.asked.append(name)
        return getattr(self.core, name)

    def step(self, changes):
        self.changes, self.before = changes, self.core.hyperparameters(0)
        return self.core.step(changes)[0], None

    def known_hyperparameters(self, group):
        return self.before


class StepOnDevice(Case):
    def setUp(self):
        torch.manual_seed(0)
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
                  "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 10, "warmup_type": "linear"}}}
        self.engine, self.optimizer, *_ = trireme.initialize(model=torch.nn.Linear(2, 1), config=config)
        self.addCleanup(self.engine.destroy)
        self.core = self.engine.core = Untold(self.engine.core)

    def step(self):
        self.engine.backward(self.engine(torch.ones(1, 2)).sum())
        self.engine.step()

    def test_waits_for_nothing_and_leaves_the_learning_rates_to_the_device(self):
        for _ in range(3):
            self.step()
            self.assertEqual(self.core.changes, [])
        self.assertEqual(self.core.asked, [])

    def test_param_groups_ask_when_they_are_read(self):
        for _ in range(3):
            self.step()
        self.assertEqual(self.optimizer.param_groups[0]["lr"], self.core.core.get_lr())
        self.assertEqual(self.core.asked, ["hyperparameters"])
        self.assertNotEqual(self.core.before["lr"], self.core.core.get_lr())

    def test_what_the_program_writes_meanwhile_is_the_next_steps(self):
        group = self.optimizer.param_groups[0]
        self.step()
        group["lr"] = 0.125
        self.assertEqual(self.optimizer.param_groups[0]["lr"], 0.125)
        self.step()
        self.assertEqual([(number, values["lr"]) for number, values in self.core.changes], [(0, 0.125)])


if __name__ == "__main__":
    main()
