"""Small things that programs import."""
import torch

from ..missing import names_of

__getattr__ = names_of(__name__)


class OnDevice:
    """While it lasts, what a model makes has this dtype and device ("meta" makes no memory).

    Raises  TypeError: a dtype that is not floating.
    """

    def __init__(self, dtype, device="meta", enabled=True):
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled
        self._before = None

    def __enter__(self):
        if self._enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()

    def __exit__(self, *error):
        if self._enabled:
            self._device.__exit__(*error)
            torch.set_default_dtype(self._before)
        return False


class RepeatingLoader:
    """Iterates over `loader` again and again."""

    def __init__(self, loader):
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self):
        return self

    def __len__(self):
        return len(self.loader)

    def __next__(self):
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)


def instrument_w_nvtx(function):
    """`function` itself: there are no ranges to record on the host."""
    return function
