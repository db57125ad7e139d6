"""Tiny models of every configuration class of transformers that has a tp_plan, each trained by plain PyTorch and by
ranks that share its layers.

    trireme launch --num_gpus 2 python tests/python/tensor_classes.py CONFIGURATION [CLASS ...] what rank 0 finds, as
    JSON
"""
import collections
import copy
import inspect
import json
import re
import sys
import traceback
import warnings

import torch
import torch.distributed as dist
import transformers
import trireme

from transformers.models.auto import modeling_auto

import tensor_plans

STEPS, SAMPLES, LENGTH, VOCABULARY, CLIPPING, LARGEST = 2, 2, 12, 96, 0.5, 1e-5
LARGEST_MODEL = 8_000_000  # parameters; more is what shrinking does not know, and takes minutes
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-4, "weight_decay": 0.1}
# Rounding noise would be most of a gradient that is zero by mathematics, as those of the biases of keys are.
SMALLEST = 1e-3
# Where a gradient is further away than LARGEST, it may be so by this much of what last bits of weights do to it:
# Sinkhorn's iterations lose digits.
ROUNDINGS = 3
NOT_THERE = ("mla_kv_a_proj", "moe_tp_experts", "moe_identity_expert", "grouped_gemm", "ep_dispatch_experts", "ep_router")
_HEADS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForMaskedLM", "ForImageClassification", "ForCTC", "ForAudioClassification",
          "ForImageTextToText", "Model")

# Names of what a configuration counts, and how much of it a tiny model has. The first that matches holds.
_SIZES = [(re.compile(f"^({names})$"), size) for names, size in (
    (r"vocab_size|unpadded_vocab_size|vocab_size_per_layer_input|tgt_vocab_size|src_vocab_size|n_tokens|mel_vocab_size|num_embeddings", VOCABULARY),
    (r"num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|depth|n_(input|output|recurrent)_layers|(en|de)coder_num_layers|resampler_depth|"
     r"num_(encoder|decoder|text|vision|audio)_(hidden_)?layers|num_blocks|conf_num_hidden_layers", 2),
    (r"hidden_size|d_model|n_embd|embed_dim|hidden_dim|dim|word_embed_proj_dim|out_hidden_size|projection_dim|embedding_size|lstm_size|text_hidden_size|"
     r"vision_hidden_size|audio_hidden_size|encoder_hidden_size|decoder_hidden_size|backbone_hidden_size|thinker_hidden_size|output_dim|adapter_out_dim|"
     r"adapter_in_dim|mm_embed_dim|projector_(in|out)put_dim|vision_output_dim|moe_hidden_size|image_token_embed_dim|encoder_dim|decoder_dim|lru_width|"
     r"cross_attention_hidden_size|kv_dim|ple_embed_dim|dense_hidden_size|pooler_hidden_size", 64),
    (r"num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads|(en|de)coder_num_attention_heads|swa_num_attention_heads|attention_heads|"
     r"conf_num_attention_heads|linear_num_heads|resampler_n_heads|index_n_heads|mamba_num_heads|mamba_n_heads|nb_heads|num_query_heads|"
     r"num_swa_attention_heads|cross_num_attention_heads", 4),
    (r"(en|de)coder_num_key_value_heads|(swa_)?num_key_value_heads|num_kv_heads|n_kv_heads|linear_num_(key|value)_heads|multi_query_group_num|"
     r"num_global_key_value_heads|swa_num_kv_heads|cross_num_key_value_heads", 2),
    (r"head_dim|d_kv|kv_channels|(swa|attention|linear|dim|global|resampler|local)_head_dim|attention_head_size|dim_head|d_head|qk_nope_head_dim|v_head_dim|"
     r"index_head_dim|linear_(key|value)_head_dim|swa_v_head_dim", 16),
    (r"mamba_d_head|mamba_head_dim", 32),
    (r"qk_rope_head_dim", 16), (r"codebook_size", 64), (r"mamba_d_ssm", 128), (r"num_windows", 4), (r"qk_head_dim", 32),
    (r"(q|kv|o)_lora_rank|laurel_rank|embedding_rank|hc_lowrank|loop_gate_rank|gated_norm_rank", 16),
    (r"(\w+_)?intermediate_size|(\w+_)?ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|(\w+_)?ffn_hidden_size|intermediate_size_mlp|projection_hidden_(dim|size)|"
     r"projector_hidden_size|ff_dim|dff|downsample_hidden_size|inner_dim|feed_forward_dim", 96),
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_routed_experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|moe_router_topk|top_k", 2),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts|n_group|num_expert_group|topk_group|first_k_dense_replace|num_dense_layers|mamba_n_groups|"
     r"n_groups|max_window_layers", 1),
    (r"(max|n)_(source_|target_)?positions?(_embeddings)?|model_max_length|max_sequence_length|max_seq_len|n_ctx|context_length|seq_length", 64),
    (r"image_size|img_size|crop_size|input_size_of_images", 32), (r"patch_size", 8), (r"hidden_size_per_layer_input", 8), (r"num_kv_shared_layers", 0),
    (r"ssm_state_size|mamba_d_state|state_size|d_state", 8), (r"mamba_dt_rank|time_step_rank", 4), (r"context_size|chunk_size|mamba_chunk_size|attention_chunk_size", 8),
    (r"sliding_window|sliding_window_size|attention_window_size", 8), (r"rotary_dim", 8), (r"index_topk", 8), (r"num_nextn_predict_layers|num_mtp_layers", 0),
    (r"num_mel_bins|n_mels|input_feat_size|feature_size", 16), (r"num_position_embeddings|position_embedding_size", 16),
)]
_LISTS_OF_LAYERS = re.compile(r"layer_types|mlp_layer_types|layers_block_type|block_types|indexer_types|layer_rope_theta|no_rope_layers|moe_layers|mlp_only_layers|"
                              r"layers_type|layer_\w+|\w+_layers|\w+_per_layer|_block_types|full_attn_idxs|\w+_pattern|\w*layers_block_type|deepstack_\w+|"
                              r"fullatt_block_indexes|\w*attn_indexes")


_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
_NAMES_OF_STAGES = ("out_features", "out_indices", "stage_names", "_out_features", "_out_indices")
# Fields that get a value where a configuration leaves them empty.
_FILLED = re.compile(r"head_dim|num_key_value_heads|n_routed_experts|num_experts|moe_intermediate_size|num_experts_per_tok|pad_token_id|moe_num_experts|intermediate_size|"
                     r"max_position_embeddings|n_shared_experts")


def _token(place):
    return 80 + place % (VOCABULARY - 80)


def _shrunk(values, layers, seen, fills=False, equal=False):
    """A configuration as a dictionary, with tiny sizes; `seen` gives each special token a number of its own. With
    `fills` what is None has sizes, too; with `equal` there are as many heads of keys as of queries."""
    result = {}
    partial, places = values.get("partial_rotary_factor"), _places(values, layers)
    for name, value in ((str(name), value) for name, value in values.items()):
        if name in _NAMES_OF_STAGES:
            continue
        if isinstance(value, dict):
            if name.startswith("rope"):
                result[name] = _rope({"mrope_section": [1, 1, 1], **value} if fills and "rope_type" in value else value, partial or 1.0)
            elif name == "per_layer_config":
                result[name] = {places.index(int(key)): _shrunk(part, layers, seen, False, equal) for key, part in value.items() if int(key) in places}
            else:
                result[name] = value if name in ("id2label", "label2id") else _shrunk(value, layers, seen, fills, equal)
            continue
        if isinstance(value, float) and "drop" in name:
            value = 0.0
        elif name in ("apply_spec_augment", "use_cache", "output_hidden_states"):
            value = False
        elif name == "pad_token_id" and (value is not None or fills):
            value = 0
        elif isinstance(value, int) and not isinstance(value, bool) or value is None and fills and _FILLED.fullmatch(name):
            if re.search(r"token_(id|index)$|_(bos|eos|pad|start|end)_id$|^im_\w+_id$|^codec_\w+_id$", name):
                value = _token(len(seen))
                seen.append(name)
            else:
                size = next((size for pattern, size in _SIZES if pattern.match(name)), value)
                if size == 2 and "layer" in name:
                    size = layers
                value = size if value is None else min(value, size) if value > 0 else value
        elif value is None and fills and name == "layer_types":
            value = ["full_attention"] * layers
        elif isinstance(value, (list, tuple)) and name.endswith("token_id"):
            value = _token(len(seen))
            seen.append(name)
        elif isinstance(value, (list, tuple)) and name in ("intermediate_size", "num_attention_heads_per_layer"):
            value = [96 if name == "intermediate_size" else 4] * layers
        elif isinstance(value, (list, tuple)) and _LISTS_OF_LAYERS.fullmatch(name) and value and not isinstance(value[0], (list, tuple)):
            value = list(value)
            if all(isinstance(item, int) for item in value) and value == sorted(set(value)):
                value = [item for item in value if item < layers]
            else:
                value = [value[place % len(value)] for place in places]
        result[name] = value
    if "state_size" in values and "expand" in values and "head_dim" in values:
        result["head_dim"] = 32  # of Mamba 2: heads share what is `expand` times as wide
    if (values.get("qk_rope_head_dim") or equal) and "num_key_value_heads" in result:
        # of latent attention, whose keys are made of one vector
        result["num_key_value_heads"] = result["num_attention_heads"]
    return result


def _places(values, layers):
    """Which layers stay: `layers` of them, of each kind one where there is place for it."""
    kinds = [tuple(values[name][place] for name in _KINDS if isinstance(values.get(name), (list, tuple)) and place < len(values[name]))
             for place in range(max((len(values[name]) for name in _KINDS if isinstance(values.get(name), (list, tuple))), default=0))]
    if len(kinds) < layers:
        return list(range(layers))
    first = sorted({kind: kinds.index(kind) for kind in kinds}.values())[:layers]
    rest = [place for place in range(len(kinds)) if place not in first][:layers - len(first)]
    return sorted(first + rest)


def _rope(values, partial):
    """Sections of a head's rotation, of 16 features or `partial` of them."""
    result = {}
    partial = values.get("partial_rotary_factor") or partial
    for name, value in values.items():
        if isinstance(value, dict):
            value = _rope(value, partial)
        elif name.endswith("_section") and isinstance(value, (list, tuple)):
            half = max(len(value), int(16 * partial) // 2)
            value = [half - half // len(value) * (len(value) - 1)] + [half // len(value)] * (len(value) - 1)
        elif name == "original_max_position_embeddings":
            value = 32
        result[name] = value
    return result


def _configurations(make):
    """Tiny configurations, the likeliest first; of some classes only one of them is a model."""
    default = None
    for more in ({}, {"head_dim": 128}, {"pad_token_id": 0}, {"head_dim": 128, "num_key_value_heads": 8, "pad_token_id": 0}):
        try:
            default = make(**more)
            break
        except Exception:  # pylint: disable=broad-exception-caught
            continue
    if default is None:
        return
    values = default.to_dict()
    everything = ("layer_types", "mlp_layer_types", "layers_block_type", "rope_parameters")
    for fills, equal, forget in ((False, False, ()), (True, False, ()), (False, True, ()), (False, False, ("layer_types", "mlp_layer_types")),
                                 (False, False, ("rope_parameters",)), (True, False, everything), (True, True, everything)):
        for layers in (2, 4):
            kept = _without(values, forget)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    yield make.from_dict(_shrunk(kept, layers, [], fills, equal))
            except Exception as error:  # pylint: disable=broad-exception-caught
                yield error


def _without(values, names):
    return {name: _without(value, names) if isinstance(value, dict) else value for name, value in values.items() if name not in names}


def _filled(model):
    """The model with weights that make each part matter: transformers begins with many zeros, and with scores that are
    all alike."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            else:
                parameter.copy_(torch.nan_to_num(parameter.float(), 0.0, 0.0, 0.0) + 0.1 * noise)
    return model.float().train()


def _images(config):
    part = getattr(config, "vision_config", config)
    size = getattr(part, "image_size", None) or 32
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return (SAMPLES, getattr(part, "num_channels", None) or 3, height, width)


def _with_images(model, step):
    """Arguments with images, of every number of tokens that an image may take: which one is right only the model
    knows."""
    config, accepted = model.config, inspect.signature(model.forward).parameters
    token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    if not token or "pixel_values" not in accepted or not hasattr(config, "vision_config"):
        return
    generator = torch.Generator().manual_seed(50 + step)
    samples, channels, *sizes = _images(config)
    more = {"image_grid_thw": torch.tensor([[1, 4, 4]] * samples)} if "image_grid_thw" in accepted else {"image_sizes": torch.tensor([sizes] * samples)}
    pixels = [(samples, channels, *sizes), (samples, 1, channels, *sizes), (16 * samples, 3 * 2 * 8 * 8), (16 * samples, 3 * 8 * 8)]
    for shape in pixels[2:] if "image_grid_thw" in accepted else pixels[:2]:
        for count in (4, 16, 1, 17, 64, 8, 256):
            ids = torch.randint(3, 80, (samples, LENGTH + count), generator=generator)
            ids[:, 2:2 + count] = token
            types = (ids == token).long()
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(types == 1, -100),
                     "pixel_values": torch.randn(shape, generator=generator), "mm_token_type_ids": types, "token_type_ids": types}
            for given in ({**batch, **more}, batch) if any(name in accepted for name in more) else (batch,):
                yield {name: value for name, value in given.items() if name in accepted or name == "labels"}


def _batches(model, step):
    """Arguments of forward(), the likeliest first."""
    generator = torch.Generator().manual_seed(20 + step)
    accepted = inspect.signature(model.forward).parameters
    ids = torch.randint(3, 80, (SAMPLES, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    text = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    decoder = {"decoder_input_ids": ids.flip(0)}
    noise = lambda *sizes: torch.randn(sizes, generator=generator)
    config = model.config
    bins = getattr(config, "num_mel_bins", None) or 16
    frames = 2 * getattr(config, "max_source_positions", 32)
    candidates = [text, {name: text[name] for name in ("input_ids", "labels")}, {name: text[name] for name in ("input_ids", "attention_mask")}, {"input_ids": ids},
                  {**text, **decoder}, {"input_ids": ids, **decoder},
                  {"pixel_values": noise(*_images(config))}, {"pixel_values": noise(*_images(config)), "labels": torch.tensor([0, 1])},
                  {"input_features": noise(SAMPLES, bins, frames), **decoder}, {"input_features": noise(SAMPLES, bins, frames)},
                  {"input_features": noise(SAMPLES, frames, bins)}, {"input_values": noise(SAMPLES, 1600)}, {"input_values": noise(SAMPLES, 1, 1600)},
                  {"inputs_embeds": noise(SAMPLES, LENGTH, 64)}, {"hidden_states": noise(SAMPLES, LENGTH, 64)},
                  {"hidden_states": noise(16, 3 * 2 * 8 * 8), "grid_thw": torch.tensor([[1, 4, 4]])}]
    found = list(_with_images(model, step))
    for candidate in candidates:
        given = {name: value for name, value in candidate.items() if name in accepted or "input_ids" in candidate and name == "labels" and "kwargs" in accepted
                 and type(model).__name__.endswith(("ForCausalLM", "ForConditionalGeneration"))}
        first = next(iter(candidate))
        if first in given and not any(list(given) == list(other) and all(given[name].shape == other[name].shape for name in given) for other in found):
            found.append(given)
    return found


def _floats(value):
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() and value.requires_grad else []
    if isinstance(value, dict):
        return [tensor for _, item in value.items() for tensor in _floats(item)]
    return [tensor for item in value for tensor in _floats(item)] if isinstance(value, (list, tuple)) else []


def _loss(output):
    """The output's own, or of all its tensors; each number counts differently."""
    loss = output.get("loss") if isinstance(output, dict) else None
    if loss is not None:
        return loss
    tensors = _floats(output)
    if not tensors:
        raise ValueError("its output has no tensor with a gradient")
    return sum((tensor * torch.linspace(0, 9, tensor.numel()).sin().view(tensor.shape)).mean() + tensor.pow(2).mean() for tensor in tensors)


def _trained(model, batches, steps=STEPS):
    """(losses, the first step's gradients, weights at the end) of plain PyTorch."""
    optimizer, losses, gradients = torch.optim.AdamW(model.parameters(), **ADAMW), [], {}
    for step in range(steps):
        torch.manual_seed(step)
        loss = _loss(model(**batches[step]))
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}


def _is_finite(trained):
    losses, gradients, weights = trained
    return all(map(torch.isfinite, map(torch.tensor, losses))) and all(tensor.isfinite().all() for tensor in (*gradients.values(), *weights.values()))


def _sound(model, which):
    """The outcome of plain PyTorch with the model; an Exception: it cannot be compared."""
    batches = []
    for step in range(STEPS):
        batches.append(_batches(model, step)[which])
    first = _trained(copy.deepcopy(model), batches)
    if not _is_finite(first):
        raise ValueError("its gradients or weights are not finite")
    if not first[1]:
        raise ValueError("it has no gradients")
    again = _trained(copy.deepcopy(model), batches, 1)
    if again[0][0] != first[0][0] or any(not torch.equal(again[1][name], gradient) for name, gradient in first[1].items()):
        raise ValueError("it is not the same twice in one process")
    return batches, first


def _brief(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def tiny(configuration, names):
    """(model, batches, what plain PyTorch finds) of the first class that runs.

    Raises  LookupError: no class of the configuration has a plan; RuntimeError: with the reasons, none can be built and
            run.
    """
    errors, has_plan = collections.OrderedDict(), False
    make = getattr(transformers, configuration)
    for name in sorted(names, key=lambda name: (next((place for place, head in enumerate(_HEADS) if name.endswith(head)), len(_HEADS)), len(name))):
        for config in _configurations(make):
            if isinstance(config, Exception):
                errors.setdefault(f"configuration: {_brief(config)}")
                continue
            try:
                with torch.device("meta"):
                    model = getattr(transformers, name)(config)
                if not trireme.tensor.model_facts._plan_of(model):  # pylint: disable=protected-access
                    break
                has_plan = True
                count = sum(p.numel() for p in model.parameters())
                if count > LARGEST_MODEL:
                    raise ValueError(f"tiny has {count} parameters: {max(model.named_parameters(), key=lambda pair: pair[1].numel())[0]}")
                torch.manual_seed(1)
                model = _filled(getattr(transformers, name)(copy.deepcopy(config)))
            except Exception as error:  # pylint: disable=broad-exception-caught
                errors.setdefault(f"{name}: {_brief(error)}")
                continue
            for which, batch in enumerate(_batches(model, 0)):
                try:
                    return name, model, *_sound(model, which)
                except Exception as error:  # pylint: disable=broad-exception-caught
                    errors.setdefault(f"{name}({', '.join(batch)}): {_brief(error)}")
    if not has_plan and not errors:
        raise LookupError("no plan")
    raise RuntimeError("\n".join(errors))


def _apart(found, expected, smallest):
    """{name: how far tensors are apart, relative to norms}."""
    result = {}
    for name, value in expected.items():
        other = found.get(name)
        alike = other is not None and other.shape == value.shape
        result[name] = ((other - value).norm() / value.norm().clamp(min=smallest)).item() if alike else float("inf")
    return result


def compared(model, batches, expected, tensor, stage):
    """{"losses", "gradients", "weights": {name: the relative difference}} of an engine beside `expected`."""
    config = {"train_micro_batch_size_per_gpu": SAMPLES, "gradient_clipping": CLIPPING, "zero_optimization": {"stage": stage},
              "optimizer": {"type": "AdamW", "params": ADAMW}, "tensor_parallel": {"autotp_size": tensor}}
    engine, *_ = trireme.initialize(model=model, config=config)
    losses, gradients = [], {}
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = _loss(engine(**batches[step]))
        engine.backward(loss)
        losses.append(loss.item())
        if step == 0:
            gradients = {name: trireme.utils.safe_get_full_grad(p) for name, p in model.named_parameters() if p.requires_grad}
        engine.step()
    weights = {name: trireme.utils.safe_get_full_fp32_param(p).detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    engine.destroy()
    numbers = lambda one: {str(step): torch.tensor([value]) for step, value in enumerate(one)}
    none = {name: 1.0 for name, gradient in gradients.items() if gradient is not None and name not in expected[1] and gradient.abs().max() > 0}
    return {"losses": _apart(numbers(losses), numbers(expected[0]), 1e-12), "gradients": _apart(gradients, expected[1], SMALLEST * _total(expected[1])),
            "gradients where there are none": none, "weights": _apart(weights, {name: expected[2][name] for name in expected[1]}, 1e-3)}


def _total(gradients):
    return torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()


def _rounding(model, batches, expected):
    """{name: how far a gradient goes, relative to its norm, when weights change by their last bits}, by plain
    PyTorch."""
    found = dict.fromkeys(expected[1], 0.0)
    for seed in range(3):
        moved, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.mul_(1 + torch.randint(-1, 2, parameter.shape, generator=generator) * torch.finfo(torch.float32).eps / 2)
        for name, away in _apart(_trained(moved, batches, 1)[1], expected[1], SMALLEST * _total(expected[1])).items():
            found[name] = max(found[name], away)
    return found


def _verdict(model, batches, expected, tensor, stage):
    """{"what": "alike", "refused", "DIFFERENT" or "crash", "why"}, of the rank that has the worst."""
    before = copy.deepcopy(model)
    try:
        apart = compared(model, batches, expected, tensor, stage)
    except trireme.errors.Error as error:
        return {"what": "refused", "why": str(error)}
    except Exception as error:  # pylint: disable=broad-exception-caught
        return {"what": "crash", "why": _brief(error) + "\n" + traceback.format_exc()[-1500:]}
    worst = {f"{kind} of {name}": away for kind, found in apart.items() for name, away in found.items() if not away <= LARGEST}
    if worst and all(kind.startswith("gradients of ") for kind in worst):
        rounding = _rounding(before, batches, expected)
        worst = {kind: away for kind, away in worst.items() if not away <= ROUNDINGS * rounding[kind.removeprefix("gradients of ")]}
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, worst)
    worst = next(filter(None, every), {})
    return {"what": "DIFFERENT" if worst else "alike", "why": worst or max(away for found in apart.values() for away in found.values())}


def _left_whole(model):
    """The model with a tp_plan of its own, as its class's, without experts and styles that are not there: those layers
    are whole on every rank."""
    plan = trireme.tensor.model_facts._plan_of(model)  # pylint: disable=protected-access
    not_there = [key for key, style in plan.items() if style in NOT_THERE]
    model.tp_plan = {key: style for key, style in plan.items() if not any(key == other or key.startswith(f"{other}.") for other in not_there)}
    return model


def judged(configuration, names, tensor=2, stage=3):
    """{"class", "what", "why"} on this rank: "alike", "refused", "not run", "no plan", "DIFFERENT" or "crash".
    Collective.

    Where a style is refused, "whole" is the same of the model whose plan has no such styles.
    """
    trireme.init_distributed()
    try:
        name, model, batches, expected = tiny(configuration, names)
    except LookupError:
        return {"class": "", "what": "no plan", "why": ""}
    except RuntimeError as error:
        return {"class": "", "what": "not run", "why": str(error)}
    again = copy.deepcopy(model)
    found = {"class": f"{name}({', '.join(batches[0])})", **_verdict(model, batches, expected, tensor, stage)}
    if "this style is not there yet" in str(found["why"]):
        found["whole"] = _verdict(_left_whole(again), batches, expected, tensor, stage)
    return found


def configurations():
    """{configuration class: [model classes]} of those with a tp_plan, their own or of one in them."""
    found = collections.defaultdict(list)
    kinds = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    for mapping, models in vars(modeling_auto).items():
        if mapping.startswith("MODEL") and mapping.endswith("_MAPPING_NAMES"):
            for kind, names in models.items():
                found[kinds.get(kind)].extend(name for name in ((names,) if isinstance(names, str) else names)
                                              if hasattr(transformers, name) and name not in found[kinds.get(kind)])
    found.pop(None, None)
    result = {}
    for configuration, names in sorted(found.items()):
        config = next((config for config in _configurations(getattr(transformers, configuration)) if not isinstance(config, Exception)), None)
        if config is None or tensor_plans._has_plan(config):  # pylint: disable=protected-access
            result[configuration] = names
    return result


def main(configuration, names):
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    names = names or configurations()[configuration]
    return judged(configuration, names)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2:]), indent=1))
