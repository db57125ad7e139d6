"""Names of torch that programs call inside of a step function, where backward passes run later and tensors are on
stages."""
import functools

import torch
from torch.utils import checkpoint

from .. import ranks
from ..errors import StateError, UnsupportedError
from ..patches import Patches, Wrapped
from . import gradients, offload, program, trace


def no_graph(call):
    """The text of an error: a graph of gradients is asked for."""
    return (f"{call}: create_graph=True is not there yet: gradients are there when the forward pass of the micro-batch has ended, on each stage those of its own part, so "
            "that nothing can be computed from them in the step function; leave it out")


def _backward(original):
    """`loss.backward()` comes here, too."""
    def backward(tensors, grad_tensors=None, retain_graph=None, create_graph=False, grad_variables=None, inputs=None):
        if trace.is_tracing():
            return None  # which has no backward pass; the step has
        if (running := program.running()) is None:
            return original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        if inputs is not None:
            raise UnsupportedError(f"{running.name}: backward(inputs=…) is not there yet: one backward pass for each micro-batch goes to all parameters; leave it out, and "
                                   "freeze parameters by requires_grad_(False)")
        program.model(running.name).backward(tensors, grad_variables if grad_tensors is None else grad_tensors, retain_graph, create_graph)
        return None

    return backward


def _grad(original):
    def grad(*args, **kwargs):
        if (running := program.running()) is not None or trace.is_tracing():
            raise UnsupportedError(f"{running.name if running else 'smp.step'}: torch.autograd.grad() inside of a step function is not there yet: gradients are there when the "
                                   "forward pass of the micro-batch has ended; call model.backward(loss), and read them by safe_get_full_grad() after the step function")
        return original(*args, **kwargs)

    return grad


# The generator of torch 2.15, which the older one calls there.
_LATER = "_checkpoint_without_reentrant_generator_impl"


def _region(original):
    """checkpoint() takes the first step of this generator before its function and the second one afterwards."""
    def later(function, args, kwargs, *, context_fn=checkpoint.noop_context_fn, debug=False, **options):
        return _begun(function, args, context_fn, debug, lambda one, given: original(one, given, kwargs, context_fn=context_fn, debug=debug, **options))

    def generator(function, preserve_rng_state, context_fn, determinism_check, debug, *args, **kwargs):
        return _begun(function, args, context_fn, debug, lambda one, given: original(one, preserve_rng_state, context_fn, determinism_check, debug, *given, **kwargs))

    if original.__name__ == _LATER:
        return later
    return functools.partial(original) if hasattr(checkpoint, _LATER) else generator


def _begun(function, args, context_fn, debug, original):
    """The generator that `original` makes of a function and its arguments: of these, in a region where a step function
    runs."""
    running, model = program.running(), program.partitioned_or_none()
    if running is None or model is None or not torch.is_grad_enabled():
        return original(function, args)
    if context_fn is not checkpoint.noop_context_fn or debug:
        raise UnsupportedError(f"{running.name}: torch.utils.checkpoint with context_fn or debug inside of a step function is not there yet; leave them out")
    return _steps(running, model.engine("checkpoint()").core, function, lambda again: original(again, offload.kept(args)))


def _steps(running, core, function, original):
    def again(*args, **kwargs):
        with program.run_of(running), region, offload.inside():
            return function(*offload.brought_back(args), **kwargs)

    steps = original(again)
    next(steps)
    region = core.begin_region()
    try:
        with offload.inside():
            yield
    finally:
        region.end()
    yield from steps


def _not_reentrant(function, preserve_rng_state, *args):
    """A reentrant checkpoint's backward pass is one of its own, which knows nothing of what came from other stages."""
    return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def _casts_cleared(original):
    """Each context of autocast calls this at its end."""
    def clear_autocast_cache():
        model = program.partitioned_or_none()
        if program.running() is not None and model is not None:
            model.engine("autocast").core.end_autocast()
        original()

    return clear_autocast_cache


def _applied(original):
    """A custom function's node hangs on tensors of one stage, and of one piece of its backward pass.

    `original` is the descriptor: a class method of Python's in torch 2.11, one of C's in later versions."""
    def apply(cls, *args, **kwargs):
        run = original.__get__(None, cls)
        model = program.partitioned_or_none()
        if program.running() is None or model is None:
            return run(*args, **kwargs)
        if cls is checkpoint.CheckpointFunction:
            return _not_reentrant(*args)
        # a function of checkpoint's own keeps arguments where they are
        if model.engine("apply").over_one_stage or cls.__module__ == checkpoint.__name__:
            return run(*args, **kwargs)
        return _applied_on_one_stage(cls, run, model.engine("apply").core, args, kwargs)

    return apply


def _applied_on_one_stage(cls, run, core, args, kwargs):
    homes = [core.home_of(arg) for arg in args if isinstance(arg, torch.Tensor)]
    stage = max((home for home in homes if home is not None), default=None)
    if stage is None:
        return run(*args, **kwargs)

    def brought(arg):
        if not isinstance(arg, torch.Tensor) or (home := core.home_of(arg)) is None:
            return arg
        if home != stage:
            return core.move(arg, stage)
        return arg.clone() if torch.is_grad_enabled() and arg.requires_grad else arg  # an operator of this piece

    there = [brought(arg) for arg in args]
    results = run(*there, **kwargs)
    stand_ins = [one for one, arg in zip(there, args) if one is not arg]
    if any(result is one for result in (results if isinstance(results, (tuple, list)) else (results,)) for one in stand_ins):
        raise StateError(f"{cls.__qualname__}.apply: it writes or returns its argument, which inside of a step function over several stages is a copy; let it return a "
                         "new tensor")
    return results


PATCHES = Patches(__name__, "the tensors of an `smp.DistributedModel` get their stages", [
    Wrapped("torch.autograd", "backward", "inside of a step function it notes where backward passes begin, as `model.backward()`", _backward),
    Wrapped("torch.autograd", "grad", "refused inside of a step function", _grad),
    Wrapped("torch", "clear_autocast_cache", "inside of a step function a stage lets go of the weights that it has cast for this micro-batch", _casts_cleared),
    Wrapped("torch.autograd", "Function.apply", "inside of a step function the arguments of a custom function come to one stage", _applied),
    Wrapped("torch.utils.checkpoint", "_checkpoint_without_reentrant_generator", "inside of a step function what it computes again is computed on each stage by itself", _region,
            also=(f"torch.utils.checkpoint.{_LATER}",)),
    Wrapped("torch.amp", "GradScaler._unscale_grads_", "finds infinite gradients of all stages; all ranks skip a step, or none", gradients.unscaling),
], ranks.living)
