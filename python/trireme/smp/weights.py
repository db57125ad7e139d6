"""How much the gradients of a micro-batch count: by its samples, and by the ranks that have a batch."""
import contextvars
import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class _Weight:
    share: float | None
    factor: float


_weight = contextvars.ContextVar("weight", default=_Weight(None, 1.0))


def begin(share, factor):
    """In this context, a micro-batch's, gradients count `share` times, None: once, where they are averaged over
    micro-batches, and `factor` times in any case."""
    _weight.set(_Weight(share, factor))


def weighted(root, gradient, has_shares):
    """The gradient of `root` that a backward pass begins with; None: the 1 of a loss."""
    found = _weight.get()
    weight = found.factor * (found.share if has_shares and found.share is not None else 1.0)
    if weight == 1.0:
        return gradient
    if gradient is not None:
        return gradient * weight if weight else torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    if root.numel() != 1:
        return None  # which the core refuses
    return torch.full(root.shape, weight, dtype=root.dtype, device=root.device)
