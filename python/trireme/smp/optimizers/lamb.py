"""LAMB, arXiv:1904.00962, under apex's name."""
import math

import torch

from ...errors import ConfigError, UnsupportedError
from .apex import ApexOptimizer, adam_direction

_ANY_RATIO = {"min_coeff": 0.0, "max_coeff": 1e300}  # apex bounds no trust ratio


class FusedLamb(ApexOptimizer):
    """Adam's step, scaled for each parameter to the size of its weights; of gradients whose norm, of the whole model,
    is at most max_grad_norm.

    use_nvlamb  parameters without weight decay are scaled, too. On the host the library's own update then

    Raises  ConfigError: a max_grad_norm that is not above 0 (math.inf: no limit). RuntimeError: amsgrad.
    """

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, amsgrad=False, adam_w_mode=True, grad_averaging=True,
                 set_grad_none=True, max_grad_norm=1.0, use_nvlamb=False):
        if not max_grad_norm > 0:
            raise ConfigError(f"smp.optimizers.FusedLamb(max_grad_norm={max_grad_norm!r}): expected a number above 0; math.inf for no limit")
        super().__init__(params, {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                                  "grad_averaging": grad_averaging}, amsgrad, set_grad_none)
        self.adam_w_mode, self.use_nvlamb, self.max_grad_norm = bool(adam_w_mode), bool(use_nvlamb), float(max_grad_norm)
        self.limits_norm = math.isfinite(self.max_grad_norm)  # step() does it, of the gradients that it finds

    @property
    def trireme_type(self):
        """(type, params) of the configuration's optimizer section that updates alike; None: there is none.

        Raises  UnsupportedError: an engine that is not of smp, where nobody takes the norm of the whole model.
        """
        if self.limits_norm:
            raise UnsupportedError("smp.optimizers.FusedLamb: the norm of the whole model is known to smp.DistributedOptimizer() alone; give it this optimizer, or give "
                                   "max_grad_norm=math.inf, and clip otherwise")
        on_host = all(parameter.device.type == "cpu" for group in self.param_groups for parameter in group["params"])
        return ("Lamb", _ANY_RATIO) if self.use_nvlamb and self.adam_w_mode and on_host else None

    @torch.no_grad()
    def step(self, closure=None):
        """Updates in place by `.grad`; returns closure()'s loss."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        if self.limits_norm:
            self._limit_norm()
        super().step()
        return loss

    def _limit_norm(self):
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"] if parameter.grad is not None]
        if gradients:
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
            torch._foreach_mul_(gradients, (self.max_grad_norm / norm).clamp(max=1.0))  # pylint: disable=protected-access

    def _update(self, parameter, group):
        state, decay = self._state_of(parameter, "exp_avg", "exp_avg_sq"), group["weight_decay"]
        if self.adam_w_mode:
            direction = adam_direction(state, parameter.grad, group).add_(parameter, alpha=decay)
        else:
            direction = adam_direction(state, parameter.grad.add(parameter, alpha=decay), group)
        ratio = _trust_ratio(parameter, direction) if decay or self.use_nvlamb else 1.0
        parameter.sub_(direction.mul_(group["lr"] * ratio))


def _trust_ratio(parameter, direction):
    """The norm of the weights over that of the step, a tensor without dims; 1 where one of them is 0."""
    weights, update = parameter.norm(), direction.norm()
    return torch.where((weights > 0) & (update > 0), weights / update, torch.ones_like(weights))
