"""The profile of one step of an engine, which the section flops_profiler asks for."""
import time

import torch

from ....log import logger
from . import report
from .profiler import FlopsProfiler, write


_OPTIONS = ("profile_step", "module_depth", "top_modules", "detailed")  # of a report


def _timed(engine, function, *args, **kwargs):
    """(result, seconds)."""
    synchronize = torch.cuda.synchronize if engine.device.type == "cuda" else lambda: None
    synchronize()
    begin = time.perf_counter()
    result = function(*args, **kwargs)
    synchronize()
    return result, time.perf_counter() - begin


def _report(write_to, path):
    """write_to(path), or where that fails write_to(None): a step that was applied does not fail by its report."""
    try:
        write_to(path)
    except OSError as error:
        logger.warning("flops_profiler.output_file: the report is on standard output, and training goes on: %s", error)
        write_to(None)


class _StepProfile:
    """Stands around an engine's forward(), backward() and step(). Of a step that accumulates several micro-batches the
    last one is told. Every rank counts, since counted operators are taken apart, and rank 0 reports."""

    def __init__(self, engine):
        self._engine, self._section = engine, engine.resolved_config["flops_profiler"]
        self._profiler = engine.flops_profiler
        self._forward, self._backward, self._step, self._destroy = engine.forward, engine.backward, engine.step, engine.destroy

    def _is_due(self):
        engine = self._engine
        return engine.training and torch.is_grad_enabled() and engine.global_steps == self._section["profile_step"]

    def forward(self, *inputs, **kwargs):
        """As the engine's; a profile begins where it is due."""
        if self._is_due():
            self._profiler.start_profile()
        return self._forward(*inputs, **kwargs)

    def backward(self, *args, **kwargs):
        """As the engine's."""
        if not self._profiler.started:
            return self._backward(*args, **kwargs)
        result, self._profiler.backward_seconds = _timed(self._engine, self._backward, *args, **kwargs)
        return result

    def step(self, *args, **kwargs):
        """As the engine's; the report follows the step."""
        if not self._profiler.started:
            return self._step(*args, **kwargs)
        self._profiler.stop_profile()
        ends = self._engine.is_gradient_accumulation_boundary()
        result, self._profiler.step_seconds = _timed(self._engine, self._step, *args, **kwargs)
        if ends:
            if self._engine.world.rank == 0:
                options = [self._section[key] for key in _OPTIONS]
                _report(lambda path: self._profiler.print_model_profile(*options, path), self._section["output_file"])
            self._profiler.end_profile()
        return result

    def destroy(self):
        """As the engine's."""
        self._profiler.end_profile()
        self._destroy()


class _BatchProfile:
    """Stands around a pipeline's train_batch(). Every rank counts its stage, in all micro-batches of the step; rank 0
    reports the stages of its pipeline, and their sums."""

    def __init__(self, engine):
        self._engine, self._section = engine, engine.resolved_config["flops_profiler"]
        self._profiler = engine.flops_profiler
        self._train_batch, self._destroy = engine.train_batch, engine.destroy

    def train_batch(self, data_iter=None):
        """As the engine's; the report follows the step. Collective."""
        if self._engine.global_steps != self._section["profile_step"]:
            return self._train_batch(data_iter)
        self._profiler.start_profile()
        try:
            loss, self._profiler.batch_seconds = _timed(self._engine, self._train_batch, data_iter)
            self._profiler.stop_profile()
            self._tell()
        finally:
            self._profiler.end_profile()
        return loss

    def _tell(self):
        step, seconds = self._section["profile_step"], self._profiler.batch_seconds
        lines = self._profiler.lines(*(self._section[key] for key in _OPTIONS))
        stages = self._engine.over_stages([self._profiler.sums(), lines])
        if self._engine.world.rank == 0:
            sums, texts = zip(*stages)
            whole = [*report.of_stages(sums, step, seconds), "", *(line for text in texts for line in [*text, ""])]
            _report(lambda path: write(whole, path), self._section["output_file"])

    def destroy(self):
        """As the engine's."""
        self._profiler.end_profile()
        self._destroy()


def attach(engine):
    """`engine.flops_profiler` is there from here on, and reports the step of the section. An engine without has nothing
    of this."""
    _attach(engine, _StepProfile, ("forward", "backward", "step", "destroy"))


def attach_to_pipeline(engine):
    """The same of a PipelineEngine."""
    _attach(engine, _BatchProfile, ("train_batch", "destroy"))


def _attach(engine, kind, names):
    engine.flops_profiler = FlopsProfiler(engine.module, engine)
    profile = kind(engine)
    for name in names:
        setattr(engine, name, getattr(profile, name))
