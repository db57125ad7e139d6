"""smp.amp.GradScaler: torch's, for gradients that are on stages."""
import torch

from ..device import local_device


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler of the library's device: scaler.scale(loss) inside of a step function, scaler.unscale_(),
    step() and update() outside. All ranks skip a step, or none."""

    def __init__(self, init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True):
        super().__init__(local_device().type, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
