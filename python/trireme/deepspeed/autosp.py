"""Samples whose tokens the ranks of a sequence group share: which tensors of a call are cut, and where. DeepSpeed calls
it AutoSP."""
import inspect
from typing import NamedTuple

import torch
from torch.utils import _pytree

from ..errors import ShapeError
from .missing import names_of

__getattr__ = names_of(__name__)

# The parameter of a model's forward() that each part goes to, as Hugging Face names them.
_ROLES = ("input_ids", "labels", "position_ids", "attention_mask")


class PreparedInputs(NamedTuple):
    """A batch as every rank of a sequence group has it, whole. engine(prepared) takes it; so it does its tensors, one
    by one."""

    input_id: torch.Tensor
    label_id: torch.Tensor | None
    position_id: torch.Tensor | None
    attention_mask: torch.Tensor | None


def prepare_autosp_inputs(input_id, label_id=None, position_id=None, attention_mask=None, seq_dim=1):
    """Marks the tensors of a batch [B, S], whole on every rank: engine(...) gives the model this rank's tokens of them.

    Raises  ShapeError: no tensor, or no dim `seq_dim` in one.
    """
    prepared = PreparedInputs(input_id, label_id, position_id, attention_mask)
    for role, tensor in zip(_ROLES, prepared):
        if tensor is None and role != "input_ids":
            continue
        if not isinstance(tensor, torch.Tensor) or not 0 <= seq_dim < tensor.dim():
            found = f"a tensor of shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ShapeError(f"prepare_autosp_inputs: {role} is {found}, which has no dim seq_dim={seq_dim}; give tensors [B, S]")
        tensor.autosp_mark = role, seq_dim
    return prepared


def _names_of_forward(module):
    return inspect.signature(module.forward).parameters


def cut(core, module, inputs, kwargs):
    """Arguments of forward(), with this rank's tokens in place of whole marked tensors."""
    marked = {mark[0]: (value, mark[1]) for value in _pytree.tree_leaves((inputs, kwargs)) if (mark := getattr(value, "autosp_mark", None))}
    if not marked:
        return inputs, kwargs
    names = _names_of_forward(module)
    if len(inputs) == 1 and isinstance(inputs[0], PreparedInputs):
        prepared, inputs = inputs[0], (inputs[0].input_id,)
        kwargs = {**{role: tensor for role, tensor in zip(_ROLES[1:], prepared[1:]) if tensor is not None and role in names}, **kwargs}
    dim = next(iter(marked.values()))[1]
    parts = dict(zip(_ROLES, core.cut(*(marked.get(role, (None,))[0] for role in _ROLES), dim)))
    own = lambda value: parts[value.autosp_mark[0]] if hasattr(value, "autosp_mark") else value
    return _pytree.tree_map(own, (inputs, kwargs))
