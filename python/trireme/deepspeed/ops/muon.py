"""Muon, https://kellerjordan.github.io/posts/muon."""
import torch

from ..missing import names_of
from ...training.each_parameter import EachParameter

__path__ = []  # runtime.zero.muon.muon_optimizer is this module, too
__getattr__ = names_of(__name__, "SingleDeviceMuon SingleDeviceMuonWithAuxAdam")


def _orthogonalise(matrix, steps):
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.t() if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.t() if is_tall else x


class Muon(EachParameter):
    """Momentum whose matrices are orthogonalised; of matrices alone.

    Given to initialize(), matrices of embeddings and output layers (by name) are updated by Adam there.
    Raises  ValueError: a parameter that is no matrix.
    """

    def __init__(self, params, lr=1e-3, weight_decay=0.0, momentum=0.95, ns_steps=5):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._steps = ns_steps
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(f"Muon: a parameter of shape {tuple(parameter.shape)} is no matrix; update it by another "
                                     "optimizer, or use the configuration's optimizer section, which gives such to Adam")

    @property
    def trireme_type(self):
        """(type, params) of the configuration's optimizer section that updates alike."""
        return "Muon", {"ns_steps": self._steps}

    def _update(self, parameter, group):
        momentum = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
        momentum.lerp_(parameter.grad, 1 - group["momentum"])
        direction = _orthogonalise(torch.lerp(parameter.grad, momentum, group["momentum"]), self._steps)
        scale = max(1.0, parameter.size(0) / parameter.size(1)) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"] * scale)
