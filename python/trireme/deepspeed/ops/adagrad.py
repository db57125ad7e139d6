"""Adagrad."""
import torch

from ..missing import names_of

__path__ = []  # ops.adagrad.cpu_adagrad is this module, too
__getattr__ = names_of(__name__)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad. Raises RuntimeError: amsgrad."""

    trireme_type = ("Adagrad", {})

    def __init__(self, model_params, lr=1e-2, eps=1e-10, weight_decay=0, amsgrad=False, fp32_optimizer_states=True):
        # pylint: disable=unused-argument
        if amsgrad:
            raise RuntimeError("DeepSpeedCPUAdagrad does not support the AMSGrad variant.")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
