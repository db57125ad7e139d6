"""Types of what goes into a model of 16-bit weights, and comes out of it, as FP16_Module has them."""
import torch
from torch.utils import _pytree

from .config import state

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def half_type():
    """The type of weights; None: they have the model's."""
    return _DTYPES.get(state.cfg.half)


def inputs(arguments):
    """`arguments` with its floating tensors in the type of weights."""
    return _cast(arguments, half_type(), torch.is_floating_point)


def outputs(value):
    """`value` with its tensors of the type of weights in fp32."""
    dtype = half_type()
    return _cast(value, torch.float32, lambda tensor: tensor.dtype == dtype)


def cast_unhomed(module, homes):
    """Floating buffers that every stage has, in the type of weights."""
    dtype = half_type()
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name not in homes and buffer.is_floating_point() and buffer.dtype != dtype:
            buffer.data = buffer.to(dtype)


def _cast(tree, dtype, is_to_be):
    return _pytree.tree_map(lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and is_to_be(leaf) else leaf, tree)
