"""Adam and AdamW."""
import torch

from ..missing import names_of

__path__ = []  # ops.adam.cpu_adam and .fused_adam are this module, too
__getattr__ = names_of(__name__)


def _refuse_amsgrad(name, amsgrad, bias_correction):
    if amsgrad:
        raise RuntimeError(f"{name} does not support the AMSGrad variant.")
    if not bias_correction:
        raise NotImplementedError(f"{name}(bias_correction=False) is not there yet; leave it out")


class FusedAdam(torch.optim.Adam):
    """Adam, decoupled (AdamW) unless adam_w_mode=False. Raises RuntimeError: amsgrad."""

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, weight_decay=0.0,
                 amsgrad=False, set_grad_none=True):
        _refuse_amsgrad(type(self).__name__, amsgrad, bias_correction)
        super().__init__(params, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, decoupled_weight_decay=adam_w_mode)
        self.adam_w_mode = bool(adam_w_mode)
        self.set_grad_none = set_grad_none

    @property
    def trireme_type(self):
        """(type, params) of the configuration's optimizer section that updates alike."""
        return "Adam", {"adam_w_mode": self.adam_w_mode}

    def zero_grad(self, set_to_none=None):
        """Drops gradients, unless set_grad_none=False was given."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class DeepSpeedCPUAdam(FusedAdam):
    """The same for parameters in host memory, under its name there; fp32_optimizer_states is accepted, they are
    fp32."""

    def __init__(self, model_params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, amsgrad=False,
                 adamw_mode=True, fp32_optimizer_states=True):
        # pylint: disable=unused-argument
        super().__init__(model_params, lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, adam_w_mode=adamw_mode,
                         weight_decay=weight_decay, amsgrad=amsgrad)
