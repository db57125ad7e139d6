"""Checkpoints of Python programs, and what becomes of them."""
from harness import RankServer, launch, main
from small_model import Case

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import


class Checkpoints(Case):
    def test_checkpoints_become_state_dicts_and_models(self):
        result = self.ran(2, """
from trireme.utils.zero_to_fp32 import *
adamw = {"type": "AdamW", "params": {"lr": 0.1}}
engine = deepspeed.initialize(model=model(), config=config(bf16={"enabled": True}, optimizer=adamw))[0]
def step():
    x, y = batch(0)
    engine.backward(torch.nn.functional.mse_loss(engine(x.bfloat16()), y.bfloat16()))
    engine.step()
step()
engine.save_checkpoint(folder + "/saved", tag="one")
masters = {name: deepspeed.utils.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
step()
engine.save_checkpoint(folder + "/saved")
if deepspeed.comm.get_rank() == 0:
    state = get_fp32_state_dict_from_zero_checkpoint(folder + "/saved", tag="one")
    trained = get_fp32_state_dict_from_zero_checkpoint(folder + "/saved", tag="one", exclude_frozen_parameters=True)
    latest = get_fp32_state_dict_from_zero_checkpoint(folder + "/saved")
    net = load_state_dict_from_zero_checkpoint(model(), folder + "/saved", tag="one")
    convert_zero_checkpoint_to_fp32_state_dict(folder + "/saved", folder + "/out", tag="one")
    convert_zero_checkpoint_to_fp32_state_dict(folder + "/saved", folder + "/safe", safe_serialization=True)
    written = torch.load(folder + "/out/pytorch_model.bin", weights_only=True)
    same = lambda a: set(a) == set(masters) and all(torch.equal(a[k], masters[k]) for k in a)
    result = [same(state), same(trained), same(written), same(net.state_dict()), same(latest), os.listdir(folder + "/safe"),
              raised(lambda: get_fp32_state_dict_from_zero_checkpoint(folder))[:1]]
""")
        self.assertEqual(result, [True, True, True, True, False, ["model.safetensors"], ["CheckpointError"]])

    def test_a_tied_weight_has_all_its_names(self):
        result = self.ran(1, """
from trireme.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as state_dict
net = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 1))
net[1].weight = net[0].weight
net[2].requires_grad_(False)
engine = deepspeed.initialize(model=net, config=config(optimizer={"type": "Adam", "params": {"lr": 0.1}}))[0]
train(engine, 1)
engine.save_checkpoint(folder)
state = state_dict(folder)
engine.destroy()
result = [set(state) == set(net.state_dict()), state["0.weight"] is state["1.weight"], torch.equal(state["0.weight"], net[0].weight),
          sorted(state_dict(folder, exclude_frozen_parameters=True))]
""")
        self.assertEqual(result, [True, True, True, ["0.weight", "1.weight"]])

    def test_weights_may_be_filled_in_by_the_program(self):
        result = self.ran(2, """
adamw = {"type": "AdamW", "params": {"lr": 0.1}}
one = deepspeed.initialize(model=model(), config=config(bf16={"enabled": True}, optimizer=adamw))[0]
x = torch.ones(2, 8, dtype=torch.bfloat16)
def step(engine):
    engine.backward(engine(x).sum().float())
    engine.step()
step(one)
one.save_checkpoint(folder)
masters = [deepspeed.utils.safe_get_full_fp32_param(p) for p in one.module.parameters()]
net = torch.nn.ModuleDict({"renamed": model()})
two = deepspeed.initialize(model=net["renamed"], config=config(bf16={"enabled": True}, optimizer=adamw))[0]
def fill(src, dst):
    dst.load_state_dict({name: value + (0 if deepspeed.comm.get_rank() == 0 else 5) for name, value in src.items()})
path, _ = two.load_checkpoint(folder, custom_load_fn=fill)
moments = [deepspeed.utils.safe_get_full_optimizer_state(p, "exp_avg") for p in two.module.parameters()]
found = [deepspeed.utils.safe_get_full_fp32_param(p) for p in two.module.parameters()]
step(two)
result = {"steps": [one.global_steps, two.global_steps], "moments": min(m.abs().max().item() for m in moments),
          "path": os.path.relpath(path, folder),
          "far": max((a.bfloat16() - b.bfloat16()).abs().max().item() for a, b in zip(masters, found))}
""")
        self.assertEqual([result["steps"], result["path"], result["far"]], [[1, 2], "global_step1", 0])
        self.assertGreater(result["moments"], 0)

    def test_states_that_are_one_number_are_saved_and_continue_at_another_world_size(self):
        program = """
result = []
for kind, options in {"NAdam": {"lr": 0.05, "eps": 1e-4}, "ASGD": {"lr": 0.05}}.items():
    optimizer = lambda net: getattr(torch.optim, kind)(net.parameters(), **options)
    net = model()
    engine = deepspeed.initialize(model=net, config=config(gradient_clipping=1.0), optimizer=optimizer(net))[0]
"""
        self.ran(2, program + """
    train(engine, 2)
    engine.save_checkpoint(f"{folder}/{kind}")
""")
        differences = self.ran(1, program + """
    train(engine, 1)  # what stands there is overwritten
    engine.load_checkpoint(f"{folder}/{kind}")
    train(engine, 2, first=2)
    engine.destroy()
    plain = model()
    result.append((flat(net) - alone(plain, optimizer(plain))).abs().max().item())
""")
        for difference in differences:
            self.assertLess(difference, 1e-5)

    def test_what_cannot_be_saved_or_loaded_is_named(self):
        result = self.ran(1, """
engine = deepspeed.initialize(model=model(), config=config(optimizer={"type": "Adam", "params": {"lr": 0.1}}))[0]
save = lambda state: raised(lambda: engine.save_checkpoint(folder + "/saved", client_state=state))
open(folder + "/file", "w").close()
result = [save([1]), save({(1, 2): 3}), save({"o": {"deep": [torch.nn.Linear(2, 2)]}}), raised(lambda: engine.save_checkpoint(None)),
          raised(lambda: engine.load_checkpoint(folder + "/file"))]
deep = []
for _ in range(100_000):
    deep = [deep]
nested = save({"deep": deep})
engine.save_checkpoint(folder + "/saved", client_state={"counts": {5: "five"}})
other = deepspeed.initialize(model=model(), config=config(optimizer={"type": "SGD", "params": {"lr": 0.1}}))[0]
result.append(raised(lambda: other.load_checkpoint(folder + "/saved")))
result.append(nested)
result.append(other.load_checkpoint(folder + "/saved", load_optimizer_states=False)[1] == {"counts": {5: "five"}})
""")
        for text, found in zip(("client_state: expected a dict with strings as keys, got [1]", "got {(1, 2): 3}",
                                "client_state['o'] (a torch.nn.modules.linear.Linear)", "save_checkpoint: save_dir is None",
                                "expected a folder of checkpoints, found a file", "load without optimizer states",
                                "keep containers that are nested less deeply"), result):
            self.assertIn(text, found[-1])
        self.assertTrue(result[-1])

    def test_of_another_engine_that_is_being_written_in_the_background_is_waited_for(self):
        status, out, err = launch(2, [self.snippet("""
import torch, trireme
from trireme.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
def made(value):
    net = torch.nn.Linear(3000, 1000)  # 36 MB with its states: more than is written while the next call begins
    torch.nn.init.constant_(net.weight, value)
    return trireme.initialize(model=net, config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 1},
                                                 "checkpoint": {"async_save": True}})[0]
first, second = made(1.0), made(2.0)
first.save_checkpoint(folder + "/loaded")
path, _ = second.load_checkpoint(folder + "/loaded")
assert path is not None and float(second.module.weight[0, 0]) == 1.0
first.save_checkpoint(folder + "/read")
assert float(get_fp32_state_dict_from_zero_checkpoint(folder + "/read")["weight"][0, 0]) == 1.0
result = None
""")])
        self.assertEqual(status, 0, out + err)

    def test_a_save_in_the_background_that_fails_last_fails_the_program(self):
        status, _, err = launch(1, [self.snippet("""
import torch, trireme
engine = trireme.initialize(model=torch.nn.Linear(2, 2), config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"},
                                                                 "checkpoint": {"async_save": True}})[0]
engine.save_checkpoint(folder + "/saved")
import resource
engine.wait_for_checkpoint()
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # as a full disk
engine.save_checkpoint(folder + "/saved", tag="last")
result = None
""")])
        self.assertNotEqual(status, 0)
        self.assertIn("failed", err)


if __name__ == "__main__":
    main()
