"""How much the gradients of a micro-batch count where not all have as many samples."""
import contextvars

import torch

_share = contextvars.ContextVar("share", default=None)


def set_share(share):
    """In this context, a micro-batch's, gradients count `share` times. 1: as those of a micro-batch among alike."""
    _share.set(share)


def weighted(root, gradient):
    """The gradient of `root` that a backward pass begins with; None: the 1 of a loss."""
    share = _share.get()
    if share is None:
        return gradient
    if gradient is not None:
        return gradient * share
    if root.numel() != 1:
        return None  # which the core refuses
    return torch.full(root.shape, share, dtype=root.dtype, device=root.device)
