"""@smp.step: a function that every rank runs on each micro-batch, over the stages of the model."""
import contextlib
import contextvars
import copy
import dataclasses
import functools
import json
import threading
import types

import torch

from ..errors import ConfigError, StateError, UnsupportedError
from . import inputs, joining, kept, program, ranks, samples, trace, weights
from .config import state
from .containers import rebuilt
from .model import Unwound
from .outputs import merged
from .split import Splitter


def step(function=None, *, non_split_inputs=(), input_split_axes=None, detach_outputs=True):
    """A decorator, with or without arguments, of functions and methods. The function is run for each micro-batch, on
    that part of the arguments; it calls the model and, in training, model.backward(). The optimizer is stepped outside.

    All ranks call it, and compute on what the first rank of their pipeline was given. Its results: a StepOutput in the
    place of each tensor, detached and with its numbers on every rank; of anything else the list of what the
    micro-batches have.

    non_split_inputs    names of arguments that every micro-batch gets whole
    input_split_axes    {name of an argument: dim along which its tensors are cut}; 0 for all others
    """
    if detach_outputs is not True:
        raise UnsupportedError(f"smp.step(detach_outputs={detach_outputs!r}): results are detached, since the graph behind them is on several ranks, and its backward passes "
                               "have run; call model.backward() inside of the function, and leave it out")
    if function is None:
        return functools.partial(step, non_split_inputs=non_split_inputs, input_split_axes=input_split_axes)
    if not callable(function):
        raise ConfigError(f"smp.step({function!r:.60}): expected a function")
    return Step(function, non_split_inputs, input_split_axes)


class Step:
    """A step function."""

    def __init__(self, function, non_split_inputs, input_split_axes):
        functools.update_wrapper(self, function)
        self._function = function
        self._splitter = Splitter(function, non_split_inputs, input_split_axes)
        self._name = f"smp.step: {getattr(function, '__qualname__', type(function).__name__)}()"
        self._key = f"{getattr(function, '__module__', '')}: {self._name}"  # of what the engine learns of it

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args, **kwargs):
        if program.running() is not None:
            raise StateError(f"{self._name} was called inside of another step function; call the plain function there")
        models = program.agreed_models(state.world) or [program.model(self._name)]
        if (joined := joining.of(models, self._name)) is not None:
            joined.meet_step(self, self._name, args, kwargs)
        micro_batches = state.cfg.microbatches
        agenda = {"the step function": self._name, "torch.is_grad_enabled()": torch.is_grad_enabled(), "the number of models": len(models),
                  "model.training": all(model.training for model in models), "which models train": "".join("-+"[model.training] for model in models)}
        args, kwargs = inputs.agreed(self._name, args, kwargs, agenda)
        parts = self._splitter.split(args, kwargs, micro_batches)
        batches, rows = parts.batches, None
        if ranks.tp_size() > 1 and not state.cfg.prescaled_batch:
            batches, rows = samples.joined(self._name, self._splitter, batches)
        if not all(model.partitioned for model in models):
            self._partition(models, batches)
        with _without_inference_mode(), torch.no_grad() if state.cfg.pipeline == "_only_forward" else contextlib.nullcontext():
            return self._run(models, batches, rows, parts.shares)

    def _partition(self, models, batches):
        """Runs until a model is called, whose tensors get their homes then, and those of the others after it.
        Collective."""
        if not state.cfg.auto_partition or state.cfg.skip_tracing:
            for model in models:
                model.partition()
            return
        call, failure = None, None
        try:
            with trace.generators_put_back(_joined(models)), program.run_of(program.Running(self._name, is_probe=True)):
                self._function(*batches[0][0], **batches[0][1])
            failure = StateError(f"{self._name} has not called the model, by whose first call its tensors get their stages; call the DistributedModel in the first step")
        except Unwound as reached:
            call = reached
        except Exception as error:  # pylint: disable=broad-exception-caught
            failure = error
        told = [failure and f"{type(failure).__name__}: {failure}", call and models.index(call.model)]
        texts, indices = zip(*(json.loads(text) for text in state.world.gather(json.dumps(told))))
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text is not None:
                raise StateError(f"{self._name}: rank {rank} failed before it called the model: {text}")
        called = models[indices[0]]  # rank 0's: its arguments decide
        called.partition(call.args_of_call, call.kwargs_of_call)
        for model in models:
            if model is not called:
                model.partition(called=called)

    def _run(self, models, batches, rows, shares):
        templates = [None] * len(batches)
        contexts = [contextvars.copy_context() for _ in batches]  # a micro-batch may run in a thread of its own
        joined = joining.of(models, self._name)
        factor = 1.0 if joined is None else joined.factor
        for context, share in zip(contexts, shares or [None] * len(batches)):
            context.run(weights.begin, None if share is None else share * len(batches), factor)
        engine, *others = [model.engine(self._name) for model in models]
        takes_turns = not engine.over_one_stage and torch.is_grad_enabled() and state.cfg.schedule != "sequential"
        watch = kept.Watch(_joined([model.module for model in models]), engine.core.changes_state) if takes_turns else None
        here = threading.get_ident()

        def of_micro_batch(index):
            with program.run_of(program.Running(self._name)), watch.forward() if watch else contextlib.nullcontext():
                try:
                    result = contexts[index].run(self._function, *batches[index][0], **batches[index][1])
                except AttributeError as error:
                    if threading.get_ident() != here and hasattr(error, "add_note"):
                        error.add_note(f"{self._name}: this micro-batch runs in a thread of its own, which has not what the program keeps in a threading.local of another; "
                                       "\"pipeline\": \"sequential\" runs all in one")
                    raise
                templates[index], tensors = taken(result)
            return tensors

        with kept.seen() if watch else contextlib.nullcontext(), joined.stepping() if joined else contextlib.nullcontext():
            outputs = engine.run(len(batches), of_micro_batch, self._key, models[0], others)
        if rows is not None:
            outputs = [[row.of_this_rank(self._name, tensor) for tensor in tensors] for row, tensors in zip(rows, outputs)]
        result = merged([filled(template, tensors) for template, tensors in zip(templates, outputs)], shares)
        for model in models:
            model.finish_step()
        return result


def _joined(modules):
    """One module that has these."""
    return modules[0] if len(modules) == 1 else torch.nn.ModuleList(modules)


@contextlib.contextmanager
def _without_inference_mode():
    """No gradients in place of inference mode, whose tensors have no versions, by which stages know what they have."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@dataclasses.dataclass(frozen=True)
class _Slot:
    """The place of a tensor in a structure."""

    index: int


def taken(value):
    """(`value` with a _Slot in the place of each tensor in lists, tuples, sets, dicts and dataclasses, the tensors)."""
    tensors = []

    def slotted(tensor):
        if not isinstance(tensor, torch.Tensor):
            return tensor
        tensors.append(tensor)
        return _Slot(len(tensors) - 1)

    return _mapped(slotted, value), tensors


def filled(template, tensors):
    """The structure of taken() with these tensors."""
    return _mapped(lambda value: tensors[value.index] if isinstance(value, _Slot) else value, template)


def _mapped(function, value):
    if isinstance(value, (torch.Tensor, _Slot)):
        return function(value)
    if isinstance(value, dict):
        return rebuilt(value, {key: _mapped(function, inner) for key, inner in value.items()})
    if isinstance(value, (list, tuple, set, frozenset)):
        return rebuilt(value, [_mapped(function, inner) for inner in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, _mapped(function, getattr(value, field.name)))
        return made
    return value
