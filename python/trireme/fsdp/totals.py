"""Totals: numbers of all elements of gradients, of which each rank has some."""
import torch

from .. import ranks
from ..errors import UnsupportedError


class Totals:
    """Joins what ranks have computed of their elements, so that each element counts once."""

    def __init__(self, tree):
        self._tree = tree

    def reduce(self, own, join):
        """The sum, max or min of a number of every rank, in its dtype. Collective."""
        return self._joined(own, join).to(own.dtype)

    def _joined(self, own, join):
        total = own.detach().reshape(1).to(torch.float64, copy=True)
        ranks.world().all_reduce(total, join)
        return total[0] / self._tree.engine.core.copies_of_gradients if join == "sum" else total[0]

    def norm(self, gradients, norm_type):
        """The norm over all elements of `gradients`. Collective."""
        parts = [gradient.own for gradient in gradients if gradient.own.numel()]
        if norm_type == float("inf"):
            return self._joined(torch.stack([part.abs().max() for part in parts]).max() if parts else torch.zeros(()), "max").float()
        if norm_type <= 0:
            raise UnsupportedError(f"the norm of order {norm_type} of sharded gradients is not there; take one above 0 or \"inf\"")
        norms = torch.stack(torch._foreach_norm(parts, norm_type, dtype=torch.float32)) if parts else torch.zeros(1)  # pylint: disable=protected-access
        return self._joined(norms.double().pow(norm_type).sum(), "sum").pow(1 / norm_type).float()

    def variance(self, gradient, correction):
        """The variance of all elements. Collective."""
        own, numel = gradient.own.double(), gradient.numel()
        mean = self._joined(own.sum(), "sum") / numel
        return self._joined((own - mean).square().sum(), "sum") / max(numel - correction, 0)
