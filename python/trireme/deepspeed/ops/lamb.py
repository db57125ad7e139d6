"""LAMB, arXiv:1904.00962."""
import torch

from ..missing import names_of
from ...training.each_parameter import EachParameter

__path__ = []  # ops.lamb.fused_lamb is this module, too
__getattr__ = names_of(__name__)


class FusedLamb(EachParameter):
    """Adam's direction with decoupled weight decay, scaled by each parameter's trust ratio within [min_coeff,
    max_coeff].

    Raises  RuntimeError: amsgrad. NotImplementedError: eps_inside_sqrt, max_grad_norm (use gradient_clipping).
    """

    counts_steps = True  # the state of a parameter has `step`

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, eps_inside_sqrt=False,
                 weight_decay=0.0, max_grad_norm=0.0, max_coeff=10.0, min_coeff=0.01, amsgrad=False):
        if amsgrad:
            raise RuntimeError("FusedLamb does not support the AMSGrad variant.")
        if eps_inside_sqrt or max_grad_norm:
            raise NotImplementedError("FusedLamb(eps_inside_sqrt=…, max_grad_norm=…) is not there yet; clip by gradient_clipping")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        self._own = {"bias_correction": bool(bias_correction), "max_coeff": max_coeff, "min_coeff": min_coeff}

    @property
    def trireme_type(self):
        """(type, params) of the configuration's optimizer section that updates alike."""
        return "Lamb", dict(self._own)

    def _direction(self, parameter, group):
        state = self.state[parameter]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
        first, second = (1 - beta1 ** state["step"], 1 - beta2 ** state["step"]) if self._own["bias_correction"] else (1, 1)
        return (state["exp_avg"] / first / ((state["exp_avg_sq"] / second).sqrt() + group["eps"])).add_(
            parameter, alpha=group["weight_decay"])

    def _update(self, parameter, group):
        direction = self._direction(parameter, group)
        weights, update = parameter.norm().item(), direction.norm().item()
        trust = min(max(weights / update, self._own["min_coeff"]), self._own["max_coeff"]) if weights and update else 1.0
        parameter.add_(direction, alpha=-group["lr"] * trust)
