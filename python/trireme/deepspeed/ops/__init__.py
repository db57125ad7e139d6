"""DeepSpeed's optimizers as torch.optim optimizers. Given to initialize() they are updated by the library; alone they
step here."""
from ..missing import names_of
from . import adagrad, adam, lamb, lion, muon, op_builder

__getattr__ = names_of(__name__)
