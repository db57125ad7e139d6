"""Tells a program that clips gradients as in plain PyTorch: an engine's parameters have no `.grad`, so nothing would be
clipped."""
from .. import ranks
from ..errors import UnsupportedError
from ..log import logger
from ..patches import Patches, Wrapped


class _Told:
    once = False


def _tell(parameters):
    if any(p.grad is not None for p in parameters):
        return
    ours = {id(p): engine for engine in ranks.living() for p in engine.module.parameters()}
    engine = next((ours[id(p)] for p in parameters if id(p) in ours), None)
    if engine is not None and engine.clips_otherwise:
        raise UnsupportedError(f"torch.nn.utils.clip_grad_norm_: {engine.clips_otherwise}")
    if engine is not None and not _Told.once:
        _Told.once = True
        logger.warning("torch.nn.utils.clip_grad_norm_ was called with an engine's parameters, whose gradients do not stand in .grad: it returns 0 and "
                       "clips nothing. Set \"gradient_clipping\" in the configuration; engine.get_global_grad_norm() tells the norm after step()")


def _refuse_values():
    raise UnsupportedError("torch.nn.utils.clip_grad_value_: the parameters have no gradient in .grad; those of an engine stand in its shards. Between backward() "
                           "and step(), on every rank: safe_set_full_grad(p, safe_get_full_grad(p).clamp(-value, value)) of deepspeed.utils, for each "
                           "parameter; or clip by norm, \"gradient_clipping\" in the configuration")


def _refusing_values(group):
    def group_or_refuse(lists, *args, **kwargs):
        if not lists[0] and ranks.living():
            _refuse_values()  # the other functions do not come here without gradients
        return group(lists, *args, **kwargs)

    return group_or_refuse


def _telling(clip):
    def clip_and_tell(parameters, *args, **kwargs):
        parameters = [parameters] if hasattr(parameters, "grad") else list(parameters)
        _tell(parameters)
        return clip(parameters, *args, **kwargs)

    return clip_and_tell


# Names that clip_grad_norm_() and clip_grad_value_() call, however the program has imported those two.
PATCHES = Patches(__name__, "an engine is made", [
    Wrapped("torch.nn.utils.clip_grad", "_group_tensors_by_device_and_dtype", "refuses `clip_grad_value_()` of an engine's parameters, whose gradients are not in `.grad`",
            _refusing_values),
    Wrapped("torch.nn.utils.clip_grad", "_clip_grads_with_norm_", "tells that `clip_grad_norm_()` of an engine's parameters clips nothing, or refuses it", _telling),
], ranks.living)
