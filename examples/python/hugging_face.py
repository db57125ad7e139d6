"""Fine-tunes a Hugging Face model with the Trainer; only `import deepspeed` means this package.

    trireme launch --num_gpus 2 --as-deepspeed hugging_face.py [MODEL_FOLDER]

Without a folder a tiny model is made first, so that it runs without a download.
"""
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": 3},
}


class Lines(torch.utils.data.Dataset):
    """This file's bytes, in pieces."""

    def __init__(self, length=32):
        data = torch.frombuffer(bytearray(pathlib.Path(__file__).read_bytes()), dtype=torch.uint8).long()
        self.pieces = data[:data.numel() // length * length].view(-1, length)

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, index):
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def main():
    # First: it tells transformers that weights will be sharded, so that from_pretrained() never makes the whole model.
    arguments = TrainingArguments("output", deepspeed=CONFIG, max_steps=20, per_device_train_batch_size=4, learning_rate=1e-2,
                                  logging_steps=5, report_to=[], save_strategy="no", use_cpu=True)
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "tiny-llama")
    if not folder.exists() and arguments.process_index == 0:
        LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                     num_attention_heads=4)).save_pretrained(folder)
    torch.distributed.barrier()
    model = AutoModelForCausalLM.from_pretrained(folder)  # on all ranks at once: they share the work
    trainer = Trainer(model, arguments, train_dataset=Lines())
    trainer.train()
    trainer.save_model("output/final")  # Hugging Face's own files again


if __name__ == "__main__":
    main()
