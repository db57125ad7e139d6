"""Timers of a program and of an engine, under DeepSpeed's names."""
import collections
import time

import torch

from ...errors import ConfigError, StateError
from ..accelerator import get_accelerator
from ..missing import names_of
from .logging import log_dist

__getattr__ = names_of(__name__)

# The engine's timers, of a window and of a micro-batch.
FORWARD_GLOBAL_TIMER, FORWARD_MICRO_TIMER = "fwd", "fwd_microstep"
BACKWARD_GLOBAL_TIMER, BACKWARD_MICRO_TIMER = "bwd", "bwd_microstep"
BACKWARD_INNER_GLOBAL_TIMER, BACKWARD_INNER_MICRO_TIMER = "bwd_inner", "bwd_inner_microstep"
BACKWARD_REDUCE_GLOBAL_TIMER, BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce", "bwd_allreduce_microstep"
STEP_GLOBAL_TIMER, STEP_MICRO_TIMER = "step", "step_microstep"
GLOBAL_TIMERS = (FORWARD_GLOBAL_TIMER, BACKWARD_GLOBAL_TIMER, BACKWARD_INNER_GLOBAL_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER, STEP_GLOBAL_TIMER)
_TRIMMED = 0.1  # of the shortest and of the longest times, each, that a mean leaves out


class CudaEventTimer:  # pylint: disable=too-few-public-methods
    """The time between two events of a stream."""

    def __init__(self, start_event, end_event):
        self.start_event, self.end_event = start_event, end_event

    def get_elapsed_msec(self):
        """Waits for the later event."""
        self.end_event.synchronize()
        return self.start_event.elapsed_time(self.end_event)


class _HostTimer:  # pylint: disable=too-few-public-methods
    """The time between two moments of the host."""

    def __init__(self, begin, end):
        self._ms = 1e3 * (end - begin)

    def get_elapsed_msec(self):
        """Waits for nothing."""
        return self._ms


def _now():
    """This moment: an event of the stream where the accelerator has such timers."""
    if get_accelerator().use_host_timers():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin, end):
    return (_HostTimer if isinstance(end, float) else CudaEventTimer)(begin, end)


class SynchronizedWallClockTimer:
    """Timers by name: `timers("batch").start()`. On a GPU the times are those of its stream, and are waited for when
    they are asked for, not when they are taken."""

    class Timer:
        """Milliseconds from start() to stop(), added up since reset()."""

        def __init__(self, name):
            self.name_ = name
            self.started_ = False
            self.event_timers = []  # that are not yet added up
            self.start_event = None
            self.elapsed_records = []
            self._ms = 0.0

        def start(self):
            """Raises StateError: it runs already."""
            if self.started_:
                raise StateError(f"{self.name_} timer has already been started; call stop() first")
            self.start_event = _now()
            self.started_ = True

        def stop(self, reset=False, record=False):  # pylint: disable=unused-argument
            """Adds the time since start(), which mean() knows; with `reset` in place of what was added before.

            Raises  StateError: it does not run.
            """
            if not self.started_:
                raise StateError(f"{self.name_} timer is not started; call start() first")
            last = _between(self.start_event, _now())
            if reset:
                self._ms, self.event_timers = 0.0, []
            self.event_timers.append(last)
            self.started_, self.start_event = False, None
            self.elapsed_records.append(last.get_elapsed_msec())

        def add(self, ms):
            """A time that somebody else took, which mean() knows, in place of what was added up."""
            self._ms, self.event_timers = ms, []
            self.elapsed_records.append(ms)

        def reset(self):
            """Forgets all times, and stops."""
            self.started_, self.start_event = False, None
            self._ms, self.event_timers, self.elapsed_records = 0.0, [], []

        def elapsed(self, reset=True):
            """Milliseconds so far; one that runs goes on. With `reset` they are counted anew from here on."""
            runs = self.started_
            if runs:
                self.stop()
            self._ms += sum(timer.get_elapsed_msec() for timer in self.event_timers)
            self.event_timers = []
            ms = self._ms
            if reset:
                self._ms = 0.0
            if runs:
                self.start()
            return ms

        def mean(self):
            """Milliseconds of the stops since the last reset(), in the mean, without the tenth at either end."""
            return trim_mean(self.elapsed_records, _TRIMMED)

    def __init__(self):
        self.timers = collections.OrderedDict()

    def get_timers(self):
        """{name: Timer}."""
        return self.timers

    def has_timer(self, name):
        """Whether somebody has asked for this one."""
        return name in self.timers

    def __call__(self, name):
        """The Timer of this name, made where there is none."""
        if name not in self.timers:
            self.timers[name] = self.Timer(name)
        return self.timers[name]

    @staticmethod
    def memory_usage():
        """A text of the accelerator's memory, now and at most."""
        accelerator, giga = get_accelerator(), 1024**3
        return (f" | mem_allocated: {accelerator.memory_allocated() / giga:.4f} GB | max_mem_allocated: "
                f"{max(accelerator.max_memory_allocated(), accelerator.memory_allocated()) / giga:.4f} GB | cache_allocated: {accelerator.memory_cached() / giga:.4f} GB | "
                f"max_cache_allocated: {accelerator.max_memory_cached() / giga:.4f} GB")

    def log(self, names, normalizer=1.0, reset=True, memory_breakdown=False, ranks=None):
        """Logs the milliseconds of those timers of `names` that there are, over `normalizer`, on `ranks` (by default
        rank 0)."""
        _check_normalizer(normalizer)
        times = [f" | {name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}" for name in names if name in self.timers]
        log_dist("time (ms)" + "".join(times) + (self.memory_usage() if memory_breakdown else ""), ranks=ranks or [0])

    def get_mean(self, names, normalizer=1.0, reset=True):
        """{name: mean() over `normalizer`} of those that there are; with `reset` they forget their times."""
        _check_normalizer(normalizer)
        means = {}
        for name in names:
            if name in self.timers:
                means[name] = self.timers[name].mean() / normalizer
                if reset:
                    self.timers[name].reset()
        return means


def _check_normalizer(normalizer):
    if not normalizer > 0:
        raise ConfigError(f"timers: normalizer={normalizer!r}; use a number above 0")


class NoopTimer:
    """In place of a SynchronizedWallClockTimer, measures nothing."""

    class Timer:
        """The timer of every name."""

        def start(self):
            """Nothing."""

        def reset(self):
            """Nothing."""

        def stop(self, **kwargs):
            """Nothing."""

        def elapsed(self, **kwargs):  # pylint: disable=unused-argument
            """0."""
            return 0

        def mean(self):
            """0."""
            return 0

    def __init__(self):
        self.timer = self.Timer()

    def __call__(self, name):
        return self.timer

    def has_timer(self, name):  # pylint: disable=unused-argument
        """True: one stands for all."""
        return True

    def get_timers(self):
        """{}."""
        return {}

    def log(self, names, normalizer=1.0, reset=True, memory_breakdown=False, ranks=None):
        """Nothing."""

    def get_mean(self, names, normalizer=1.0, reset=True):
        """Nothing."""


class ThroughputTimer:
    """Samples per second, of the steps after the first ones.

    config            what has `enabled` and `synchronized`: whether the device is waited for at both ends.
    batch_size        samples of a step.
    start_step        steps that do not count.
    steps_per_output  a line is logged every so many steps; None: never.
    logging_fn        logs it; None: the logger of this package.
    """

    # pylint: disable=too-many-instance-attributes, too-many-arguments

    def __init__(self, config, batch_size, start_step=2, steps_per_output=None, monitor_memory=False, logging_fn=None):
        self.config, self.batch_size, self.start_step = config, 1 if batch_size is None else batch_size, start_step
        self.steps_per_output, self.monitor_memory = steps_per_output, monitor_memory
        self.logging = logging_fn or (lambda text: log_dist(text, ranks=[0]))
        self.start_time = self.end_time = 0
        self.started = self.initialized = False
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0

    def update_epoch_count(self):
        """Another epoch begins."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def _moment(self):
        if self.config.synchronized:
            get_accelerator().synchronize()
        return time.perf_counter()

    def start(self):
        """A micro-batch begins."""
        if not self.config.enabled:
            return
        self.initialized = self.started = True
        if self.global_step_count >= self.start_step:
            self.start_time = self._moment()

    def stop(self, global_step=False, report_speed=True):
        """It ends; `global_step`: with the step. A line is logged where one is due and `report_speed`."""
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        if global_step:
            self.global_step_count += 1
        if self.start_time > 0:
            self.end_time = self._moment()
            duration = self.end_time - self.start_time
            self.start_time = 0
            self.total_elapsed_time += duration
            self.step_elapsed_time += duration
        if not global_step:
            return
        if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0 and self.step_elapsed_time > 0:
            self._report()
        self.step_elapsed_time = 0

    def _report(self):
        text = (f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, CurrSamplesPerSec={self.batch_size / self.step_elapsed_time}")
        if self.monitor_memory:
            text += SynchronizedWallClockTimer.memory_usage()
        self.logging(text)

    def avg_samples_per_sec(self):
        """The rate of all steps that count; -inf: none has."""
        steps = self.global_step_count - self.start_step
        return self.batch_size * steps / self.total_elapsed_time if steps > 0 and self.total_elapsed_time > 0 else float("-inf")


def trim_mean(data, trim_percent):
    """The mean of numbers without that part of them at either end, 0 of none.

    Raises  ConfigError: `trim_percent` is not from 0 to 1.
    """
    if not 0 <= trim_percent <= 1:
        raise ConfigError(f"trim_mean: trim_percent={trim_percent!r}; use a number from 0 to 1")
    left_out = round(len(data) * trim_percent)
    kept = sorted(data)[left_out:len(data) - left_out]
    return sum(kept) / len(kept) if kept else 0
