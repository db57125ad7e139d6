"""DeepSpeed's learning-rate schedules for any torch optimizer; the library computes them.

One that stands in a configuration's `scheduler` section is the engine's own and needs none of these objects.
"""

import torch

from ..._native import core
from ...training.optimizer_copy import fill, set_momentum
from ...training.schedules import OWN_TYPES
from ..missing import names_of

__getattr__ = names_of(__name__)

__all__ = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "VALID_LR_SCHEDULES", "add_tuning_arguments",
           "get_config_from_args", "get_lr_from_config"]

VALID_LR_SCHEDULES = list(OWN_TYPES)
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = VALID_LR_SCHEDULES

# By schedule: (option of the command line, its type, default).
_TUNING = {
    LR_RANGE_TEST: [("lr_range_test_min_lr", float, 0.001), ("lr_range_test_step_rate", float, 1.0),
                    ("lr_range_test_step_size", int, 1000), ("lr_range_test_staircase", bool, False)],
    ONE_CYCLE: [("cycle_first_step_size", int, 1000), ("cycle_first_stair_count", int, -1), ("cycle_second_step_size", int, -1),
                ("cycle_second_stair_count", int, -1), ("decay_step_size", int, 1000), ("cycle_min_lr", float, 0.01),
                ("cycle_max_lr", float, 0.1), ("decay_lr_rate", float, 0.0), ("cycle_momentum", bool, False),
                ("cycle_min_mom", float, 0.8), ("cycle_max_mom", float, 0.9), ("decay_mom_rate", float, 0.0)],
    WARMUP_LR: [("warmup_min_lr", float, 0.0), ("warmup_max_lr", float, 0.001), ("warmup_num_steps", int, 1000),
                ("warmup_type", str, "log")],
    WARMUP_COSINE_LR: [("warmup_min_ratio", float, 0.01), ("cos_min_ratio", float, 0.01), ("total_num_steps", int, 10000)],
}


class _Schedule:
    """step() after each optimizer step moves every group's lr, and betas or momentum where the schedule has them."""

    def __init__(self, optimizer, params, last_batch_iteration):
        if not isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is not an Optimizer")
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        section = {"type": type(self).__name__, "params": params}
        self._schedule = core.Schedule(section, [float(group["lr"]) for group in optimizer.param_groups])
        self._last_lr = [group["lr"] for group in optimizer.param_groups]
        if last_batch_iteration == -1:
            self._write()  # so that the optimizer's first step has the schedule's first learning rate

    def _write(self):
        applied = self.last_batch_iteration + 1
        for index, group in enumerate(self.optimizer.param_groups):
            fill(group, "lr", self._schedule.lr(applied, index))
            momentum = self._schedule.momentum(applied, index)
            if momentum is not None:
                set_momentum(group, momentum, self._schedule.cycle_beta2)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration=None):
        """To the next step, or the one that is given."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self._write()

    def get_lr(self):
        """The rates of the next step, by parameter group."""
        return [self._schedule.lr(self.last_batch_iteration + 1, index) for index in range(len(self.optimizer.param_groups))]

    def get_last_lr(self):
        """The rates that were written last, by parameter group."""
        return self._last_lr

    def state_dict(self):
        """The count of steps."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict):
        """Continues where state_dict() was taken; the learning rates change with the next step()."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]


class LRRangeTest(_Schedule):
    """The learning rate grows every step (or in stairs) to find where training diverges."""

    def __init__(self, optimizer, lr_range_test_min_lr=1e-3, lr_range_test_step_size=2000, lr_range_test_step_rate=1.0,
                 lr_range_test_staircase=False, last_batch_iteration=-1):
        params = {"lr_range_test_min_lr": lr_range_test_min_lr, "lr_range_test_step_size": lr_range_test_step_size,
                  "lr_range_test_step_rate": lr_range_test_step_rate, "lr_range_test_staircase": lr_range_test_staircase}
        super().__init__(optimizer, params, last_batch_iteration)


class OneCycle(_Schedule):
    """One cycle of the learning rate up and down, of momentum down and up, then decay; arXiv:1803.09820."""

    def __init__(self, optimizer, cycle_min_lr, cycle_max_lr, decay_lr_rate=0.0, cycle_first_step_size=2000,
                 cycle_second_step_size=None, cycle_first_stair_count=0, cycle_second_stair_count=None, decay_step_size=0,
                 cycle_momentum=True, cycle_min_mom=0.8, cycle_max_mom=0.9, decay_mom_rate=0.0, last_batch_iteration=-1):
        given = {key: value for key, value in locals().items() if key.startswith(("cycle_", "decay_")) and value is not None}
        super().__init__(optimizer, given, last_batch_iteration)

    def get_mom(self):
        """(beta1, beta2) of the next step, by parameter group; None without cycle_momentum."""
        applied = self.last_batch_iteration + 1
        momenta = [self._schedule.momentum(applied, index) for index in range(len(self.optimizer.param_groups))]
        return None if None in momenta else [(momentum, self._schedule.cycle_beta2) for momentum in momenta]


class WarmupLR(_Schedule):
    """From warmup_min_lr to warmup_max_lr (None: the group's lr) in warmup_num_steps, then constant; by "log" or
    "linear"."""

    def __init__(self, optimizer, warmup_min_lr=0.0, warmup_max_lr=None, warmup_num_steps=1000, warmup_type="log",
                 last_batch_iteration=-1):
        params = {"warmup_min_lr": warmup_min_lr, "warmup_num_steps": warmup_num_steps, "warmup_type": warmup_type}
        if warmup_max_lr is not None:
            params["warmup_max_lr"] = warmup_max_lr
        super().__init__(optimizer, params, last_batch_iteration)


class WarmupDecayLR(_Schedule):
    """WarmupLR, then linearly down to warmup_min_lr at total_num_steps."""

    def __init__(self, optimizer, total_num_steps, warmup_min_lr=0.0, warmup_max_lr=0.001, warmup_num_steps=1000, warmup_type="log",
                 last_batch_iteration=-1):
        params = {"total_num_steps": total_num_steps, "warmup_min_lr": warmup_min_lr, "warmup_max_lr": warmup_max_lr,
                  "warmup_num_steps": warmup_num_steps, "warmup_type": warmup_type}
        super().__init__(optimizer, params, last_batch_iteration)


class WarmupCosineLR(_Schedule):
    """Ratios of the group's lr: from warmup_min_ratio to 1 in warmup_num_steps, then half a cosine to cos_min_ratio."""

    def __init__(self, optimizer, total_num_steps, warmup_min_ratio=0.0, warmup_num_steps=1000, cos_min_ratio=0.0001,
                 warmup_type="log", last_batch_iteration=-1):
        params = {"total_num_steps": total_num_steps, "warmup_min_ratio": warmup_min_ratio, "warmup_num_steps": warmup_num_steps,
                  "cos_min_ratio": cos_min_ratio, "warmup_type": warmup_type}
        super().__init__(optimizer, params, last_batch_iteration)


def add_tuning_arguments(parser):
    """Adds --lr_schedule and the schedules' parameters to an argparse parser, which it returns."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    group.add_argument("--lr_schedule", type=str, default=None, help="LR schedule for training.")
    for schedule, options in _TUNING.items():
        for name, kind, default in options:
            group.add_argument(f"--{name}", type=kind, default=default, help=f"{schedule}: {name}.")
    return parser


def get_config_from_args(args):
    """(scheduler section, None) of what add_tuning_arguments() added, or (None, what is wrong)."""
    schedule = getattr(args, "lr_schedule", None)
    if schedule is None:
        return None, "--lr_schedule not specified on command line"
    if schedule not in VALID_LR_SCHEDULES:
        return None, f"{schedule} is not supported LR schedule"
    options = _TUNING.get(schedule, []) + (_TUNING[WARMUP_LR] if schedule in (WARMUP_DECAY_LR, WARMUP_COSINE_LR) else [])
    names = [name for name, _, _ in options] + (["total_num_steps"] if schedule == WARMUP_DECAY_LR else [])
    given = {name: getattr(args, name, None) for name in names}
    return {"type": schedule, "params": {name: value for name, value in given.items() if value is not None}}, None


def get_lr_from_config(config):
    """(highest learning rate, "") of a scheduler section, or (None, what is wrong)."""
    if "type" not in config or "params" not in config:
        return None, "LR schedule type or params not defined in config"
    kind, params = config["type"], config["params"]
    if kind not in VALID_LR_SCHEDULES:
        return None, f"{kind} is not a valid LR schedule"
    return params[{LR_RANGE_TEST: "lr_range_test_min_lr", ONE_CYCLE: "cycle_max_lr"}.get(kind, "warmup_max_lr")], ""
