"""Which build this is, under DeepSpeed's names."""
import torch

from ..as_deepspeed import DEEPSPEED_VERSION as version
from .accelerator import get_accelerator
from .missing import names_of
from .ops import op_builder

__getattr__ = names_of(__name__)

git_hash = git_branch = "unknown"
accelerator_name = get_accelerator().device_name()
#: By an operator's name: whether an optimizer of this package does its work.
installed_ops = {name: builder.is_compatible() for name, builder in op_builder.ALL_OPS.items()}
torch_info = {"version": ".".join(torch.__version__.split(".")[:2]), "cuda_version": torch.version.cuda or "0.0",
              "hip_version": torch.version.hip or "0.0", "bf16_support": get_accelerator().is_bf16_supported()}
