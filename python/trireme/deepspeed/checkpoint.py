"""Helpers around checkpoints."""
import os
import sys

import torch

from .missing import names_of

__path__ = []  # checkpoint.utils is this module, too
__getattr__ = names_of(__name__)
utils = sys.modules[__name__]


def clone_tensors_for_torch_save(item, device=torch.device("cpu")):
    """Tensors inside of lists, tuples and dicts as copies that share memory with nothing: torch.save() writes all of a
    storage."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device) if not isinstance(item, torch.nn.Parameter) else \
            torch.nn.Parameter(item.detach().clone().to(device), item.requires_grad)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    return item


def get_model_ckpt_name_for_rank(base_folder, mp_rank_str):
    """Where DeepSpeed's checkpoints have the weights of a model-parallel rank."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(base_folder, dp_rank, mp_rank):
    """Where DeepSpeed's checkpoints have a rank's part of the optimizer's states."""
    return os.path.join(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")


def get_layer_ckpt_name_for_rank(base_folder, layer_id, tp_rank):
    """Where DeepSpeed's checkpoints have a pipeline's layer."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt")
