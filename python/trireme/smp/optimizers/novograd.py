"""NovoGrad, arXiv:1905.11286, under apex's name."""
import math

import torch

from ...errors import ConfigError
from .apex import ApexOptimizer, bias_corrections

_NORMS = {0: math.inf, 2: 2.0}  # apex's numbers of norms, and torch's


class FusedNovoGrad(ApexOptimizer):
    """Momentum of gradients over an average of their norms, one number for each parameter.

    reg_inside_moment   the momentum is that of gradients over their norm plus weight decay, as published; else of
                        gradients alone
    grad_averaging      a gradient counts 1 - beta1 in the momentum; else 1
    norm_type           2, or 0 for the greatest element
    init_zero           the average begins at 0, not at the first norm

    Raises  ConfigError: another norm. RuntimeError: amsgrad.
    """

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False, reg_inside_moment=False, grad_averaging=True,
                 norm_type=2, init_zero=False, set_grad_none=True):
        super().__init__(params, {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay, "grad_averaging": grad_averaging,
                                  "norm_type": norm_type, "init_zero": init_zero}, amsgrad, set_grad_none)
        self.reg_inside_moment = bool(reg_inside_moment)

    def _check(self, group):
        super()._check(group)
        if group["norm_type"] not in _NORMS:
            raise ConfigError(f"smp.optimizers.FusedNovoGrad(norm_type={group['norm_type']!r}): expected 2, or 0 for the greatest element")

    def _update(self, parameter, group):
        state, gradient = self._state_of(parameter, "exp_avg"), parameter.grad
        self._average_norm(state, gradient, group)
        first, second = bias_corrections(state["step"], group)
        size = state["exp_avg_sq"].div(math.sqrt(second)).add_(group["eps"])
        share = 1 - group["betas"][0] if group["grad_averaging"] else 1
        momentum, decay = state["exp_avg"].mul_(group["betas"][0]), group["weight_decay"]
        if self.reg_inside_moment:
            direction = momentum.add_(gradient.div(size).add_(parameter, alpha=decay), alpha=share) / first
        else:
            direction = (momentum.add_(gradient, alpha=share) / first).div_(size).add_(parameter, alpha=decay)
        parameter.add_(direction, alpha=-group["lr"])

    @staticmethod
    def _average_norm(state, gradient, group):
        """Moves `exp_avg_sq`, which is a norm and no square, as in apex."""
        beta, norm = group["betas"][1], torch.linalg.vector_norm(gradient, _NORMS[group["norm_type"]])
        if "exp_avg_sq" not in state:
            state["exp_avg_sq"] = torch.zeros_like(norm) if group["init_zero"] else norm.clone()
        average = state["exp_avg_sq"]
        if group["norm_type"] == 2:
            average.square_().mul_(beta).addcmul_(norm, norm, value=1 - beta).sqrt_()
        else:
            average.lerp_(norm, 1 - beta)
