"""Tells a program that clips gradients as in plain PyTorch: an engine's parameters have no `.grad`, so nothing would be
clipped."""
import functools

from torch.nn.utils import clip_grad

from .. import ranks
from ..errors import UnsupportedError
from ..log import logger


class _Told:
    once = False


def _tell(parameters):
    if _Told.once or any(p.grad is not None for p in parameters):
        return
    ours = {id(p) for engine in ranks.engines if not engine.is_spent for p in engine.module.parameters()}
    if any(id(p) in ours for p in parameters):
        _Told.once = True
        logger.warning("torch.nn.utils.clip_grad_norm_ was called with an engine's parameters, whose gradients do not stand in .grad: it returns 0 and "
                       "clips nothing. Set \"gradient_clipping\" in the configuration; engine.get_global_grad_norm() tells the norm after step()")


def _refuse_values():
    raise UnsupportedError("torch.nn.utils.clip_grad_value_: the parameters have no gradient in .grad; those of an engine stand in its shards. Between backward() "
                           "and step(), on every rank: safe_set_full_grad(p, safe_get_full_grad(p).clamp(-value, value)) of deepspeed.utils, for each "
                           "parameter; or clip by norm, \"gradient_clipping\" in the configuration")


def watch():
    """From here on calls of torch.nn.utils.clip_grad_norm_ and clip_grad_value_ are looked at, however the program has
    imported them."""
    group = clip_grad._group_tensors_by_device_and_dtype  # pylint: disable=protected-access

    @functools.wraps(group)
    def group_or_refuse(lists, *args, **kwargs):
        if not lists[0] and any(not engine.is_spent for engine in ranks.engines):
            _refuse_values()  # the other functions do not come here without gradients
        return group(lists, *args, **kwargs)

    clip_grad._group_tensors_by_device_and_dtype = group_or_refuse  # pylint: disable=protected-access
    clip = clip_grad._clip_grads_with_norm_  # pylint: disable=protected-access

    @functools.wraps(clip)
    def clip_and_tell(parameters, *args, **kwargs):
        parameters = [parameters] if hasattr(parameters, "grad") else list(parameters)
        _tell(parameters)
        return clip(parameters, *args, **kwargs)

    clip_grad._clip_grads_with_norm_ = clip_and_tell  # pylint: disable=protected-access
