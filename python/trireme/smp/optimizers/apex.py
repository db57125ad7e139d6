"""The common part of apex's optimizers."""
import torch

from ...errors import ConfigError
from ...training.each_parameter import EachParameter


class ApexOptimizer(EachParameter):
    """An optimizer of apex, by its arguments. Raises ConfigError: a hyperparameter out of its range. RuntimeError:
    amsgrad."""

    counts_steps = True  # the state of a parameter has `step`

    def __init__(self, params, defaults, amsgrad, set_grad_none):
        if amsgrad:
            raise RuntimeError(f"{type(self).__name__} does not support the AMSGrad variant.")
        super().__init__(params, {**defaults, "betas": tuple(defaults["betas"])})
        self.set_grad_none = bool(set_grad_none)

    def add_param_group(self, param_group):
        """Adds a group. Raises ConfigError: a hyperparameter out of its range."""
        super().add_param_group(param_group)
        self._check(self.param_groups[-1])

    def zero_grad(self, set_to_none=None):
        """Drops gradients, unless set_grad_none=False was given."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def _check(self, group):
        limits = {"lr": group["lr"] >= 0, "eps": group["eps"] >= 0, "weight_decay": group["weight_decay"] >= 0,
                  "betas": len(group["betas"]) == 2 and all(0 <= beta < 1 for beta in group["betas"])}
        for name, holds in limits.items():
            if not holds:
                expected = "two numbers in [0, 1)" if name == "betas" else "0 or more"
                raise ConfigError(f"smp.optimizers.{type(self).__name__}({name}={group[name]!r}): expected {expected}")

    def _state_of(self, parameter, *names):
        """The state of a parameter at its next step, with zeros of its shape under `names` at the first."""
        state = self.state[parameter]
        if not state:
            state.update(step=0, **{name: torch.zeros_like(parameter) for name in names})
        state["step"] += 1
        return state


def adam_direction(state, gradient, group):
    """Adam's step of one parameter, of size 1. Moves the moments in `state`."""
    beta1, beta2 = group["betas"]
    share = 1 - beta1 if group.get("grad_averaging", True) else 1
    state["exp_avg"].mul_(beta1).add_(gradient, alpha=share)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    first, second = bias_corrections(state["step"], group)
    return (state["exp_avg"] / first).div_((state["exp_avg_sq"] / second).sqrt_().add_(group["eps"]))


def bias_corrections(step, group):
    """The sums of the weights of `step` averaged values, of both moments."""
    if not group["bias_correction"]:
        return 1.0, 1.0
    return tuple(1 - beta**step for beta in group["betas"])
