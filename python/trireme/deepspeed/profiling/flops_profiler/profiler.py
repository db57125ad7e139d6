"""FlopsProfiler and get_model_profile()."""
import pathlib
import sys

import torch

from ....errors import ConfigError, StateError, UnsupportedError
from ...missing import names_of
from . import report
from .quantities import (DEFAULT_PRECISION, bytes_to_string, duration_to_string, flops_to_string, macs_to_string, number_to_string,
                         params_to_string)
from .work import Work

__all__ = ["DEFAULT_PRECISION", "FlopsProfiler", "bytes_to_string", "duration_to_string", "flops_to_string", "get_model_profile", "macs_to_string",
           "number_to_string", "params_to_string"]
__getattr__ = names_of(__name__)


class FlopsProfiler:
    """Counts the multiply-adds of a model's operators on this rank, and times its modules.

    From start_profile() to stop_profile() everything counts that this thread runs, backward passes too. FLOPs are twice
    the multiply-adds (MACs) of matrix products, convolutions and attention. Totals without "backward" in their names
    are of forward. The model computes what it does without. At ZeRO stage 3, where ranks share layers or tokens, every
    rank calls this alike, and gets the numbers of its own operators.
    """

    def __init__(self, model, ds_engine=None, recompute_fwd_factor=0.0):
        """`recompute_fwd_factor` is not read: what backward computes again is counted."""
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.started = False
        self.backward_seconds = self.step_seconds = self.batch_seconds = None  # who times them says so
        self._work = None
        self._tree = None

    def start_profile(self, ignore_list=None):
        """Counts from here on, anew. `ignore_list`: classes of modules that have no numbers of their own; what they do
        is their caller's.

        Raises  UnsupportedError: a part of the model is compiled, whose kernels nobody can count.
        """
        self.end_profile()
        if compiled := next(filter(_is_compiled, self.model.modules()), None):
            raise UnsupportedError(f"FlopsProfiler: {type(compiled).__name__} is compiled, and what its kernels compute cannot be counted; profile the "
                                   "model before torch.compile()")
        self._work = Work(self.model)
        on_device = any(tensor.device.type == "cuda" for tensor in self.model.parameters())
        self._work.start(frozenset(ignore_list or ()), torch.cuda.synchronize if on_device else lambda: None)
        self.started = True

    def stop_profile(self):
        """The numbers stay. Raises StateError: on another thread than start_profile()."""
        if self._work is not None and self._work.is_running:
            self._work.stop()
            self._tree = None

    def reset_profile(self):
        """Forgets the numbers, and counts on."""
        self._tree = None
        if self._work is not None:
            self._work.reset()

    def end_profile(self):
        """Stops, and forgets everything."""
        self.stop_profile()
        self._work = self._tree = None
        self.backward_seconds = self.step_seconds = self.batch_seconds = None
        self.started = False

    # --- numbers -----------------------------------------------------------------------------------------------------

    def tree(self):
        """(the model's work.Place, {work.Place: work.Numbers}) so far.

        Raises  StateError: nothing is being profiled.
        """
        if self._work is None:
            raise StateError("FlopsProfiler: call start_profile() first; end_profile() forgets the numbers")
        if self._tree is not None:
            return self._tree
        tree = self._work.tree()
        if not self._work.is_running:
            self._tree = tree
        return tree

    def _total(self):
        root, numbers = self.tree()
        return numbers[root]

    def get_total_flops(self, as_string=False):
        """FLOPs of forward: twice get_total_macs()."""
        total = 2 * self._total().forward
        return number_to_string(total) if as_string else total

    def get_total_macs(self, as_string=False):
        """Multiply-adds of forward."""
        total = self._total().forward
        return macs_to_string(total) if as_string else total

    def get_total_backward_flops(self, as_string=False):
        """FLOPs of backward: gradients, and what is computed again for them."""
        total = 2 * (self._total().backward + self._total().recomputed)
        return number_to_string(total) if as_string else total

    def get_total_duration(self, as_string=False):
        """Seconds of forward."""
        total = self._total().seconds
        return duration_to_string(total) if as_string else total

    def get_total_params(self, as_string=False):
        """Elements of the model's parameters, each counted once."""
        total = self._total().params
        return params_to_string(total) if as_string else total

    def get_uncounted(self):
        """{operator: calls} of operators that ran and whose multiply-adds are not known: they are in no number."""
        self.tree()
        return self._work.uncounted

    # --- the report --------------------------------------------------------------------------------------------------

    def print_model_profile(self, profile_step=1, module_depth=-1, top_modules=1, detailed=True, output_file=None):
        """Prints the numbers of the step, of classes of modules by depth, and of every module.

        module_depth  of the classes; -1: every depth.
        top_modules   classes that are named at each depth.
        output_file   is written anew; None: standard output.
        """
        write(self.lines(profile_step, module_depth, top_modules, detailed), output_file)

    def lines(self, profile_step=1, module_depth=-1, top_modules=1, detailed=True):
        """The lines that print_model_profile() prints."""
        root, numbers = self.tree()
        lines = report.summary(numbers[root], self._run(), profile_step, self._work.uncounted)
        lines += report.aggregated(root, numbers, module_depth, top_modules)
        return lines + report.detailed(root, numbers) if detailed else lines

    def sums(self):
        """[parameters that no other stage has, multiply-adds forward, backward, computed again] of this rank."""
        total = self._total()
        own = sum(parameter.numel() for parameter in self.model.parameters() if not hasattr(parameter, "tied_owner"))
        return [own, total.forward, total.backward, total.recomputed]

    def print_model_aggregated_profile(self, module_depth=-1, top_modules=1):
        """Prints the classes of modules with most parameters, MACs and latency."""
        write(report.aggregated(*self.tree(), module_depth, top_modules), None)

    def _run(self):
        engine = self.ds_engine
        if engine is None:
            return report.Run(backward_seconds=self.backward_seconds, step_seconds=self.step_seconds)
        run = report.Run(engine.world_size, engine.dp_world_size, engine.mp_world_size, engine.train_micro_batch_size_per_gpu(), self.backward_seconds,
                         self.step_seconds)
        if self.batch_seconds is not None:
            run.stage, run.micro_batches, run.batch_seconds = engine.stage_id, engine.gradient_accumulation_steps(), self.batch_seconds
        return run


def _is_compiled(module):
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")  # pylint: disable=protected-access


def write(lines, path):
    """Prints lines, or writes them into a new file at `path`."""
    text = "\n".join(lines) + "\n"
    if path is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def get_model_profile(model, input_shape=None, args=(), kwargs=None, print_profile=True, detailed=True, module_depth=-1, top_modules=1, warm_up=1,
                      as_string=True, output_file=None, ignore_modules=None, mode="forward"):
    """(FLOPs, MACs, parameters) of a call of `model` in evaluation mode, as texts or as numbers.

    input_shape     of the one argument, which is made up; else `args` and `kwargs` are the arguments.
    warm_up         calls before the one that is profiled.
    ignore_modules  as start_profile()'s ignore_list.
    mode            "forward", or "generate" for model.generate().
    The other arguments are those of print_model_profile().
    Raises  ConfigError: no arguments, or another mode.
    """
    if mode not in ("forward", "generate"):
        raise ConfigError(f"get_model_profile: mode is {mode!r}; expected \"forward\" or \"generate\"")
    args, kwargs = list(args or ()), dict(kwargs or {})
    if input_shape is not None:
        some = next(model.parameters(), torch.empty(0))
        args = [torch.ones(tuple(input_shape), dtype=some.dtype, device=some.device)]
    if not args and not kwargs:
        raise ConfigError("get_model_profile: give args or kwargs of the model, or input_shape")
    call = model if mode == "forward" else model.generate
    profiler = FlopsProfiler(model)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for _ in range(warm_up):
            call(*args, **kwargs)
        profiler.start_profile(ignore_modules)
        call(*args, **kwargs)
        profiler.stop_profile()
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
        return profiler.get_total_flops(as_string), profiler.get_total_macs(as_string), profiler.get_total_params(as_string)
    finally:
        profiler.end_profile()
        for module, training in modes:
            module.training = training
