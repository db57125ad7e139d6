"""Optimizers whose step is one update for each parameter."""
import torch


class EachParameter(torch.optim.Optimizer):
    """Calls `_update(parameter, group)` for each parameter that has a gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        """Updates in place by `.grad`; returns closure()'s loss."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter, group):
        """One parameter's, with the hyperparameters of its group."""
        raise NotImplementedError
