"""The cost for a rank of loading a pretrained model under zero.Init."""
import json
import sys

import harness
import huggingface

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
# Smaller tensors stay whole until they hold as much together; a gathered one is put together from the ranks' parts.
WHOLE_MIB, NOISE_MIB = 16, 32


class Pretrained(harness.Case):
    def test_a_rank_holds_its_shard_and_little_more(self):
        import torch
        import transformers
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=8000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=5, num_attention_heads=16, num_key_value_heads=16))
        model.save_pretrained(self.folder / "model")
        with torch.no_grad():
            expected = model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.item()
        words = [huggingface.PROGRAMS / "pretrained.py", self.folder / "model", json.dumps(CONFIG)]
        told = harness.result_of(harness.RankServer.run(4, words, as_deepspeed=True))
        self.assertAlmostEqual(told["loss"], expected, delta=1e-5)
        self.assertGreater(told["model"], 300)
        limit = told["model"] / 4 + max(WHOLE_MIB, told["largest"]) + NOISE_MIB
        print(f"rose by {told['rise']:.0f} MiB of {told['model']:.0f}, limit {limit:.0f}", file=sys.stderr)
        self.assertLess(told["rise"], limit)


if __name__ == "__main__":
    harness.main()
