"""Adam and AdamW, under apex's name."""
from ...errors import UnsupportedError
from .apex import ApexOptimizer, adam_direction


class FusedAdam(ApexOptimizer):
    """Adam, decoupled (AdamW) unless adam_w_mode=False. The library's own update, unless bias_correction=False.

    Raises  UnsupportedError: capturable, master_weights. RuntimeError: amsgrad.
    """

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, weight_decay=0.0, amsgrad=False, set_grad_none=True,
                 capturable=False, master_weights=False):
        for name, value in (("capturable", capturable), ("master_weights", master_weights)):
            if value:
                raise UnsupportedError(f"smp.optimizers.FusedAdam({name}={value!r}) is not there yet; leave it out")
        super().__init__(params, {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}, amsgrad, set_grad_none)
        self.adam_w_mode = bool(adam_w_mode)

    @property
    def trireme_type(self):
        """(type, params) of the configuration's optimizer section that updates alike."""
        return "Adam", {"adam_w_mode": self.adam_w_mode}

    def _update(self, parameter, group):
        state = self._state_of(parameter, "exp_avg", "exp_avg_sq")
        gradient = parameter.grad
        if self.adam_w_mode:
            direction = adam_direction(state, gradient, group).add_(parameter, alpha=group["weight_decay"])
        else:
            direction = adam_direction(state, gradient.add(parameter, alpha=group["weight_decay"]), group)
        parameter.add_(direction, alpha=-group["lr"])
