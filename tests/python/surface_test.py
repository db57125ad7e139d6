"""DeepSpeed's Python surface on one process and on two ranks."""
from harness import RankServer, main
from small_model import Case

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import


class Surface(Case):
    def test_optimizers_step_alone_as_inside_of_an_engine(self):
        result = self.ran(1, """
from trireme.ops import adam, lion, adagrad, lamb, muon
result = {}
deepspeed.init_distributed()
makers = {
    "FusedAdam": lambda p: adam.FusedAdam(p, lr=1e-2, weight_decay=0.1),
    "FusedAdam, coupled": lambda p: adam.FusedAdam(p, lr=1e-2, weight_decay=0.1, adam_w_mode=False),
    "DeepSpeedCPUAdam": lambda p: adam.DeepSpeedCPUAdam(p, lr=1e-2, betas=(0.8, 0.9)),
    "FusedLion": lambda p: lion.FusedLion(p, lr=1e-3, weight_decay=0.1),
    "DeepSpeedCPULion": lambda p: lion.DeepSpeedCPULion(p, lr=1e-3, betas=(0.8, 0.9)),
    "DeepSpeedCPUAdagrad": lambda p: adagrad.DeepSpeedCPUAdagrad(p, lr=1e-2, weight_decay=0.1),
    "FusedLamb": lambda p: lamb.FusedLamb(p, lr=1e-2, weight_decay=0.1, max_coeff=2.0),
}
for name, make in makers.items():
    plain, net = model(), model()
    before = flat(plain)
    expected = alone(plain, make(plain.parameters()))
    engine = deepspeed.initialize(model=net, optimizer=make(net.parameters()), config=config())[0]
    train(engine)
    with deepspeed.zero.GatheredParameters(net):
        found = flat(net)
    result[name] = [(found - expected).abs().max().item(), (expected - before).abs().max().item()]
    engine.destroy()
plain, net = model(), model()
matrices = lambda net: [p for p in net.parameters() if p.ndim == 2]
for other in (plain, net):
    for p in other.parameters(): p.requires_grad_(p.ndim == 2)
expected = alone(plain, muon.Muon(matrices(plain), lr=1e-2, weight_decay=0.1))
engine = deepspeed.initialize(model=net, optimizer=muon.Muon(matrices(net), lr=1e-2, weight_decay=0.1), config=config())[0]
train(engine)
with deepspeed.zero.GatheredParameters(net):
    result["Muon"] = [(flat(net) - expected).abs().max().item(), 1.0]
result["amsgrad"] = [raised(lambda: kind(model().parameters(), amsgrad=True))[0]
                     for kind in (adam.FusedAdam, adam.DeepSpeedCPUAdam, adagrad.DeepSpeedCPUAdagrad, lamb.FusedLamb)]
""")
        self.assertEqual(result.pop("amsgrad"), ["RuntimeError"] * 4)
        for name, (difference, change) in result.items():
            self.assertLess(difference, 2e-6, name)  # fp32
            self.assertGreater(change, 1e-3, name)

    def test_scopes_and_single_parameters(self):
        result = self.ran(2, """
from trireme.utils import *
result = {}
deepspeed.init_distributed()
unfilled = config(train_batch_size="auto", optimizer={"type": "AdamW", "params": {"lr": "auto"}})
with deepspeed.zero.Init(config_dict_or_path=unfilled):
    net = model()
rank = deepspeed.comm.get_rank()
weight = net[2].weight
with deepspeed.zero.GatheredParameters({weight}, modifier_rank=1):
    if rank == 1:
        with torch.no_grad(): weight.fill_(0.25)
with deepspeed.zero.GatheredParameters([weight, weight], enabled=True):
    result["written"] = weight.sum().item()
engine = deepspeed.initialize(model=net, config=config(optimizer={"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0}}))[0]
x, y = batch(rank)
engine.backward(torch.nn.functional.mse_loss(engine(x), y))
gradient = safe_get_full_grad(weight)
safe_set_full_grad(weight, torch.ones_like(gradient))
safe_update_full_grad_vectorized([weight], lambda gradient, parameter: -gradient)
engine.step()
result["moved"] = (safe_get_full_fp32_param(weight) - 0.25).unique().tolist()
state = safe_get_full_optimizer_state(weight, optim_state_key="exp_avg")
safe_set_full_optimizer_state(weight, torch.zeros_like(state), optim_state_key="exp_avg")
result["state"] = [state.shape == weight.shape, safe_get_full_optimizer_state(weight, "exp_avg").abs().sum().item()]
safe_set_full_fp32_param(weight, torch.full_like(weight, 2.0))
local = safe_get_local_fp32_param(weight)
both = torch.tensor([local.numel() + 0.0]); deepspeed.comm.all_reduce(both)
result["local"] = [both.item(), local.unique().tolist()]
result["written again"] = [raised(lambda: safe_get_full_optimizer_state(weight, "nonsense"))[0],
                           raised(lambda: safe_get_full_grad(weight))[:2]]
result["external"] = [deepspeed.zero.register_external_parameter(net, weight),
                      raised(lambda: deepspeed.zero.register_external_parameter(net, torch.ones(1)))[0]]
with deepspeed.zero.GatheredParameters(weight):
    result["refused"] = "GatheredParameters" in raised(lambda: weight.data.fill_(1))[-1]
result["Init"] = raised(lambda: deepspeed.zero.Init(zero_quantized_weights=True))[:3]
""")
        self.assertEqual(result["written"], 256)
        self.assertEqual(len(result["moved"]), 1)
        self.assertAlmostEqual(result["moved"][0], 0.5, places=5)  # Adam's first step against a gradient of -1
        self.assertEqual(result["state"], [True, 0])
        self.assertEqual(result["local"], [1024, [2.0]])
        self.assertEqual(result["written again"], ["ConfigError", ["StateError", "Error"]])
        self.assertEqual(result["external"], [None, "ShapeError"])
        self.assertEqual(result["refused"], True)
        self.assertEqual(result["Init"], ["UnsupportedError", "ConfigError", "Error"])

    def test_schedules_write_into_any_torch_optimizer(self):
        result = self.ran(0, """
from trireme.runtime.lr_schedules import *
import argparse
def adam():
    return torch.optim.Adam([{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.1},
                             {"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.2}])
def rates(make, steps=6):
    optimizer, found = adam(), []
    schedule = make(optimizer)
    for _ in range(steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step(); schedule.step()
    again = make(adam()); again.load_state_dict(schedule.state_dict()); again.step(); schedule.step()
    assert schedule.get_last_lr() == again.get_last_lr() == schedule.get_lr(), (schedule.get_last_lr(), again.get_last_lr())
    assert schedule.state_dict() == {"last_batch_iteration": steps}
    return found
result = {
    "warmup": rates(lambda o: WarmupLR(o, warmup_num_steps=4, warmup_type="linear")),
    "decay": rates(lambda o: WarmupDecayLR(o, total_num_steps=5, warmup_max_lr=0.1, warmup_num_steps=2, warmup_type="linear")),
    "cosine": rates(lambda o: WarmupCosineLR(o, total_num_steps=5, warmup_num_steps=2, warmup_type="linear")),
    "range": rates(lambda o: LRRangeTest(o, lr_range_test_step_size=2)),
    "cycle": rates(lambda o: OneCycle(o, cycle_min_lr=0.01, cycle_max_lr=0.05, cycle_first_step_size=2, cycle_momentum=False)),
    "names": VALID_LR_SCHEDULES,
}
arguments = deepspeed.add_config_arguments(add_tuning_arguments(argparse.ArgumentParser())).parse_args(
    ["--deepspeed", "--deepspeed_config", "a.json", "--lr_schedule", "WarmupLR", "--warmup_max_lr", "0.5"])
section = get_config_from_args(arguments)[0]
result["arguments"] = [arguments.deepspeed, arguments.deepspeed_config, section, get_lr_from_config(section)]
result["not an optimizer"] = raised(lambda: WarmupLR(3))[0]
""")
        first = lambda name: [round(pair[0], 9) for pair in result[name]]
        # As DeepSpeed: the schedule's first rate holds for two steps, as its count starts at the second.
        self.assertEqual(first("warmup"), [0, 0, 0.025, 0.05, 0.075, 0.1])
        self.assertEqual([pair[1] for pair in result["warmup"]][:3], [0, 0, 0.05])
        self.assertEqual(first("decay"), [0, 0, 0.05, 0.1, 0.066666667, 0.033333333])
        self.assertEqual(first("range"), [0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035])
        self.assertEqual(first("cycle"), [0.01, 0.03, 0.05, 0.03, 0.01, 0.01])
        self.assertEqual(first("cosine"), [0, 0, 0.05, 0.0750025, 0.0250075, 1e-05])
        self.assertEqual(result["names"], ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
        self.assertEqual(result["arguments"][:2], [True, "a.json"])
        self.assertEqual(result["arguments"][2]["params"]["warmup_max_lr"], 0.5)
        self.assertEqual(result["arguments"][3], [0.5, ""])
        self.assertEqual(result["not an optimizer"], "TypeError")

    def test_a_plain_program_with_arguments_groups_and_a_scheduler(self):
        result = self.ran(2, """
import argparse, json
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
path = f"{folder}/ds{os.environ['RANK']}.json"
with open(path, "w") as file:
    json.dump(config(stage=2), file)
arguments = parser.parse_args(["--deepspeed_config", path])
def groups(net):
    return [{"params": [p for p in net.parameters() if p.ndim == 2], "lr": 2e-2},
            {"params": [p for p in net.parameters() if p.ndim == 1], "weight_decay": 0.0}]
def halved(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
result = {}
plain = model()
optimizer = torch.optim.AdamW(groups(plain), lr=1e-2, weight_decay=0.1, eps=1e-3)
expected = alone(plain, optimizer, scheduler=halved(optimizer))
for way in ("objects", "callables"):
    net = model()
    optimizer = torch.optim.AdamW(groups(net), lr=1e-2, weight_decay=0.1, eps=1e-3)
    scheduler = halved(optimizer)
    if way == "callables":
        make = lambda parameters: torch.optim.AdamW(groups(net), lr=1e-2, weight_decay=0.1, eps=1e-3)
        engine, optimizer, _, scheduler = deepspeed.initialize(arguments, net, make, lr_scheduler=halved)
    else:
        engine, optimizer, _, scheduler = deepspeed.initialize(arguments, net, optimizer, lr_scheduler=scheduler)
    train(engine)
    rates = [group["lr"] for group in optimizer.param_groups]
    result[way] = [(flat(net) - expected).abs().max().item(), rates, scheduler.get_last_lr(), engine.get_lr()]
    engine.destroy()
warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
engine, optimizer, loader, scheduler = deepspeed.initialize(
    model=model(), training_data=[(torch.zeros(8), 0)] * 8,
    config=config(optimizer={"type": "Adam", "params": {"lr": 0.1}}, scheduler=warmup))
train(engine, 3)
result["own"] = [len(loader), optimizer.param_groups[0]["lr"], scheduler.get_last_lr(), engine.optimizer is optimizer]
""")
        for way in ("objects", "callables"):
            difference, rates, last, of_engine = result[way]
            self.assertLess(difference, 2e-6, way)
            self.assertEqual(rates, [5e-3, 2.5e-3])
            self.assertEqual((last, of_engine), (rates, rates))
        self.assertEqual(result["own"], [2, 0.05, [0.05], True])

    def test_optimizers_whose_constructor_makes_their_states_begin_with_them(self):
        result = self.ran(2, """
result = []
for options in ({"lr_decay": 0.1}, {"initial_accumulator_value": 0.5}, {"maximize": True}):
    net = model()
    engine = deepspeed.initialize(model=net, config=config(), optimizer=torch.optim.Adagrad(net.parameters(), lr=0.05, **options))[0]
    train(engine)
    plain = model()
    expected = alone(plain, torch.optim.Adagrad(plain.parameters(), lr=0.05, **options))
    with deepspeed.zero.GatheredParameters(net):
        result.append((flat(net) - expected).abs().max().item())
""")
        for difference in result:
            self.assertLess(difference, 1e-5)

    def test_weights_of_files_are_given_back_by_destroy(self):
        result = self.ran(1, """
result = []
torch.save(model().state_dict(), folder + "/weights.pt")
for stage in (0, 3):
    net = model()
    net.load_state_dict(torch.load(folder + "/weights.pt", mmap=True), assign=True)
    engine = deepspeed.initialize(model=net, config=config(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}}))[0]
    train(engine, 1)
    engine.destroy()
    result.append(torch.isfinite(flat(net)).all().item())
""")
        self.assertEqual(result, [True, True])

    def test_a_compiled_engine_trains_as_the_plain_model(self):
        result = self.ran(2, """
net = model()
engine = deepspeed.initialize(model=model(), config=config(gradient_clipping=1.0, optimizer={"type": "SGD", "params": {"lr": 0.1}}))[0]
engine.compile(backend="aot_eager")
engine.compile()  # again: nothing
train(engine)
expected = alone(net, torch.optim.SGD(net.parameters(), lr=0.1))
with deepspeed.zero.GatheredParameters(engine.module):
    result = [engine.is_compiled, (flat(engine.module) - expected).abs().max().item(), raised(lambda: engine.compile(schedule=[]))[0]]
""")
        self.assertEqual([result[0], result[2]], [True, "UnsupportedError"])
        self.assertLess(result[1], 1e-6)

    def test_the_rest_by_name(self):
        result = self.ran(0, """
import trireme
result = {}
checkpointing = deepspeed.checkpointing
checkpointing.configure(None, {"train_batch_size": 1, "activation_checkpointing": {"partition_activations": True}})
x = torch.ones(3, requires_grad=True)
checkpointing.checkpoint(torch.sin, x).sum().backward()
checkpointing.model_parallel_cuda_manual_seed(5)
with checkpointing.get_cuda_rng_tracker().fork():
    first = torch.rand(1).item()
result["checkpointing"] = [checkpointing.is_configured(), torch.equal(x.grad, torch.ones(3).cos()), first != torch.rand(1).item(),
                           deepspeed.runtime.activation_checkpointing.checkpointing is checkpointing]
from trireme.utils import groups, RepeatingLoader, OnDevice
deepspeed.init_distributed()
result["groups"] = [groups.get_data_parallel_world_size(), groups.get_data_parallel_rank(),
                    groups._get_sequence_parallel_world_size(), deepspeed.comm.get_world_size(groups.get_model_parallel_group())]
loader = RepeatingLoader([1, 2])
result["loader"] = [next(loader) for _ in range(5)]
with OnDevice(torch.bfloat16, "meta"):
    made = torch.nn.Linear(2, 2)
result["device"] = [str(made.weight.dtype), str(made.weight.device), str(torch.ones(1).dtype)]
from trireme.accelerator import get_accelerator
accelerator = get_accelerator()
result["accelerator"] = [accelerator.device_name(), accelerator.is_bf16_supported(), accelerator.memory_allocated() > 2**20]
import types
import trireme.engine as engines
with deepspeed.zero.Init():
    made = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
moved, kept = [], (engines.local_device, torch.Tensor.to)
engines.local_device = lambda: types.SimpleNamespace(type="cuda")
torch.Tensor.to = lambda tensor, device: moved.append(device.type) or tensor.clone()
engines.Engine._move_to_device(types.SimpleNamespace(module=made))
engines.local_device, torch.Tensor.to = kept
result["moved"] = [moved.count("cuda"), made[0].weight.data_ptr() > 0]
autocast = deepspeed.runtime.torch_autocast
net = model()
result["autocast"] = [autocast.get_default_autocast_lower_precision_modules()[0], autocast.is_autocast_initialized()]
engine = deepspeed.initialize(model=net, config=config(torch_autocast={"enabled": True, "dtype": "bfloat16"}))[0]
autocast.init_autocast_params(engine, torch.bfloat16, None)
result["autocast"] += [autocast.is_autocast_initialized(), str(autocast.get_comm_dtype(net[0].weight)),
                       str(autocast.get_comm_dtype(torch.nn.Parameter(torch.ones(1)))), str(engine.torch_autocast_dtype())]
result["settings"] = [engine.optimizer_name(), engine.zero_optimization_partition_gradients(), engine.zero_cpu_offload(),
                      [str(dtype) for dtype in engine.get_data_types()], engine.dynamic_loss_scale()]
engine.destroy()
leaves = deepspeed.utils
result["leaves"] = [len(leaves.set_z3_leaf_modules(net, [torch.nn.Tanh])),
                    len(leaves.set_z3_leaf_modules(net, "torch.nn.modules.linear.Linear")),
                    len(leaves.get_z3_leaf_modules(net)), len(leaves.unset_z3_leaf_modules(net, ["Tanh"])),
                    len(leaves.get_z3_leaf_modules(net)),
                    leaves.set_z3_leaf_modules_by_name(net, ["0", "9"], raise_if_not_found=False)[1],
                    len(leaves.set_z3_leaf_modules_by_suffix(net, ["4"])[0]),
                    raised(lambda: leaves.set_z3_leaf_modules(net, ["Nothing"]))[0]]
resolved = deepspeed.DeepSpeedConfig(config(stage=2))
result["config"] = [resolved.train_batch_size, resolved.zero_optimization_stage, resolved.zero_enabled]
from trireme.checkpoint.utils import clone_tensors_for_torch_save
view = torch.zeros(100)[:2]
result["clone"] = clone_tensors_for_torch_save({"a": [view]})["a"][0].untyped_storage().nbytes()
moved = deepspeed.runtime.utils.move_to_device((torch.ones(1), {"b": [torch.ones(1), "c"]}), torch.float64)
result["move"] = [str(moved[0].dtype), str(moved[1]["b"][0].dtype), moved[1]["b"][1]]
import contextlib, io
from trireme.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
with contextlib.redirect_stdout(io.StringIO()) as told:
    deepspeed.zero.estimate_zero2_model_states_mem_needs_all_cold(7_500_000_000, num_gpus_per_node=8)
    estimate_zero3_model_states_mem_needs_all_live(model(), num_gpus_per_node=2)
result["needs"] = [line in told.getvalue() for line in ("Model with 7500M total params.", "Trireme, stage 3, on each of 2 ranks")]
names = ["init_inference", "InferenceEngine", "revert_transformer_layer", "zero.TiledLinear"]
def get(name):
    found = deepspeed
    for part in name.split("."): found = getattr(found, part)
    return found
result["stubs"] = [raised(lambda: get(name)(1))[-1].partition(" ")[0] for name in names]
result["stub types"] = raised(lambda: deepspeed.init_inference(1))[:4]
result["isinstance"] = isinstance(net, deepspeed.PipelineEngine)
result["unknown"] = [hasattr(deepspeed, "nonsense"), hasattr(deepspeed.zero, "nonsense")]
result["errors"] = [
    raised(lambda: deepspeed.initialize(model=net, config={"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2}))[:3],
    raised(lambda: deepspeed.initialize(model=None, config={}))[0],
    raised(lambda: deepspeed.initialize(model=net, config="nothing.json"))[2:4],
    raised(lambda: deepspeed.initialize(model=net))[0]]
""")
        self.assertEqual(result["checkpointing"], [True, True, True, True])
        self.assertEqual(result["groups"], [1, 0, 1, 1])
        self.assertEqual(result["loader"], [1, 2, 1, 2, 1])
        self.assertEqual(result["device"], ["torch.bfloat16", "meta", "torch.float32"])
        self.assertEqual(result["accelerator"], ["cpu", True, True])
        self.assertEqual(result["moved"], [7, True])
        self.assertEqual(result["autocast"], ["torch.nn.modules.linear.Linear", False, True, "torch.bfloat16", "torch.float32",
                                              "torch.bfloat16"])
        self.assertEqual(result["settings"], [None, True, False, ["torch.float32", "torch.float32"], False])
        self.assertEqual(result["leaves"], [2, 3, 5, 2, 3, ["9"], 1, "ValueError"])
        self.assertEqual(result["config"], [4, 2, True])
        self.assertEqual(result["clone"], 8)
        self.assertEqual(result["move"], ["torch.float64", "torch.float64", "c"])
        self.assertEqual(result["needs"], [True, True])
        self.assertEqual(result["stubs"], ["deepspeed.init_inference", "deepspeed.InferenceEngine", "deepspeed.revert_transformer_layer",
                                           "deepspeed.zero.TiledLinear"])
        self.assertEqual(result["stub types"], ["UnsupportedError", "ConfigError", "Error", "ValueError"])
        self.assertEqual((result["isinstance"], result["unknown"]), (False, [False, False]))
        self.assertEqual(result["errors"], [["BatchSizeError", "ConfigError", "Error"], "AssertionError",
                                            ["ValueError", "AssertionError"], "AssertionError"])


if __name__ == "__main__":
    main()
