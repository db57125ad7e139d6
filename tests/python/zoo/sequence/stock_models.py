"""More of Hugging Face's families: experts, windows, encoders, classes of samples, questions, images and sounds."""
import torch

from .known_models import BART, BERT, GPT2, LLAMA, PLAIN, missing, model_of
from .table import BATCH, LENGTH, REFUSED, RIGHT, floats, language, loss_of, padded, padding, placed, program, tokens, with_positions

_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_places = torch.arange(LENGTH).expand(BATCH, -1).contiguous()


def stock(name, model, config, expected=RIGHT, inputs=placed, step_of=None, **options):
    """Declares a model that takes `inputs(step)`, or a training step of it."""
    def step(m, cut, number):
        return step_of(m, cut, number) if step_of else m(**cut(**inputs(number))).loss
    program(expected, build=model_of(model, config), name=name, unavailable=missing(True), tolerance=3e-5, **options)(step)


stock("OLMo", "OlmoForCausalLM", LLAMA)
stock("Starcoder2", "Starcoder2ForCausalLM", {**LLAMA, "sliding_window": 14, **_ENDS})
stock("Starcoder2 without positions", "Starcoder2ForCausalLM", {**LLAMA, **_ENDS}, RIGHT, inputs=language)
_CODE = {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
stock("CodeGen", "CodeGenForCausalLM", {**_CODE, "n_ctx": 64, "rotary_dim": 4})
stock("GPT-BigCode", "GPTBigCodeForCausalLM", {**_CODE, "multi_query": True})
stock("GLM", "GlmForCausalLM", {**LLAMA, "head_dim": 8, **_ENDS})
_EAGER_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
stock("GPT-OSS", "GptOssForCausalLM", {**LLAMA, **_EAGER_EXPERTS, "head_dim": 8, "num_local_experts": 4, "sliding_window": 14}, RIGHT)
_DEEPSEEK = {**PLAIN, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
             "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
stock("DeepSeek-V3", "DeepseekV3ForCausalLM", {**_DEEPSEEK, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "experts_implementation": "eager"},
      ring=REFUSED)
stock("DeepSeek-V3 dense", "DeepseekV3ForCausalLM", {**_DEEPSEEK, "first_k_dense_replace": 2}, ring=REFUSED)
stock("Qwen2 with experts", "Qwen2MoeForCausalLM", {**LLAMA, **_EAGER_EXPERTS, "num_experts": 4, "moe_intermediate_size": 20,
                                                    "shared_expert_intermediate_size": 20, "output_router_logits": True}, REFUSED)
stock("OLMoE", "OlmoeForCausalLM", {**LLAMA, **_EAGER_EXPERTS, "num_experts": 4})
stock("Cohere 2", "Cohere2ForCausalLM", {**LLAMA, "sliding_window": 14, **_ENDS})
stock("SmolLM3", "SmolLM3ForCausalLM", {**LLAMA, **_ENDS})
stock("Nemotron", "NemotronForCausalLM", {**LLAMA, **_ENDS})
stock("Helium", "HeliumForCausalLM", {**LLAMA, "head_dim": 8})
stock("Persimmon", "PersimmonForCausalLM", {**PLAIN, **_ENDS})
stock("BioGPT", "BioGptForCausalLM", {**PLAIN, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layerdrop": 0.0, **_ENDS}, RIGHT,
      inputs=padded)
stock("XGLM", "XGLMForCausalLM", {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 44, "vocab_size": 37, "max_position_embeddings": 64,
                                  "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0}, RIGHT)
stock("GPT-NeoX of length as wide", "GPTNeoXForCausalLM", {**PLAIN, "hidden_size": 24, "hidden_dropout": 0.0, "attention_dropout": 0.0})
# three heads are too few for four ranks of Ulysses
stock("Llama whose part is its width", "LlamaForCausalLM", {**LLAMA, "hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 1,
                                                            "intermediate_size": 24}, on_four=False)
stock("Llama of 2 tokens each at stage 3", "LlamaForCausalLM", LLAMA, RIGHT, inputs=with_positions(lambda step: language(step, length=4)), stage=3, on_four=False)
stock("Llama nothing cut", "LlamaForCausalLM", LLAMA, step_of=lambda m, cut, step: m(**padded(step)).loss)
stock("Mamba 2", "Mamba2ForCausalLM", {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 1, "num_hidden_layers": 1, "vocab_size": 37,
                                       "state_size": 4, "chunk_size": 4}, RIGHT, inputs=language)
stock("RecurrentGemma", "RecurrentGemmaForCausalLM", {**LLAMA, "lru_width": 32, "attention_window_size": 14, "block_types": ["recurrent", "attention"]},
      RIGHT)
stock("Jamba", "JambaForCausalLM", {**LLAMA, "num_experts": 2, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
      RIGHT)

_FNET = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 44, "vocab_size": 37, "hidden_dropout_prob": 0.0,
         "use_tpu_fourier_optimizations": False}
_NARROW, _BIG_BIRD, _YOSO = {**BERT, "embedding_size": 32}, {**BERT, "attention_type": "original_full", **_ENDS}, {**BERT, "use_expectation": True}


def _typed(step):
    return {**with_positions(padded)(step), "token_type_ids": torch.zeros(BATCH, LENGTH).long()}


def _typed_without_mask(step):
    return {name: value for name, value in _typed(step).items() if name != "attention_mask"}


stock("XLNet", "XLNetLMHeadModel", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 44, "vocab_size": 37, "dropout": 0.0}, RIGHT, inputs=language)
stock("FNet", "FNetForMaskedLM", _FNET, REFUSED, inputs=language)
stock("ConvBERT", "ConvBertForMaskedLM", _NARROW, REFUSED, inputs=padded)
stock("Longformer", "LongformerForMaskedLM", {**BERT, "attention_window": 8, **_ENDS}, REFUSED, inputs=padded)
stock("BigBird", "BigBirdForMaskedLM", _BIG_BIRD, RIGHT, inputs=padded)
stock("Funnel", "FunnelForMaskedLM", {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 44, "block_sizes": [1, 1], "vocab_size": 37, "hidden_dropout": 0.0,
                                      "attention_dropout": 0.0}, REFUSED, inputs=padded)
stock("SqueezeBERT", "SqueezeBertForMaskedLM", _NARROW, RIGHT, inputs=padded)
stock("YOSO", "YosoForMaskedLM", _YOSO, RIGHT, inputs=padded)
stock("XLM-RoBERTa", "XLMRobertaForMaskedLM", {**BERT, "type_vocab_size": 1, "pad_token_id": 1}, inputs=padded)
stock("BERT nothing cut", "BertForMaskedLM", BERT, step_of=lambda m, cut, step: m(**padded(step)).loss)
stock("BigBird with all inputs", "BigBirdForMaskedLM", _BIG_BIRD, RIGHT, inputs=_typed)
stock("YOSO with all inputs", "YosoForMaskedLM", _YOSO, RIGHT, inputs=_typed)
stock("SqueezeBERT with all inputs", "SqueezeBertForMaskedLM", _NARROW, RIGHT, inputs=_typed)
stock("ConvBERT with all inputs", "ConvBertForMaskedLM", _NARROW, REFUSED, inputs=_typed)
stock("FNet with all inputs", "FNetForMaskedLM", _NARROW, REFUSED, inputs=_typed_without_mask)


def unlabeled(step):
    """Ids that are 0 where they are padding, the mask and positions."""
    whole = with_positions(padded)(step)
    whole.pop("labels")
    whole["input_ids"] = whole["input_ids"] * whole["attention_mask"]
    return whole


def _classified(labels):
    return lambda m, cut, step: m(**cut(**unlabeled(step)), labels=labels).loss


_MANY = {**LLAMA, "num_labels": 24, "problem_type": "multi_label_classification"}
_KINDS = torch.tensor([0, 2, 1])
stock("Llama to classify samples padded by zeros", "LlamaForSequenceClassification", {**LLAMA, "num_labels": 3}, step_of=_classified(_KINDS), stage=1)
stock("GPT-2 to classify samples padded by zeros", "GPT2ForSequenceClassification", {**GPT2, "num_labels": 3, "pad_token_id": 0},
      step_of=_classified(_KINDS))
stock("Qwen2 to regress samples", "Qwen2ForSequenceClassification", {**LLAMA, "num_labels": 1}, step_of=_classified(torch.tensor([0.1, 2.0, -1.0])))
stock("BERT to classify samples padded by zeros", "BertForSequenceClassification", {**BERT, "num_labels": 3}, step_of=_classified(_KINDS), on_four=True)
stock("Llama to label 24 classes", "LlamaForSequenceClassification", _MANY, step_of=lambda m, cut, step: m(
    **cut(**unlabeled(step)), labels=(floats(step, BATCH, 24) > 0).float()).loss)
stock("Llama to label 24 classes, nothing cut", "LlamaForSequenceClassification", _MANY, REFUSED, step_of=lambda m, cut, step: m(
    **unlabeled(step), labels=(floats(step, BATCH, 24) > 0).float()).loss)
stock("Llama to label 3 classes, nothing cut", "LlamaForSequenceClassification", {**LLAMA, "num_labels": 3}, step_of=lambda m, cut, step: m(
    **unlabeled(step), labels=_KINDS).loss)

_ANSWERS = {"start_positions": torch.tensor([2, 15, 20]), "end_positions": torch.tensor([4, 17, 13])}


def _question(step):
    return {"input_ids": tokens(step), "attention_mask": padding(step), "token_type_ids": torch.zeros(BATCH, LENGTH).long()}


stock("BERT to answer questions", "BertForQuestionAnswering", BERT, REFUSED, step_of=lambda m, cut, step: m(**cut(**_question(step)), **_ANSWERS).loss)
stock("BERT to answer questions with all inputs", "BertForQuestionAnswering", BERT, REFUSED, step_of=lambda m, cut, step: m(
    **cut(**_question(step), position_ids=_places), **_ANSWERS).loss)
stock("BERT to answer questions, nothing cut", "BertForQuestionAnswering", BERT, REFUSED, step_of=lambda m, cut, step: m(
    input_ids=tokens(step), attention_mask=padding(step), **_ANSWERS).loss)
stock("Llama to answer questions", "LlamaForQuestionAnswering", LLAMA, REFUSED, step_of=lambda m, cut, step: m(**cut(input_ids=tokens(step)), **_ANSWERS).loss)
stock("BERT for pretraining", "BertForPreTraining", BERT, step_of=lambda m, cut, step: m(
    **cut(**{**unlabeled(step), "labels": tokens(step)}), next_sentence_label=torch.tensor([0, 1, 1])).loss)
stock("ELECTRA's discriminator", "ElectraForPreTraining", {**BERT, "embedding_size": 16}, RIGHT, step_of=lambda m, cut, step: m(
    **cut(**{**unlabeled(step), "labels": tokens(step) % 2})).loss)

_AT = torch.tensor([3, 20, 23])
stock("GPT-2 with two heads", "GPT2DoubleHeadsModel", GPT2, RIGHT, step_of=lambda m, cut, step: m(**cut(**language(step)), mc_token_ids=_AT).loss)
stock("GPT-2 with two heads and position_ids", "GPT2DoubleHeadsModel", GPT2, RIGHT, step_of=lambda m, cut, step: m(
    **cut(**placed(step)), mc_token_ids=_AT).loss)
stock("GPT-2 with uncut labels", "GPT2LMHeadModel", GPT2, RIGHT, step_of=lambda m, cut, step: m(**cut(input_ids=tokens(step)), labels=tokens(step)).loss)
stock("GPT-2 with uncut labels and position_ids", "GPT2LMHeadModel", GPT2, RIGHT, step_of=lambda m, cut, step: m(
    **cut(input_ids=tokens(step), position_ids=_places), labels=tokens(step)).loss)

_VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 44, "image_size": 16, "patch_size": 4, "num_labels": 3,
           "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
stock("ViT of uncut images", "ViTForImageClassification", _VISION, step_of=lambda m, cut, step: m(
    floats(step, 2, 3, 16, 16), labels=torch.tensor([0, 1])).loss)
stock("ViT of images cut along rows", "ViTForImageClassification", _VISION, RIGHT, step_of=lambda m, cut, step: m(
    cut(input_ids=floats(step, 2, 3, 16, 16), dim=2)["input_ids"], labels=torch.tensor([0, 1])).loss)

_WHISPER = {**{name: value for name, value in BART.items() if name != "max_position_embeddings"}, "num_mel_bins": 8, "max_source_positions": 12,
            "max_target_positions": 64, "decoder_start_token_id": 1}


def _heard(m, cut, step, sounds, **more):
    part = cut(input_ids=tokens(step), **more)
    named = {"decoder_position_ids": part["position_ids"]} if more else {}
    return loss_of(m(input_features=floats(step, BATCH, 8, sounds), decoder_input_ids=part["input_ids"], **named).logits, part["input_ids"])


stock("Whisper of uncut sounds", "WhisperForConditionalGeneration", _WHISPER, RIGHT, step_of=lambda m, cut, step: _heard(m, cut, step, 24))
stock("Whisper of uncut sounds of another length", "WhisperForConditionalGeneration", {**_WHISPER, "max_source_positions": 9},
      step_of=lambda m, cut, step: _heard(m, cut, step, 18, position_ids=_places))
stock("Whisper that shifts its cut labels", "WhisperForConditionalGeneration", _WHISPER, RIGHT, step_of=lambda m, cut, step: m(
    input_features=floats(step, BATCH, 8, 24), labels=cut(input_ids=tokens(step))["input_ids"]).loss)

for _name in ("Pegasus", "Marian", "MBart", "M2M100", "Blenderbot"):
    stock(f"{_name}, both sides cut", f"{_name}{'MTModel' if _name == 'Marian' else 'ForConditionalGeneration'}", {**BART, "attention_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}, RIGHT, step_of=lambda m, cut, step: m(
        **cut(input_ids=tokens(step), attention_mask=padding(step), labels=tokens(step, salt=3))).loss)
stock("BART with dropped layers", "BartForConditionalGeneration", {**BART, "encoder_layers": 4, "encoder_layerdrop": 0.5}, RIGHT,
      step_of=lambda m, cut, step: (
          m(**cut(input_ids=tokens(step)), decoder_input_ids=tokens(step)[:, :3]).logits * 0.0).mean() + m.lm_head.weight.square().mean())

_CLIP = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 44, "vocab_size": 37, "max_position_embeddings": 64,
         "projection_dim": 16, "bos_token_id": 1, "eos_token_id": 36}
stock("CLIP's text model", "CLIPTextModelWithProjection", _CLIP, RIGHT, step_of=lambda m, cut, step: m(
    **cut(input_ids=tokens(step))).text_embeds.square().mean())
stock("CLIP's text model with position_ids", "CLIPTextModelWithProjection", _CLIP, step_of=lambda m, cut, step: m(
    **cut(input_ids=tokens(step), position_ids=_places)).text_embeds.square().mean())
stock("CLIP's text model with position_ids and padding", "CLIPTextModelWithProjection", _CLIP, step_of=lambda m, cut, step: m(
    **cut(**unlabeled(step))).text_embeds.square().mean())
