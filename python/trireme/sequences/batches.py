"""Sequence parallelism of models in Python: batches that a program has not cut, masks of transformers."""
import contextlib
import contextvars
import functools
import inspect

import torch

from .. import ranks
from ..errors import StateError
from ..patches import Entry, Patches

# Arguments of forward() that Hugging Face names, one number or vector for each token.
_TOKEN_INPUTS = ("input_ids", "inputs_embeds", "labels", "position_ids", "attention_mask", "token_type_ids", "decoder_input_ids",
                 "decoder_attention_mask", "decoder_position_ids", "decoder_inputs_embeds")
_OF_CUT = ("input_ids", "labels", "position_ids", "attention_mask")
_current = contextvars.ContextVar("trireme_sequence", default=None)


@contextlib.contextmanager
def forward_of(core):
    """While it lives, transformers makes masks from the padding of all tokens."""
    PATCHES.apply()
    token = _current.set(core)
    try:
        yield
    finally:
        _current.reset(token)


def _of_all_tokens(original):
    """transformers makes a mask of all tokens by the lengths that it reads; it indexes the padding mask of a batch
    inside of vmap()."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def mask(*args, **kwargs):
        core = _current.get()
        if core is None:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        if isinstance(given.get("attention_mask"), torch.Tensor):
            whole = core.whole_of(given["attention_mask"])
            given["attention_mask"] = given["attention_mask"] if whole is None else whole
        return original(*bound.args, **bound.kwargs)

    return mask


PATCHES = Patches(__name__, "a forward pass of an engine that cuts sequences", [
    Entry("transformers.masking_utils", "AttentionMaskInterface._global_mapping", "sdpa", "masks of transformers are made from the padding of all tokens",
          _of_all_tokens),
], ranks.living)


def prepare(core, module, inputs, kwargs):
    """Arguments of forward(), cut where the program has cut none of them; without a cache of windows."""
    names = list(inspect.signature(module.forward).parameters)
    named = {**dict(zip(names, inputs)), **kwargs}
    tokens = {name: named[name] for name in _TOKEN_INPUTS if isinstance(named.get(name), torch.Tensor) and named[name].dim() >= 2}
    lead = tokens.get("input_ids", tokens.get("inputs_embeds"))
    if lead is not None and not any(core.is_part(tensor) for tensor in tokens.values()):
        inputs, kwargs = _cut(core, module, inputs, kwargs, names, named, tokens)
    elif lead is None:
        return inputs, kwargs
    named = {**dict(zip(names, inputs)), **kwargs}
    if "use_cache" not in named and "use_cache" in names and _caches_windows(module) and _counts(core, named.get("position_ids")):
        kwargs = {**kwargs, "use_cache": False}
    return inputs, kwargs


def _caches_windows(module):
    """Whether a model's cache keeps the last tokens alone, which are on the last rank."""
    config = getattr(module, "config", None)
    if not getattr(config, "use_cache", False):
        return False
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = getattr(text, "layer_types", None) or ()
    return bool(getattr(text, "sliding_window", None)) or any("sliding" in kind or "chunked" in kind for kind in kinds)


def _counts(core, positions):
    """Whether `positions` are those of one document: transformers looks for packed ones where there is no cache."""
    if not isinstance(positions, torch.Tensor):
        return True
    whole = core.whole_of(positions)
    return whole is not None and bool((whole.diff(dim=-1) == 1).all())


def _cut(core, module, inputs, kwargs, names, named, tokens):
    lead = tokens.get("input_ids", tokens.get("inputs_embeds"))
    has_decoder = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    apart = {"decoder_input_ids", "decoder_attention_mask", "decoder_position_ids", "decoder_inputs_embeds"} | ({"labels"} if has_decoder else set())
    chosen = {name: tensor for name, tensor in tokens.items() if name in apart or (tensor.dim() <= 3 and tensor.shape[1] == lead.shape[1])}
    if "labels" in chosen and chosen["labels"].dim() == 2 and chosen["labels"].is_floating_point():
        raise StateError(f"engine(labels={tuple(chosen['labels'].shape)}): floating labels of as many columns as there are tokens may be one for each token, "
                         "or classes of samples; cut the batch yourself, engine(**engine.cut(input_ids=...), labels=...), with or without the labels")
    told = {name: chosen[name] for name in _OF_CUT if name in chosen and name not in apart}
    parts = dict(zip(_OF_CUT, core.cut(*(told.get(name) for name in _OF_CUT), 1)))
    for name, tensor in chosen.items():
        if name not in told:
            parts[name] = core.cut(tensor, None, None, None, 1)[0]
    parts = {name: part for name, part in parts.items() if part is not None}
    inputs = tuple(parts.pop(name) if name in parts else value for name, value in zip(names, inputs)) + tuple(inputs[len(names):])
    return inputs, {**kwargs, **parts}
