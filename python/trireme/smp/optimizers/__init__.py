"""apex's optimizers, with its arguments and defaults."""
from .adam import FusedAdam
from .lamb import FusedLamb
from .novograd import FusedNovoGrad

__all__ = ["FusedAdam", "FusedLamb", "FusedNovoGrad"]
