"""A model's FLOPs by trireme's profiler, and by torch.utils.flop_counter."""
import warnings

import torch
from torch.utils import flop_counter
from trireme.profiling.flops_profiler import FlopsProfiler

_aten = torch.ops.aten  # pylint: disable=no-member
# On a host attention has kernels of its own, which torch's counter does not know: as those of devices.
_HOST = {_aten._scaled_dot_product_flash_attention_for_cpu:  # pylint: disable=protected-access
         lambda query, key, value, *_, out_shape, **__: flop_counter.sdpa_flop_count(query, key, value),
         _aten._scaled_dot_product_flash_attention_for_cpu_backward:  # pylint: disable=protected-access
         lambda *sizes, out_shape, **_: flop_counter.sdpa_backward_flop_count(*sizes[:4])}


def by_torch(loss_of):
    """(forward, backward) of torch's counter, for a function that gives the loss."""
    with flop_counter.FlopCounterMode(display=False, custom_mapping=_HOST) as counter:
        loss = loss_of()
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops() - forward


def by_trireme(model, loss_of, backward=None):
    """(forward, backward), and the profiler, stopped. `backward` runs it, by default that of the loss."""
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    loss = loss_of()
    (backward or torch.Tensor.backward)(loss)
    profiler.stop_profile()
    return (profiler.get_total_flops(), profiler.get_total_backward_flops()), profiler


def of_modules(profiler):
    """{name of a module: (FLOPs forward, backward, recomputed)}."""
    root, numbers = profiler.tree()
    found = {}

    def look(place, name):
        mine = numbers[place]
        found[name] = tuple(2 * sums for sums in (mine.forward, mine.backward, mine.recomputed))
        for inner in place.inner:
            look(inner, f"{name}.{inner.name}".lstrip("."))

    look(root, "")
    return found


def compare(model, loss_of):
    """Both counts, which are to be the same, and the operators that are not counted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, profiler = by_trireme(model, loss_of)
        theirs = by_torch(loss_of)
    uncounted = profiler.get_uncounted()
    profiler.end_profile()
    return {"trireme": ours, "torch": theirs, "uncounted": uncounted}


# --- models of Hugging Face -----------------------------------------------------------------------------------------

_B, _S, _V = 2, 6, 64


def _ids(**more):
    ids = torch.randint(3, _V, (_B, _S), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids, **more}


def _pixels():
    return {"pixel_values": torch.randn(_B, 3, 16, 16), "labels": torch.zeros(_B, dtype=torch.long)}


_TWO_SIDES = dict(encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48)
_EAGER = dict(attn_implementation="eager")
MODELS = {
    "gpt2": ("gpt2", _EAGER, _ids), "gpt2 sdpa": ("gpt2", {}, _ids), "llama": ("llama", _EAGER, _ids),
    "bert": ("BertForMaskedLM", _EAGER, _ids), "bert sdpa": ("BertForMaskedLM", {}, _ids), "t5": ("T5ForConditionalGeneration", _EAGER, _ids),
    "vit": ("ViTForImageClassification", _EAGER, _pixels), "vit sdpa": ("ViTForImageClassification", {}, _pixels), "opt": ("opt", _EAGER, _ids),
    "mistral": ("mistral", {**_EAGER, "num_key_value_heads": 2}, _ids), "gpt_neox": ("gpt_neox", _EAGER, _ids),
    "bart": ("BartForConditionalGeneration", {**_EAGER, **_TWO_SIDES}, _ids), "qwen2": ("qwen2", _EAGER, _ids),
    "resnet": ("ResNetForImageClassification", dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=5), _pixels),
    "gpt2 checkpointed": ("gpt2", _EAGER, _ids), "llama checkpointed, reentrant": ("llama", _EAGER, _ids)}


def compare_model(name):
    """compare() of one of MODELS."""
    from zoo import hugging_face  # which imports transformers  # pylint: disable=import-outside-toplevel
    kind, more, batch_of = MODELS[name]
    torch.manual_seed(1)
    model = hugging_face.model(kind, **more).train()
    if "checkpointed" in name:
        hugging_face.checkpointed(model, reentrant="reentrant" in name)
        if "reentrant" in name:
            model.enable_input_require_grads()
    batch = batch_of()
    return compare(model, lambda: model(**batch).loss)
