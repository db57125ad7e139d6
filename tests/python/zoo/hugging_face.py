"""Tiny models of Hugging Face for all collections, each family once: without dropout, and of the same sizes where a
collection asks for no others."""
import peft
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as LANGUAGE_MODELS

# Under Llama's names; where a family calls them otherwise, its configuration's attribute_map says how, or _OWN.
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=64)
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "activation_dropout", "dropout", "dropout_rate", "embd_pdrop",
             "embedding_dropout", "hidden_dropout", "hidden_dropout_prob", "resid_dropout", "resid_pdrop", "residual_dropout")
_GROUPED = dict(num_key_value_heads=2)
# By the kind of configuration, without "Config": what it has beside SIZES.
_OWN = {
    "Llama": _GROUPED, "Qwen2": _GROUPED, "Phi3": {**_GROUPED, "pad_token_id": 0}, "Gemma": dict(num_key_value_heads=1, head_dim=8),
    "Mixtral": dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "Falcon": dict(num_attention_heads=8, num_kv_heads=4, new_decoder_architecture=True),
    "GPT2": dict(n_positions=32), "OPT": dict(ffn_dim=48, word_embed_proj_dim=32), "XGLM": dict(ffn_dim=48),
    "T5": dict(d_kv=8, d_ff=48, decoder_start_token_id=0), "ViT": dict(image_size=16, patch_size=4, num_labels=5),
}


def config_of(of, **more):
    """A configuration of the class `of`; of SIZES and of what they are replaced by it takes those that it has."""
    default = of()
    sizes = {**SIZES, **{name: more.pop(name) for name in SIZES if name in more}}
    has = lambda name: hasattr(default, name)
    return of(**{**{of.attribute_map.get(name, name): value for name, value in sizes.items() if has(name)}, **dict.fromkeys(filter(has, _DROPOUTS), 0.0),
                 **_OWN.get(of.__name__.removesuffix("Config"), {}), **more})


def model(kind, **more):
    """A model of the class of this name, or the language model of a family, such as "llama"."""
    of = getattr(transformers, LANGUAGE_MODELS.get(kind, kind))
    return of(config_of(of.config_class, **more))


def adapted(base, **more):
    """With LoRA on some of its layers, beside which the others are frozen. No product begins as 0."""
    result = peft.get_peft_model(base, peft.LoraConfig(**{**dict(r=4, task_type="CAUSAL_LM"), **more}))
    for name, parameter in result.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            nn.init.normal_(parameter, std=0.1)
    return result


def checkpointed(base, reentrant=False):
    """That recomputes its layers, by torch.utils.checkpoint."""
    base.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return base.train()
