"""Families of Hugging Face on two and four ranks that share layers, alone and with data parallel copies, at every ZeRO
stage.

    tensor_slow_test.py PROGRAM OnRanks.test_gpt2     one family
"""
from harness import main
import tensor_test
from tensor_test import PROGRAMS

_FAMILIES = ("llama", "llama_with_biases", "gpt2", "gpt_neox", "opt", "phi3", "qwen2", "gemma", "falcon", "falcon_with_two_keys", "bert", "t5", "bloom",
             "eager_attention", "recomputed", "accumulated", "adapted", "adapted_gpt2", "adapted_by_dora", "adapted_vocabulary", "under_init", "own")


class OnRanks(tensor_test.Families):
    """A test for each family, and one of their checkpoints."""

    def test_a_key_that_ranks_share_is_saved_once_and_loads_at_another_degree(self):
        result = self.on_ranks(4, PROGRAMS + """
import torch, trireme
from trireme.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
def engine_of(tensor, stage):
    return trireme.initialize(model=programs.build("falcon_with_two_keys"), config=programs.config(tensor, stage, 4))[0]
def step(engine, number):
    loss = engine(**programs.batch(number, engine.get_data_parallel_rank(), engine.dp_world_size)).loss
    engine.backward(loss)
    engine.step()
def state(engine):
    whole = {name: trireme.utils.safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
    for kind in ("exp_avg", "exp_avg_sq"):
        whole |= {kind + name: trireme.utils.safe_get_full_optimizer_state(p, kind).clone() for name, p in engine.module.named_parameters()}
    return whole
def apart(one, other):
    assert one.keys() == other.keys()
    return max(((one[name] - other[name]).norm() / other[name].norm().clamp(min=1e-12)).item() for name in one)
engine = engine_of(4, 1)
step(engine, 0)
engine.save_checkpoint(folder)
saved = state(engine)
step(engine, 1)
following = state(engine)
engine.destroy()
result = []
for tensor, stage in ((4, 1), (2, 3), (1, 2)):
    engine = engine_of(tensor, stage)
    engine.load_checkpoint(folder)
    result.append([tensor, apart(state(engine), saved)])
    step(engine, 1)
    result[-1].append(apart(state(engine), following))
    engine.destroy()
whole = get_fp32_state_dict_from_zero_checkpoint(folder)
tied = whole.pop("lm_head.weight")
result.append(["file", apart(whole, {name: saved[name] for name, _ in engine.module.named_parameters()}),
               apart({"": tied}, {"": saved["transformer.word_embeddings.weight"]})])
""")
        for which, loaded, following in result:
            with self.subTest(which):
                self.assertEqual(loaded, 0)
                self.assertLessEqual(following, 0 if which in (4, "file") else 1e-4)


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
