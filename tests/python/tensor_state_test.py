"""Layers that ranks share: whole tensors in what programs save of a model, and refusals where a program would fill
slices."""
from harness import RankServer, main
from small_model import Case

RankServer.imports = ("torch._dynamo",)

_BLOCKS = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 30), torch.nn.Linear(30, 8)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))
class Net(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))
        self.layers[1].norm.requires_grad_(False)
        self.register_buffer("table", torch.arange(3.0))
plan = {"layer_specs": [{"patterns": [r".*up\\.(weight|bias)$"], "partition_type": "column"},
                        {"patterns": [r".*down\\.weight$"], "partition_type": "row"}]}
def engine_of(seed, stage):
    adamw = {"type": "AdamW", "params": {"lr": 0.1}}
    shared = {"autotp_size": 2, "partition_config": plan}
    return deepspeed.initialize(model=Net(seed), config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
                                                         "optimizer": adamw, "tensor_parallel": shared})[0]
def equal(state, expected):
    return set(state) == set(expected) and all(torch.equal(state[name], expected[name]) for name in expected)
"""


class Wholes(Case):
    def test_state_dicts_exports_and_checkpoints_have_whole_tensors(self):
        for stage in (0, 3):
            result = self.ran(2, _BLOCKS + f"""
expected = {{name: value.clone() for name, value in Net(5).state_dict().items()}}
deepspeed.init_distributed()
one = engine_of(5 + deepspeed.comm.get_rank(), {stage})  # rank 0's values count
state = one._consolidated_16bit_state_dict()
one.save_checkpoint(folder)
one.save_16bit_model(folder)
two = engine_of(11, {stage})
two.load_checkpoint(folder)
parameter = two.module.layers[0].up.weight
whole = deepspeed.utils.safe_get_full_fp32_param(parameter)
other = two._consolidated_16bit_state_dict()
if deepspeed.comm.get_rank() == 0:
    from trireme.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    saved = get_fp32_state_dict_from_zero_checkpoint(folder)
    result = [equal(state, expected), equal(other, expected), equal(torch.load(folder + "/pytorch_model.bin"), expected),
              all(torch.equal(saved[name], expected[name]) for name in expected), torch.equal(whole, expected["layers.0.up.weight"])]
""")
            self.assertEqual(result, [True] * 5, stage)

    def test_programs_do_not_fill_slices(self):
        result = self.ran(2, _BLOCKS + """
engine = engine_of(5, 1)
engine.save_checkpoint(folder)
def fill(src, dst):
    raise AssertionError("called")
up = engine.module.layers[0].up.weight
result = [raised(lambda: engine.load_checkpoint(folder, custom_load_fn=fill))[-1],
          raised(lambda: engine.load_module_state_dict({"module": Net(7).state_dict()}))[-1],
          raised(lambda: deepspeed.zero.GatheredParameters([up], modifier_rank=0).__enter__())[-1]]
""")
        self.assertIn("custom_load_fn=…): with tensor_parallel (autotp_size=2) a rank has slices", result[0])
        for text in result[1:]:
            self.assertRegex(text, "whose ranks have slices|no rank can write it for all")


if __name__ == "__main__":
    main()
