"""Tiny models of every configuration class of transformers that has a tp_plan, by shrinking what it counts. They are no
collection: to tell which classes have a plan takes a minute."""
import collections
import copy
import inspect
import re
import warnings

import torch
import transformers
import trireme

from transformers.models.auto import modeling_auto

STEPS, SAMPLES, LENGTH, VOCABULARY, CLIPPING = 2, 2, 12, 96, 0.5
LARGEST_MODEL = 8_000_000  # parameters; more is what shrinking does not know, and takes minutes
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-4, "weight_decay": 0.1}
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


def loss_of(output):
    """The output's own, or of all its tensors; each number counts differently."""
    loss = output.get("loss") if isinstance(output, dict) else None
    if loss is not None:
        return loss
    tensors = _floats(output)
    if not tensors:
        raise ValueError("its output has no tensor with a gradient")
    return sum((tensor * torch.linspace(0, 9, tensor.numel()).sin().view(tensor.shape)).mean() + tensor.pow(2).mean() for tensor in tensors)


def trained(model, batches, steps=STEPS):
    """(losses, the first step's gradients, weights at the end) of plain PyTorch."""
    optimizer, losses, gradients = torch.optim.AdamW(model.parameters(), **ADAMW), [], {}
    for step in range(steps):
        torch.manual_seed(step)
        loss = loss_of(model(**batches[step]))
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}


def _is_finite(outcome):
    losses, gradients, weights = outcome
    return all(map(torch.isfinite, map(torch.tensor, losses))) and all(tensor.isfinite().all() for tensor in (*gradients.values(), *weights.values()))


def _sound(model, which):
    """The outcome of plain PyTorch with the model; an Exception: it cannot be compared."""
    batches = []
    for step in range(STEPS):
        batches.append(_batches(model, step)[which])
    first = trained(copy.deepcopy(model), batches)
    if not _is_finite(first):
        raise ValueError("its gradients or weights are not finite")
    if not first[1]:
        raise ValueError("it has no gradients")
    again = trained(copy.deepcopy(model), batches, 1)
    if again[0][0] != first[0][0] or any(not torch.equal(again[1][name], gradient) for name, gradient in first[1].items()):
        raise ValueError("it is not the same twice in one process")
    return batches, first


def brief(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def tiny(configuration, names):
    """(model, batches, what plain PyTorch finds) of the first class that runs.

    Raises  LookupError: no class of the configuration has a plan; RuntimeError: with the reasons, none can be built and
            run.
    """
    errors, is_planned = collections.OrderedDict(), False
    make = getattr(transformers, configuration)
    for name in sorted(names, key=lambda name: (next((place for place, head in enumerate(_HEADS) if name.endswith(head)), len(_HEADS)), len(name))):
        for config in _configurations(make):
            if isinstance(config, Exception):
                errors.setdefault(f"configuration: {brief(config)}")
                continue
            try:
                with torch.device("meta"):
                    model = getattr(transformers, name)(config)
                if not trireme.tensor.model_facts._plan_of(model):  # pylint: disable=protected-access
                    break
                is_planned = True
                count = sum(p.numel() for p in model.parameters())
                if count > LARGEST_MODEL:
                    raise ValueError(f"tiny has {count} parameters: {max(model.named_parameters(), key=lambda pair: pair[1].numel())[0]}")
                torch.manual_seed(1)
                model = _filled(getattr(transformers, name)(copy.deepcopy(config)))
            except Exception as error:  # pylint: disable=broad-exception-caught
                errors.setdefault(f"{name}: {brief(error)}")
                continue
            for which, batch in enumerate(_batches(model, 0)):
                try:
                    return name, model, *_sound(model, which)
                except Exception as error:  # pylint: disable=broad-exception-caught
                    errors.setdefault(f"{name}({', '.join(batch)}): {brief(error)}")
    if not is_planned and not errors:
        raise LookupError("no plan")
    raise RuntimeError("\n".join(errors))


def has_plan(config):
    """Whether a configuration has a tp_plan, or one in it."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {}) or {}]
    return bool(config.base_model_tp_plan) or any(has_plan(part) for part in parts if isinstance(part, transformers.PreTrainedConfig))


def classes():
    """Yields (configuration class, model class) of all automatic classes; a model class may have several."""
    configurations_of = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    for mapping, models in vars(modeling_auto).items():
        if mapping.startswith("MODEL") and mapping.endswith("_MAPPING_NAMES"):
            for kind, names in models.items():
                for name in (names,) if isinstance(names, str) else names:
                    if kind in configurations_of and hasattr(transformers, name):
                        yield configurations_of[kind], name


def configurations():
    """{configuration class: [model classes]} of those with a tp_plan, their own or of one in them."""
    found = collections.defaultdict(dict)
    for configuration, name in classes():
        found[configuration][name] = True
    result = {}
    for configuration, names in sorted(found.items()):
        config = next((config for config in _configurations(getattr(transformers, configuration)) if not isinstance(config, Exception)), None)
        if config is None or has_plan(config):
            result[configuration] = list(names)
    return result
