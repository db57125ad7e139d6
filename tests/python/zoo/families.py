"""Programs of transformers and peft."""
import functools

import peft
import torch
from torch import nn
from torch.nn import functional as F
import trireme

from tensor_compare import compare, configuration, seeded
import zoo
from zoo import hugging_face
from zoo.hugging_face import adapted as lora, checkpointed
from zoo.parts import HIDDEN, LENGTH, VOCABULARY, tokens


def of_labels(call, _, ids):
    return call(input_ids=ids, labels=ids).loss


PROGRAMS = zoo.Collection("families", tokens, of_labels)
model = functools.partial(hugging_face.model, vocab_size=VOCABULARY, pad_token_id=0)


def llama(**more):
    return model("llama", intermediate_size=50, **more)


def gpt2(**more):
    return model("gpt2", eos_token_id=1, bos_token_id=1, **more)


def hf(name, make, loss_of=of_labels, **options):
    PROGRAMS.add(f"hf_{name}", make, loss_of, **options)


def resized(model, size, **more):
    model.resize_token_embeddings(size, **more)
    return model


hf("llama", llama)
for heads, groups in ((3, 3), (6, 3), (5, 1), (7, 7), (8, 2)):
    hf(f"llama_{heads}_{groups}", lambda heads=heads, groups=groups: llama(num_attention_heads=heads, num_key_value_heads=groups, head_dim=8, hidden_size=48 if heads == 6 else heads * 8))
hf("gpt2_3_heads", lambda: gpt2(n_embd=24, n_head=3))
hf("resized_up", lambda: resized(llama(), 53))
hf("resized_padded", lambda: resized(llama(tie_word_embeddings=True), 53, pad_to_multiple_of=8))
hf("resized_down", lambda: resized(gpt2(), 50))
hf("eager", lambda: llama(attn_implementation="eager"))
hf("outputs", lambda: llama(attn_implementation="eager"), lambda call, _, ids: _of_outputs(call(input_ids=ids, labels=ids, output_hidden_states=True, output_attentions=True)))


def _of_outputs(output):
    return output.loss + sum(hidden.pow(2).mean() for hidden in output.hidden_states) + sum(part[:, 0].max() + part.mean(1).std() for part in output.attentions)


hf("no_cache", llama, lambda call, _, ids: call(input_ids=ids, labels=ids, use_cache=False).loss)
hf("cached", llama, lambda call, _, ids: _cached(call, ids))


def _cached(call, ids):
    first = call(input_ids=ids[:, :4], use_cache=True)
    second = call(input_ids=ids[:, 4:], past_key_values=first.past_key_values, use_cache=True)
    logits = torch.cat((first.logits, second.logits), 1)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


hf("padded", llama, lambda call, _, ids: call(input_ids=ids, attention_mask=(torch.arange(LENGTH) >= torch.tensor([0, 2, 5])[:, None]).long(),
                                              labels=ids.masked_fill(torch.arange(LENGTH) < torch.tensor([0, 2, 5])[:, None], -100)).loss)
hf("embeds", llama, lambda call, module, ids: call(inputs_embeds=module.get_input_embeddings()(ids) * 1.5, labels=ids).loss)
hf("sequence_classification", lambda: model("LlamaForSequenceClassification", intermediate_size=50, num_labels=3), lambda call, _, ids: call(input_ids=ids, labels=ids[:, 0] % 3).loss)
def _question():
    """A model whose last bias adds to all places alike: its gradient is 0 but for rounding."""
    bert = model("BertForQuestionAnswering")
    bert.qa_outputs.bias.requires_grad_(False)
    return bert


hf("question", _question, lambda call, _, ids: call(input_ids=ids, start_positions=ids[:, 0] % 5, end_positions=ids[:, 1] % 5).loss)
hf("token_classification", lambda: model("BertForTokenClassification"), lambda call, _, ids: call(input_ids=ids, labels=ids % 2).loss)


hf("gradient_checkpointing", lambda: checkpointed(llama()))
hf("gradient_checkpointing_reentrant", lambda: checkpointed(llama(), reentrant=True))


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
hf("lora_all", lambda: lora(llama(), target_modules=ALL))
hf("lora_all_linear", lambda: lora(llama(), target_modules="all-linear"))
hf("lora_rslora", lambda: lora(llama(), target_modules=["o_proj", "down_proj"], use_rslora=True))
hf("lora_dora", lambda: lora(llama(), target_modules=["q_proj", "v_proj"], use_dora=True))
hf("lora_dora_rows", lambda: lora(llama(), target_modules=["o_proj", "down_proj"], use_dora=True))
hf("lora_embedding", lambda: lora(llama(), target_modules=["q_proj", "embed_tokens", "lm_head"]))
hf("lora_saved_modules", lambda: lora(llama(), target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]))
hf("lora_bias", lambda: lora(llama(attention_bias=True), target_modules=["q_proj", "o_proj"], bias="lora_only"))
hf("lora_gpt2", lambda: lora(gpt2(), target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True))
hf("ia3", lambda: peft.get_peft_model(llama(), peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])))
hf("prompt_tuning", lambda: peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)))
hf("prefix_tuning", lambda: peft.get_peft_model(llama(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)))
hf("vera", lambda: peft.get_peft_model(llama(), peft.VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4)))
hf("adalora", lambda: peft.get_peft_model(llama(), peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_r=4, total_step=10)))


def _around(model):
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.value = model, nn.Linear(HIDDEN, 1)

        def forward(self, input_ids):
            output = self.backbone(input_ids=input_ids, output_hidden_states=True)
            return output.logits, self.value(output.hidden_states[-1]).squeeze(-1)
    return Around()


def _ppo(call, _, ids):
    logits, values = call(ids)
    logs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    advantages = (values[:, 1:].detach() - values[:, 1:].detach().mean()) / (values.std().detach() + 1)
    ratio = (logs - logs.detach()).exp()
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean() + 0.5 * (values - 0.3).pow(2).mean() - 0.01 * entropy


hf("value_head", lambda: _around(llama()), _ppo)


def _dpo(call, _, ids):
    def log(of):
        return call(input_ids=of).logits[:, :-1].log_softmax(-1).gather(-1, of[:, 1:, None]).squeeze(-1).sum(-1)
    return -F.logsigmoid(0.1 * (log(ids) - log(ids.flip(0)))).mean() + of_labels(call, None, ids)


hf("dpo", llama, _dpo)


def _generating(make, **how):
    def run(tensor, stage):
        """Between steps the model generates."""
        said = {}

        def between(call, module, found, who):
            module = getattr(module, "module", module) if hasattr(module, "global_rank") else module
            module.eval()
            with torch.no_grad():
                torch.manual_seed(3)
                said[who] = module.generate(input_ids=tokens(90)[0][:, :4], max_new_tokens=5, pad_token_id=0, **how).float()
            module.train()
            if who == "plain":
                found.see("generated", str(how), said["own"], said["plain"])
        return compare(tensor, stage, make, of_labels, between=between)
    return run


for _name, _how in (("greedy", dict(do_sample=False)), ("without_cache", dict(do_sample=False, use_cache=False)), ("beams", dict(num_beams=3)), ("sampled", dict(do_sample=True, top_k=5)),
                    ("top_p", dict(do_sample=True, top_p=0.8, temperature=0.7)), ("penalised", dict(do_sample=False, repetition_penalty=1.3, no_repeat_ngram_size=2))):
    PROGRAMS.own(_generating(llama, **_how), f"hf_generate_{_name}")


_t5 = functools.partial(model, "T5ForConditionalGeneration")
PROGRAMS.own(_generating(_t5, do_sample=False), "hf_generate_t5")
hf("t5", _t5)
hf("t5_odd_heads", lambda: _t5(num_heads=3))


_GROUPED = dict(num_key_value_heads=2)
_OF_EIGHT = dict(num_key_value_heads=2, head_dim=8)
for _name, _more in {
        "mistral": dict(num_key_value_heads=2, sliding_window=4), "qwen3": _OF_EIGHT, "gemma2": _OF_EIGHT, "olmo2": dict(num_key_value_heads=4), "phi": {},
        "stablelm": _GROUPED, "starcoder2": _GROUPED, "mixtral": {}, "granite": _GROUPED, "cohere": _GROUPED, "smollm3": _GROUPED, "glm4": _OF_EIGHT,
        "qwen2_moe": dict(num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24),
        "gpt_oss": dict(_OF_EIGHT, num_local_experts=4, num_experts_per_tok=2), "codegen": dict(n_positions=32, rotary_dim=4), "mamba": dict(state_size=4),
        "gptj": dict(n_positions=32, rotary_dim=4), "mpt": {}, "gpt_bigcode": dict(n_positions=32), "roberta": dict(is_decoder=True), "biogpt": {}, "xglm": {},
        "llama4_text": dict(_OF_EIGHT, num_local_experts=2, intermediate_size_mlp=48),
        "deepseek_v3": dict(n_routed_experts=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
                            n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=24)}.items():
    hf(f"model_{_name}", functools.partial(model, _name, **_more))


@PROGRAMS.own
def hf_resized_after(tensor, stage):
    """Resizing after initialize(): refused by name."""
    own = seeded(llama)
    engine, *_ = trireme.initialize(model=own, config=configuration(tensor, stage))
    own.resize_token_embeddings(60)
    engine.backward(of_labels(engine, own, *tokens(0)))
    engine.step()
    return {"finished": [1.0, "without an error"]}


@PROGRAMS.own
def hf_lora_merged(tensor, stage):
    """Adapters are merged and unmerged between steps, as PEFT does for inference."""
    def between(call, module, found, who):
        module = module.module if hasattr(module, "global_rank") else module
        with torch.no_grad():
            module.merge_adapter()
            logits[who] = module(input_ids=tokens(91)[0]).logits
            module.unmerge_adapter()
        if who == "plain":
            found.see("merged", "logits", logits["own"] + 0, logits["plain"])
    logits = {}
    return compare(tensor, stage, lambda: lora(llama(), target_modules=ALL), of_labels, between=between)
