"""One script under DeepSpeed itself (from PyPI) and under this package: the same losses, stage by stage."""
import json

from deepspeed_programs import python_with_deepspeed
from harness import PROGRAM, Case, main, result_of, run

RANKS, STEPS = 2, 12

_SCRIPT = """
import argparse, json, os
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import deepspeed

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--stage", type=int)
parser.add_argument("--dtype", default="fp32")
parser.add_argument("--local_rank", type=int, default=int(os.environ["LOCAL_RANK"]))
arguments = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(1)
model = LlamaForCausalLM(LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                                     intermediate_size=96, vocab_size=128, use_cache=False))
decay = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW([{"params": decay}, {"params": others, "weight_decay": 0.0}], lr=2e-3, weight_decay=0.1)
config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "steps_per_print": 10 ** 9,
          "zero_optimization": {"stage": arguments.stage}, "zero_allow_untested_optimizer": True,
          "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 4, "warmup_type": "linear"}}}
deepspeed.init_distributed(dist_backend="gloo")
engine, optimizer, _, scheduler = deepspeed.initialize(args=arguments, model=model, optimizer=optimizer, config=config)
losses, rates, norms = [], [], []
for step in range(STEPS * 2):
    generator = torch.Generator().manual_seed(10 * step + engine.global_rank)
    ids = torch.randint(0, 128, (2, 17), generator=generator)
    logits = engine(input_ids=ids[:, :-1]).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 128), ids[:, 1:].reshape(-1))
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    deepspeed.comm.all_reduce(mean)
    losses.append(mean.item() / engine.world_size)
    rates.append(engine.get_lr()[0])
    if step % 2 == 1 and arguments.stage > 0:
        norms.append(float(engine.get_global_grad_norm()))
if engine.global_rank == 0:
    print("\\nTEST_RESULT " + json.dumps({"losses": losses, "rates": rates, "norms": norms, "steps": engine.global_steps}))
"""


# The public members of DeepSpeed's engine: methods, and attributes that its methods set.
_MEMBERS = """
import ast, inspect, textwrap, torch
from deepspeed.runtime.engine import DeepSpeedEngine
names = set(dir(DeepSpeedEngine)) - set(dir(torch.nn.Module))
for node in ast.walk(ast.parse(inspect.getsource(DeepSpeedEngine))):
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    if is_own and isinstance(node.ctx, ast.Store):
        names.add(node.attr)
result = sorted(name for name in names if not name.startswith("_"))
"""

_OURS = """
import json, pathlib, torch, trireme
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = trireme.initialize(model=torch.nn.Linear(2, 2), config=config)
unknown = []
for name in json.loads(pathlib.Path(folder, "members.json").read_text()):
    try:
        getattr(engine, name)
    except AttributeError as error:
        if not str(error).startswith(f"DeepSpeedEngine.{name} is not there in Trireme: "):
            unknown.append(name)
result = unknown
"""


class BesideDeepSpeed(Case):
    """Losses, learning rates and gradient norms in fp32 on two ranks."""

    @classmethod
    def setUpClass(cls):
        cls.python = python_with_deepspeed()

    def result(self, words, stage):
        script = self.write("script.py", _SCRIPT.replace("STEPS", str(STEPS)))
        command = [PROGRAM, "launch", "--num_gpus", RANKS, "--prefix", "none", self.python, "-B", *words, script, "--stage", stage]
        return result_of(run(command, environment={"DS_ACCELERATOR": "cpu"}))

    def test_every_public_member_of_its_engine_is_there_or_refused_by_name(self):
        names = result_of(run([self.python, "-B", self.snippet(_MEMBERS)], environment={"DS_ACCELERATOR": "cpu"}))
        self.assertGreater(len(names), 200)
        (self.folder / "members.json").write_text(json.dumps(names))
        self.assertEqual(self.on_ranks(0, _OURS), [])

    def test_every_stage_gives_the_same_losses(self):
        for stage in range(4):
            with self.subTest(stage=stage):
                expected = self.result([], stage)
                found = self.result(["-m", "trireme.as_deepspeed"], stage)
                self.assertEqual(found["steps"], expected["steps"])
                self.assert_close(found["losses"], expected["losses"], 1e-5)
                self.assert_close(found["rates"], expected["rates"], 1e-9)
                self.assert_close(found["norms"], expected["norms"], 1e-4)
                self.assertNotEqual(found["losses"], sorted(found["losses"]))


if __name__ == "__main__":
    main()
