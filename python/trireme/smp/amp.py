"""smp.amp.GradScaler: torch's, for gradients that are on stages."""
import torch

from ..device import local_device


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler of the library's device: scaler.scale(loss) inside of a step function, scaler.unscale_(),
    step() and update() outside. All ranks skip a step, or none.

    The arguments are those of torch.cuda.amp.GradScaler, or of torch.amp.GradScaler, which has a `device` before them;
    gradients are where the library has them, whatever it is.
    """

    def __init__(self, *args, device=None, **options):
        if args and isinstance(args[0], (str, torch.device)):
            device, *args = args
        if device is not None:
            torch.device(device)  # raises for one that there is not
        super().__init__(local_device().type, *args, **options)
