"""Lion, arXiv:2302.06675."""
import torch

from ..missing import names_of
from ...training.each_parameter import EachParameter

__path__ = []  # ops.lion.cpu_lion and .fused_lion are this module, too
__getattr__ = names_of(__name__)


class FusedLion(EachParameter):
    """The sign of an interpolated momentum, with decoupled weight decay."""

    trireme_type = ("Lion", {})

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, set_grad_none=True):
        # pylint: disable=unused-argument
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    def _update(self, parameter, group):
        beta1, beta2 = group["betas"]
        momentum = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(torch.lerp(parameter.grad, momentum, beta1).sign_(), alpha=-group["lr"])
        momentum.lerp_(parameter.grad, 1 - beta2)


class DeepSpeedCPULion(FusedLion):
    """The same for parameters in host memory, under its name there."""

    def __init__(self, model_params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0, fp32_optimizer_states=True):
        # pylint: disable=unused-argument
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)
