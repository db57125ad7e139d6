"""Gradients of all stages between a step function and optimizer.step(): their norm, their clipping, and a scaler's look
for infinite ones."""
import torch

from .._native import core
from ..errors import ConfigError, StateError
from . import joining, program, ranks
from .config import state


def clip(engine, call, max_norm, norm_type=2.0):
    """Multiplies all gradients so that their norm is at most `max_norm`. Returns the norm before, -1 in fp16 where it
    is not finite. Collective.

    Raises  ConfigError: another order than 2. StateError: there are none.
    """
    if float(norm_type) != 2.0:
        raise ConfigError(f"{call}: norm_type={norm_type}; the norm of order 2 is there")
    parts = _reduced(engine, call)
    norm = _norm(engine, parts)
    if state.cfg.fp16 and not torch.isfinite(norm):
        return -1.0  # as FP16_Optimizer; optimizer.step() skips this step
    factor = float(max_norm) / (float(norm) + 1e-6)
    if not factor >= 1.0:  # of NaN, too, as torch's
        _multiply(parts, factor)
    return norm.float()


def limit(engine, call, max_norm):
    """Multiplies all gradients by max_norm / their norm where that is greater, as LAMB does before its update.
    Collective.

    Raises  StateError: there are none.
    """
    parts = _reduced(engine, call)
    norm = float(_norm(engine, parts))
    if norm > max_norm:
        _multiply(parts, max_norm / norm)


def _norm(engine, parts):
    """The norm of the gradients of all stages without their loss scale, in fp64. Collective."""
    squares = torch.zeros(1, dtype=torch.float64)
    weights = _weights(engine, parts) if ranks.tp_size() > 1 else {}
    for parameter, part in parts.items():
        weight = weights.get(parameter, 1.0)
        if weight is None:  # some elements are on more ranks than others
            part, weight = core.whole_of_parts(parameter, part), engine.core.copies_of_gradients / ranks.dp_size()
        squares += part.double().square().sum().cpu() * weight
    state.world.all_reduce(squares, "sum")
    scale = engine.core.loss_scale if state.cfg.fp16 else 1.0
    return (squares[0] / engine.core.copies_of_gradients).sqrt() / scale


def _weights(engine, parts):
    """{parameter: one over the number of ranks of a copy that have an element of its gradient; None: that differs}.
    Collective."""
    every = list(engine.module.parameters())  # of all stages, so that every rank adds up the same places
    counts = torch.tensor([parts[parameter].numel() if parameter in parts else 0 for parameter in every], dtype=torch.int64)
    state.world.all_reduce(counts, "sum")
    found = {}
    for parameter, count in zip(every, counts.tolist()):
        if parameter not in parts:
            continue
        whole = parameter.numel() * engine.core.copies_of_gradients
        found[parameter] = whole / count if count == whole or not engine.core.is_slice(parameter) else None
    return found


def _multiply(parts, factor):
    for parameter, part in parts.items():
        part.mul_(factor)
        core.gradient_written(parameter)


def unscaling(original):
    """A scaler's unscale_(): of a DistributedOptimizer, whose gradients are not in `.grad`. All ranks find the same."""
    def unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16):
        model = program.model_of(optimizer)
        if model is None or optimizer is not program.optimizer_of(model):
            return original(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        joining.refuse(model, "GradScaler.unscale_()")
        if state.cfg.fp16:
            raise StateError("GradScaler: `fp16` = true has a loss scale of its own, smp.DistributedOptimizer(static_loss_scale, dynamic_loss_scale); leave the scaler out")
        parts = _reduced(model.engine("scaler.unscale_()"), "scaler.unscale_()")
        if own := [part for part in parts.values() if part.numel()]:
            torch._amp_foreach_non_finite_check_and_unscale_(own, found_inf, inv_scale)  # pylint: disable=protected-access
        for parameter in parts:
            core.gradient_written(parameter)
        state.world.all_reduce(found_inf, "max")
        return {found_inf.device: found_inf}

    return unscale


def _reduced(engine, call):
    """{parameter: its elements that this rank updates, perhaps none, the memory that the step reads}, of this stage:
    the same parameters on its ranks. Collective."""
    if not engine.has_gradients:
        raise StateError(f"{call}: no step function has called backward() since gradients were dropped or taken; call the @smp.step function first")
    engine.refuse_mixed(call)
    if engine.comm_hook is not None:
        engine.comm_hook.reduce(engine)
    else:
        engine.core.reduce_gradients()
    own = [parameter for name, parameter in engine.module.named_parameters() if engine.homes[name] == engine.stage and parameter.requires_grad]
    parts = {parameter: core.gradient_part(parameter) for parameter in own}
    return {parameter: part for parameter, part in parts.items() if part is not None}
