"""The profile of one step of an engine, which the section flops_profiler asks for."""
import time

import torch

from ....log import logger
from .profiler import FlopsProfiler


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

    def _timed(self, function, *args, **kwargs):
        """(result, seconds)."""
        synchronize = torch.cuda.synchronize if self._engine.device.type == "cuda" else lambda: None
        synchronize()
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        synchronize()
        return result, time.perf_counter() - begin

    def forward(self, *inputs, **kwargs):
        """As the engine's; a profile begins where it is due."""
        if self._is_due():
            self._profiler.start_profile()
        return self._forward(*inputs, **kwargs)

    def backward(self, *args, **kwargs):
        """As the engine's."""
        if not self._profiler.started:
            return self._backward(*args, **kwargs)
        result, self._profiler.backward_seconds = self._timed(self._backward, *args, **kwargs)
        return result

    def step(self, *args, **kwargs):
        """As the engine's; the report follows the step."""
        if not self._profiler.started:
            return self._step(*args, **kwargs)
        self._profiler.stop_profile()
        ends = self._engine.is_gradient_accumulation_boundary()
        result, self._profiler.step_seconds = self._timed(self._step, *args, **kwargs)
        if ends:
            if self._engine.world.rank == 0:
                self._report({key: self._section[key] for key in ("profile_step", "module_depth", "top_modules", "detailed", "output_file")})
            self._profiler.end_profile()
        return result

    def _report(self, options):
        try:
            self._profiler.print_model_profile(**options)
        except OSError as error:  # a step that was applied does not fail by its report
            logger.warning("flops_profiler.output_file: the report is on standard output, and training goes on: %s", error)
            self._profiler.print_model_profile(**{**options, "output_file": None})

    def destroy(self):
        """As the engine's."""
        self._profiler.end_profile()
        self._destroy()


def attach(engine):
    """`engine.flops_profiler` is there from here on, and reports the step of the section. An engine without has nothing
    of this."""
    engine.flops_profiler = FlopsProfiler(engine.module, engine)
    profile = _StepProfile(engine)
    for name in ("forward", "backward", "step", "destroy"):
        setattr(engine, name, getattr(profile, name))
