"""Lion, arXiv:2302.06675."""
import torch

__path__ = []  # ops.lion.cpu_lion and .fused_lion are this module, too


class FusedLion(torch.optim.Optimizer):
    """The sign of an interpolated momentum, with decoupled weight decay."""

    trireme_type = ("Lion", {})

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, set_grad_none=True):
        # pylint: disable=unused-argument
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        """Updates in place by `.grad`; returns closure()'s loss."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(torch.lerp(parameter.grad, momentum, beta1).sign_(), alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - beta2)
        return loss


class DeepSpeedCPULion(FusedLion):
    """The same for parameters in host memory, under its name there."""

    def __init__(self, model_params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0, fp32_optimizer_states=True):
        # pylint: disable=unused-argument
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)
