"""Layers of a model, for "trireme": {"recompute": "full"}: what each saves for backward is its inputs."""
import functools
import types

import torch
from torch.utils import checkpoint

# Arguments by which Hugging Face's layers append to a cache: a layer that runs twice must not.
_CACHES = ("past_key_value", "past_key_values", "layer_past")


def layers_of(module):
    """The modules in the outermost lists (ModuleList, Sequential) of at least two modules of one class that have
    parameters."""
    found = []
    for child in module.children():
        parts = list(child.children())
        is_list = isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)) and len(parts) > 1
        if is_list and len({type(part) for part in parts}) == 1 and all(any(True for _ in part.parameters()) for part in parts):
            found += parts
        else:
            found += layers_of(child)
    return found


def recompute_layers(module, on):
    """Layers of `module` run again in backward, or as they were written. A copy of the module does as it did."""
    for layer in layers_of(module):
        is_on = getattr(vars(layer).get("forward"), "__func__", None) is _recomputed
        if on and not is_on:
            layer.written_forward = vars(layer).get("forward")
            layer.forward = types.MethodType(_recomputed, layer)
        elif is_on and not on:
            written = vars(layer).pop("written_forward")
            del layer.forward
            if written is not None:
                layer.forward = written


def _recomputed(self, *args, **kwargs):
    forward = self.written_forward or functools.partial(type(self).forward, self)
    if not (self.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    kwargs = {name: None if name in _CACHES else False if name == "use_cache" else value for name, value in kwargs.items()}
    return checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)
