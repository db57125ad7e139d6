"""Fine-tunes a small Llama by the transformers Trainer. Argument: JSON of `options` below; prints rank 0's history.

Knows nothing of Trireme: the configuration of DeepSpeed is a file, as for any such program.
"""
import json
import os
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

LLAMA = LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=32)


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        self.tokens = torch.randint(0, 128, (count, 16), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main(options):
    transformers.logging.set_verbosity_error()
    # Evaluations are the exact losses: those of steps are logged with four digits.
    arguments = TrainingArguments(
        options["out"], max_steps=options.get("steps", 6), per_device_train_batch_size=options["micro"],
        gradient_accumulation_steps=options.get("accumulation", 1), per_device_eval_batch_size=4, logging_steps=1,
        learning_rate=1e-2, weight_decay=0.1, warmup_steps=2, report_to=[], use_cpu=True, seed=3, eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=3, disable_tqdm=True, deepspeed=options.get("deepspeed"),
        fsdp=options.get("fsdp"), fsdp_config=options.get("fsdp_config"),
        bf16=options.get("bf16", False))
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(options["model"]) if "model" in options else LlamaForCausalLM(LLAMA)
    if "lora" in options:
        from peft import LoraConfig, get_peft_model
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options["lora"]))
    if "save_first" in options:
        model.save_pretrained(options["save_first"])
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(64, 1), eval_dataset=Tokens(16, 2))
    trainer.train(resume_from_checkpoint=options.get("resume"))
    trainer.save_model(options["out"] + "/final")
    if os.environ.get("RANK", "0") == "0":
        history = trainer.state.log_history
        told = {name: [entry[name] for entry in history if name in entry] for name in ("eval_loss", "grad_norm", "learning_rate")}
        print("TEST_RESULT " + json.dumps(told))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
