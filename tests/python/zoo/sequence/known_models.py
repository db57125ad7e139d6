"""Tiny models of Hugging Face's families, most of them with use_cache=True, which is the default."""
import importlib.metadata

import torch

from .table import BATCH, LENGTH, REFUSED, RIGHT, language, padded, padding, placed, program, run_forward, tokens, with_positions

WORDS = 37
LLAMA = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=44, vocab_size=WORDS,
              max_position_embeddings=64, pad_token_id=0)
PLAIN = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
BERT = {**PLAIN, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 50.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
             "original_max_position_embeddings": 16}


def _version():
    try:
        return tuple(int(part) for part in importlib.metadata.version("transformers").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return (0, 0)


def missing(needs_5):
    if _version() == (0, 0):
        return "transformers is not installed"
    if needs_5 and _version() < (5, 0):
        return f"needs transformers 5, found {'.'.join(map(str, _version()))}: the newest one for Python 3.10"
    return ""


def model_of(name, config, lora=False, checkpointing=False):
    """Builds the model of a class's name, and its configuration's class by the model's."""
    def build():
        import transformers  # pylint: disable=import-outside-toplevel
        kind = getattr(transformers, name)
        model = kind(kind.config_class(**config)).train()
        if lora:
            import peft  # pylint: disable=import-outside-toplevel
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"]))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for parameter in model.parameters():  # biases and norms that begin with zeros and ones hide differences
            with torch.no_grad():
                parameter.add_(torch.randn(parameter.shape) * 0.02)
        return model
    return build


def family(name, model, model_config, expected=RIGHT, inputs=language, needs_5=False, lora=False, checkpointing=False, **options):
    """Declares a model; a decoder that has a cache by default also without one."""
    if not lora and model.endswith(("CausalLM", "LMHeadModel")) and "use_cache" not in model_config:
        family(f"{name}, use_cache=False", model, uncached(model_config), expected, inputs, needs_5, checkpointing=checkpointing, **options)
    step_of = run_forward(inputs)
    options = {"tolerance": 2e-5, **options}
    program(expected, build=model_of(model, model_config, lora, checkpointing), name=name, unavailable=missing(needs_5), **options)(
        lambda model, cut, step: step_of(model, cut, step).loss)


def uncached(config):
    return {**config, "use_cache": False}


def with_types(inputs):
    return lambda step: {**(whole := inputs(step)), "token_type_ids": torch.zeros_like(whole["input_ids"])}


padded_and_placed = with_positions(padded)

# Llama and what is like it
family("Llama", "LlamaForCausalLM", LLAMA, inputs=placed, on_four=True)
family("Llama without position_ids", "LlamaForCausalLM", LLAMA, RIGHT)
family("Llama with padding", "LlamaForCausalLM", LLAMA, inputs=padded_and_placed, on_four=True)
family("Llama with a mask of ones", "LlamaForCausalLM", LLAMA, inputs=lambda step: {**placed(step), "attention_mask": torch.ones(BATCH, LENGTH).long()})
family("Llama with padding, without position_ids", "LlamaForCausalLM", LLAMA, RIGHT, inputs=padded)
family("Llama, tied, at stage 3", "LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}, inputs=placed, stage=3)
family("Llama with checkpointing", "LlamaForCausalLM", uncached(LLAMA), inputs=placed, checkpointing=True)
family("Llama with recomputed layers", "LlamaForCausalLM", uncached(LLAMA), RIGHT, inputs=placed, config={"trireme": {"recompute": "full"}}, on_four=True)
family("Llama with LoRA", "LlamaForCausalLM", LLAMA, inputs=placed, lora=True)
family("Llama with eager attention", "LlamaForCausalLM", {**LLAMA, "attn_implementation": "eager"}, RIGHT, inputs=placed)
family("Llama with dynamic NTK", "LlamaForCausalLM", {**LLAMA, "max_position_embeddings": 16, "rope_parameters": {
    "rope_type": "dynamic", "factor": 2.0, "rope_theta": 50.0}}, inputs=placed, needs_5=True, on_four=True, keeps_state=True)
family("Llama with yarn", "LlamaForCausalLM", {**LLAMA, "rope_parameters": {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 50.0, "original_max_position_embeddings": 16}}, inputs=placed, needs_5=True)
family("Mistral with a window smaller than a part", "MistralForCausalLM", {**LLAMA, "sliding_window": 5}, inputs=placed, on_four=True)
family("Mistral with a window larger than a part", "MistralForCausalLM", {**LLAMA, "sliding_window": 14}, inputs=placed, on_four=True)
family("Mistral with a window as long as a part", "MistralForCausalLM", {**LLAMA, "sliding_window": 12}, inputs=placed)
family("Mistral with a window larger than all", "MistralForCausalLM", {**LLAMA, "sliding_window": 40}, inputs=placed)
family("Mistral with a larger window and padding", "MistralForCausalLM", {**LLAMA, "sliding_window": 14}, inputs=padded_and_placed, on_four=True)
family("Mistral with a window and no position_ids", "MistralForCausalLM", {**LLAMA, "sliding_window": 14}, RIGHT)
family("Qwen2", "Qwen2ForCausalLM", LLAMA, inputs=placed)
family("Qwen2 with windows in its last layer", "Qwen2ForCausalLM", {**LLAMA, "use_sliding_window": True, "sliding_window": 14, "max_window_layers": 1},
       inputs=placed)
family("Qwen3", "Qwen3ForCausalLM", {**LLAMA, "head_dim": 8}, inputs=placed)
family("Gemma", "GemmaForCausalLM", {**LLAMA, "head_dim": 8}, inputs=placed, on_four=True)
family("Gemma 2", "Gemma2ForCausalLM", {**LLAMA, "head_dim": 8, "sliding_window": 14}, RIGHT, inputs=placed)
family("Gemma 3", "Gemma3ForCausalLM", {**LLAMA, "head_dim": 8, "sliding_window": 14}, RIGHT, inputs=placed)
family("Phi-3 with longrope", "Phi3ForCausalLM", {**LLAMA, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 16, "resid_pdrop": 0.0,
                                                  "embd_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}, inputs=placed, needs_5=True, on_four=True)
family("Phi", "PhiForCausalLM", {**LLAMA, "bos_token_id": 1, "eos_token_id": 2}, inputs=placed)
family("Granite", "GraniteForCausalLM", LLAMA, RIGHT, inputs=placed)
family("OLMo 2", "Olmo2ForCausalLM", LLAMA, RIGHT, inputs=placed)
family("Cohere", "CohereForCausalLM", {**LLAMA, "bos_token_id": 1, "eos_token_id": 2}, RIGHT, inputs=placed)
family("StableLM", "StableLmForCausalLM", LLAMA, RIGHT, inputs=placed)
family("Mixtral", "MixtralForCausalLM", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}, RIGHT, inputs=placed, on_four=True)
family("Mixtral with eager experts", "MixtralForCausalLM", {**LLAMA, "num_local_experts": 4, "experts_implementation": "eager"}, RIGHT, inputs=placed)
family("Mixtral with its routers' loss", "MixtralForCausalLM", {**LLAMA, "num_local_experts": 4, "output_router_logits": True}, REFUSED, inputs=placed)
family("Qwen3 with experts", "Qwen3MoeForCausalLM", {**LLAMA, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
       RIGHT, inputs=placed)

# GPT
GPT2 = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=WORDS, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=2)
family("GPT-2", "GPT2LMHeadModel", GPT2, inputs=placed, on_four=True)
family("GPT-2 without position_ids", "GPT2LMHeadModel", GPT2, RIGHT)
family("GPT-2 with padding", "GPT2LMHeadModel", GPT2, inputs=padded_and_placed)
family("GPT-2 with token types", "GPT2LMHeadModel", GPT2, inputs=with_types(placed))
_NEOX = {**PLAIN, "rotary_pct": 0.5, "hidden_dropout": 0.0, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2}
family("GPT-NeoX", "GPTNeoXForCausalLM", _NEOX, inputs=placed)
family("GPT-NeoX with padding", "GPTNeoXForCausalLM", _NEOX, inputs=padded_and_placed)
family("GPT-J", "GPTJForCausalLM", {**GPT2, "rotary_dim": 4}, RIGHT, inputs=placed)
family("GPT-Neo", "GPTNeoForCausalLM", {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS, "max_position_embeddings": 64,
                                        "window_size": 14, "attention_types": [[["global", "local"], 1]]}, RIGHT, inputs=placed)
_OPT = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=44, vocab_size=WORDS, max_position_embeddings=64, dropout=0.0,
            word_embed_proj_dim=32)
family("OPT with a mask", "OPTForCausalLM", _OPT, inputs=padded, on_four=True)
family("OPT without a mask", "OPTForCausalLM", _OPT, RIGHT)
family("OPT with position_ids", "OPTForCausalLM", _OPT, RIGHT, inputs=placed)
family("BLOOM", "BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": WORDS}, RIGHT, on_four=True)
family("BLOOM with a mask", "BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": WORDS}, RIGHT, inputs=padded)
family("Falcon", "FalconForCausalLM", {**PLAIN, "hidden_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2}, RIGHT, inputs=placed)
family("Falcon with ALiBi", "FalconForCausalLM", {**PLAIN, "alibi": True, "bos_token_id": 1, "eos_token_id": 2}, RIGHT, inputs=padded)
family("MPT", "MptForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": WORDS, "max_seq_len": 64}, RIGHT)
family("Mamba", "MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": WORDS, "state_size": 4}, RIGHT)
family("RWKV", "RwkvForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": WORDS, "context_length": 64}, RIGHT)

# BERT
family("BERT", "BertForMaskedLM", BERT, inputs=with_types(placed), on_four=True)
family("BERT without position_ids", "BertForMaskedLM", BERT, RIGHT)
family("BERT with padding", "BertForMaskedLM", BERT, inputs=with_types(padded_and_placed), on_four=True)
family("BERT to classify tokens", "BertForTokenClassification", {**BERT, "num_labels": WORDS}, inputs=with_types(padded_and_placed))
family("RoBERTa without position_ids", "RobertaForMaskedLM", {**BERT, "type_vocab_size": 1}, inputs=with_types(padded), on_four=True)
family("RoBERTa without anything", "RobertaForMaskedLM", {**BERT, "type_vocab_size": 1}, RIGHT)
family("RoBERTa with position_ids", "RobertaForMaskedLM", {**BERT, "type_vocab_size": 1}, inputs=with_types(placed))
family("DistilBERT", "DistilBertForMaskedLM", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 44, "vocab_size": WORDS, "dropout": 0.0,
                                               "attention_dropout": 0.0, "max_position_embeddings": 64}, RIGHT, inputs=padded)
family("ALBERT", "AlbertForMaskedLM", {**BERT, "embedding_size": 16}, RIGHT, inputs=with_types(padded_and_placed))
family("ELECTRA", "ElectraForMaskedLM", {**BERT, "embedding_size": 16}, RIGHT, inputs=with_types(padded_and_placed))
family("DeBERTa", "DebertaV2ForMaskedLM", {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, RIGHT, inputs=padded)
family("MPNet", "MPNetForMaskedLM", BERT, RIGHT, inputs=padded)
family("ModernBERT", "ModernBertForMaskedLM", {**PLAIN, "local_attention": 8, "global_attn_every_n_layers": 2, "attention_dropout": 0.0}, RIGHT,
       inputs=padded_and_placed)

# a class of each sample
def _sentences(inputs):
    def made(step):
        whole = inputs(step)
        whole.pop("labels")
        return whole
    return made


def _classifier(name, model, config, expected, inputs, **options):
    @program(expected, build=model_of(model, {**config, "num_labels": 3}), name=name, unavailable=missing(False), tolerance=2e-5, **options)
    def classify(model, cut, step):
        return model(**cut(**inputs(step)), labels=torch.tensor([2, 0, 1])).loss
    return classify


_classifier("Llama to classify samples", "LlamaForSequenceClassification", LLAMA, RIGHT, _sentences(padded_and_placed), on_four=True)
_classifier("GPT-2 to classify samples", "GPT2ForSequenceClassification", {**GPT2, "pad_token_id": 0}, RIGHT, _sentences(padded_and_placed))
_classifier("BERT to classify samples", "BertForSequenceClassification", BERT, RIGHT, with_types(_sentences(padded_and_placed)), on_four=True)
_classifier("RoBERTa to classify samples", "RobertaForSequenceClassification", BERT, RIGHT, _sentences(padded))


# --- encoders with decoders ---

BART = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=44,
             decoder_ffn_dim=44, vocab_size=WORDS, max_position_embeddings=64, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
             decoder_start_token_id=2)
_T5 = dict(d_model=32, d_kv=8, d_ff=44, num_layers=1, num_heads=4, vocab_size=WORDS, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)


def _translation(name, model, config, expected, mask, target_length=LENGTH, **options):
    @program(expected, build=model_of(model, config), name=name, unavailable=missing(False), tolerance=2e-5, **options)
    def translate(model, cut, step):
        targets = cut(input_ids=tokens(step, 2, length=target_length), labels=tokens(step, 3, length=target_length))
        source = cut(input_ids=tokens(step, 1), **({"attention_mask": padding(step)} if mask else {}))
        return model(**source, decoder_input_ids=targets["input_ids"], labels=targets["labels"]).loss
    return translate


_translation("BART", "BartForConditionalGeneration", BART, RIGHT, False, on_four=True)
_translation("BART with padding", "BartForConditionalGeneration", BART, RIGHT, True)
_translation("BART with shorter targets and padding", "BartForConditionalGeneration", uncached(BART), RIGHT, True, target_length=18)
_translation("T5", "T5ForConditionalGeneration", _T5, RIGHT, False, on_four=True, ring=REFUSED)
_translation("T5 with padding", "T5ForConditionalGeneration", _T5, RIGHT, True, ring=REFUSED)
_translation("T5 without a cache and with shorter targets", "T5ForConditionalGeneration", uncached(_T5), RIGHT, True, target_length=18, ring=REFUSED)
_translation("Marian", "MarianMTModel", BART, RIGHT, True)


program(RIGHT, build=model_of("BartForConditionalGeneration", BART), name="BART that makes its decoder's inputs", unavailable=missing(False))(
    lambda model, cut, step: model(**cut(input_ids=tokens(step, 1), labels=tokens(step, 3))).loss)


@program(RIGHT, ring=REFUSED, build=model_of("T5ForConditionalGeneration", _T5), name="T5 that makes its decoder's inputs", unavailable=missing(False))
def t5(model, cut, step):
    return model(**cut(input_ids=tokens(step, 1), labels=tokens(step, 3))).loss


# --- programs around a model ---

@program(RIGHT, build=model_of("LlamaForCausalLM", LLAMA), name="Llama with embeddings as inputs", unavailable=missing(False))
def embedded(model, cut, step):
    whole = placed(step)
    table = getattr(model, "module", model).get_input_embeddings()
    parts = cut(**whole)
    return model(inputs_embeds=table(parts.pop("input_ids")), **parts).loss


@program(RIGHT, build=model_of("LlamaForCausalLM", LLAMA), name="Llama with the program's own loss", unavailable=missing(False))
def own_loss(model, cut, step):
    parts = cut(**placed(step))
    labels = parts.pop("labels")
    scores = model(**parts).logits[:, :-1]
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten())


@program(RIGHT, build=model_of("LlamaForCausalLM", LLAMA), name="Llama with num_items_in_batch", unavailable=missing(False), on_four=True)
def items(model, cut, step):
    """The trainer's way to normalize: a count before the cut."""
    whole = placed(step)
    count = (whole["labels"][:, 1:] != -100).sum()
    return model(**cut(**whole), num_items_in_batch=count).loss


@program(RIGHT, build=model_of("LlamaForCausalLM", LLAMA), name="Llama with num_items_in_batch of the cut labels", unavailable=missing(False))
def local_items(model, cut, step):
    parts = cut(**placed(step))
    return model(**parts, num_items_in_batch=(parts["labels"] != -100).sum()).loss


@program(RIGHT, build=model_of("LlamaForCausalLM", LLAMA), name="Llama with logits_to_keep", unavailable=missing(False))
def kept(model, cut, step):
    parts = cut(**placed(step))
    parts.pop("labels")
    return model(**parts, logits_to_keep=1).logits.square().mean()


@program(RIGHT, build=model_of("LlamaForCausalLM", LLAMA), name="Llama with packed documents by position_ids", unavailable=missing(False), on_four=True)
def packed(model, cut, step):
    """positions begin anew with each document; transformers makes a mask of them."""
    whole = language(step)
    whole["position_ids"] = torch.cat([torch.arange(7), torch.arange(11), torch.arange(6)]).expand(BATCH, -1).contiguous()
    return model(**cut(**whole)).loss


@program(RIGHT, build=model_of("LlamaForCausalLM", LLAMA), name="Llama with a mask of four dims", unavailable=missing(False))
def four_dims(model, cut, step):
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None].expand(BATCH, 1, -1, -1)
    return model(**cut(**placed(step)), attention_mask=mask).loss


@program(RIGHT, build=model_of("LlamaForCausalLM", LLAMA), name="Llama, DPO with padding", unavailable=missing(False), on_four=True)
def preferences(model, cut, step):
    def chances(salt, mask):
        ids = tokens(step, salt)
        parts = cut(input_ids=ids, labels=ids, position_ids=torch.arange(LENGTH)[None], attention_mask=mask)
        return parts
    good, bad = chances(1, padding(0)), chances(2, padding(1))
    first, second = (model(**parts).loss for parts in (good, bad))
    return -torch.nn.functional.logsigmoid(first - second)


@program(RIGHT, build=model_of("BertModel", BERT), name="BERT, sentences contrasted by masked means", unavailable=missing(False))
def sentences(model, cut, step):
    pooled = []
    for salt in (1, 2):
        ids = tokens(step, salt)
        parts = cut(input_ids=ids, attention_mask=padding(salt), position_ids=torch.arange(LENGTH)[None], token_type_ids=torch.zeros_like(ids))
        mask = parts["attention_mask"].unsqueeze(-1).float()
        pooled.append((model(**parts).last_hidden_state * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.cross_entropy(pooled[0] @ pooled[1].T, torch.arange(BATCH))


@program(RIGHT, build=model_of("LlamaForCausalLM", LLAMA), name="Llama evaluated without gradients", unavailable=missing(False))
def evaluated(model, cut, step):
    model.eval()
    with torch.no_grad():
        return model(**cut(**placed(step))).loss


@program(RIGHT, build=model_of("LlamaForCausalLM", LLAMA), name="Llama of unequal parts", unavailable=missing(False))
def unequal(model, cut, step):
    return model(**cut(**with_positions(lambda step: language(step, 23))(step))).loss


