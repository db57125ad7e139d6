"""LoRA with PEFT on a Hugging Face model, sharded by ZeRO-3: the base is frozen, the adapters learn, the merged model
is saved.

    trireme launch --num_gpus 2 python lora.py
"""
import copy
import pathlib

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import trireme

CONFIG = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3},
          "optimizer": {"type": "AdamW", "params": {"lr": 2e-2}}}


def main():
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                        num_attention_heads=4, use_cache=False))
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    engine, *_ = trireme.initialize(model=model, config=CONFIG)
    text = torch.frombuffer(bytearray(pathlib.Path(__file__).read_bytes()), dtype=torch.uint8).long()
    for step in range(1, 61):
        start = torch.randint(0, text.numel() - 33, (4,), generator=torch.Generator().manual_seed(4 * step + engine.global_rank))
        ids = torch.stack([text[s:s + 32] for s in start]).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    # The checkpoint without the base is small; the merged model is an ordinary Hugging Face one.
    engine.save_checkpoint("checkpoints", exclude_frozen_parameters=True)
    with trireme.zero.GatheredParameters(list(model.parameters())):
        if engine.global_rank == 0:
            copy.deepcopy(model).merge_and_unload().save_pretrained("merged")


if __name__ == "__main__":
    main()
