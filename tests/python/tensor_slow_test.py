"""Families of Hugging Face on two and four ranks that share layers, alone and with data parallel copies, at every ZeRO
stage.

    tensor_slow_test.py PROGRAM OnRanks.test_gpt2     one family
"""
from harness import main
import tensor_test

_FAMILIES = ("llama", "llama_with_biases", "gpt2", "gpt_neox", "opt", "phi3", "qwen2", "gemma", "falcon", "falcon_with_two_keys", "bert", "t5", "bloom",
             "eager_attention", "recomputed", "accumulated", "adapted", "adapted_gpt2", "adapted_by_dora", "adapted_vocabulary", "under_init", "own")


class OnRanks(tensor_test.Families):
    """A test for each family."""


def _of(family, stages):
    def test(self):
        for ranks, tensor in ((2, 2), (4, 4), (4, 2)):
            self.assert_equal_to_plain(ranks, [[family, tensor, stage] for stage in stages], timeout_s=600)
    return test


for _name in _FAMILIES:
    setattr(OnRanks, f"test_{_name}", _of(_name, range(4)))
    setattr(OnRanks, f"test_{_name}_by_tokens", _of(f"{_name}@tokens", (0, 3)))


if __name__ == "__main__":
    main()
