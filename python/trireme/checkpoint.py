"""Helpers around checkpoints."""
import sys

import torch

__path__ = []  # checkpoint.utils is this module, too
utils = sys.modules[__name__]


def clone_tensors_for_torch_save(item, device=torch.device("cpu")):
    """Tensors inside of lists, tuples and dicts as copies that share memory with nothing: torch.save() writes all of a storage."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device) if not isinstance(item, torch.nn.Parameter) else \
            torch.nn.Parameter(item.detach().clone().to(device), item.requires_grad)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    return item
