"""FSDP programs, longer: accumulation, bf16, meshes, compiled and checkpointed layers, and whole programs beside
torch's own FSDP."""
import json
import re

import torch
from fsdp_programs import PROGRAMS, Case
from fsdp_test import States
from fsdp_gradients_test import Noise
from harness import PROGRAM, PYTHON, main, run


class Fsdp(Case):
    """Each in two ranks, beside one process of plain PyTorch on the whole batch."""

    def test_clips_by_the_norm_of_all_gradients_and_returns_it(self):
        result = self.ran("""
result = {"two": compared(clip=0.05), "sync": compared(clip=0.05, micros=2, sync=True), "loose": compared(clip=100.0)}
""")
        for name, one in result.items():
            with self.subTest(name):
                self.assert_same(one)

    def test_accumulates_backward_passes_with_and_without_sync(self):
        result = self.ran("""
result = {"reduced each time": compared(micros=2), "once": compared(micros=2, sync=True)}
""")
        for name, one in result.items():
            with self.subTest(name):
                self.assert_same(one)

    def test_computes_in_bf16_as_torchs_fully_shard(self):
        result = self.ran("""
import torch.distributed.fsdp as theirs
import torch.distributed.checkpoint as dcp
def run(fsdp, freezes):
    model, policy = net(), fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if freezes: model.layers[1].requires_grad_(False).up.bias.requires_grad_(True)
    for layer in model.layers: fsdp.fully_shard(layer, mp_policy=policy)
    fsdp.fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    told = []
    for step in range(5):
        tokens, labels = own(step)
        logits = model(tokens)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        told += [mean(loss), float(norm.full_tensor())]
        optimizer.step()
        optimizer.zero_grad()
    object.__setattr__(model, "stepper", optimizer)
    return told, weights(model), str(logits.dtype), model
import trireme.fsdp
result = {}
for freezes in (False, True):
    (found, ours, dtype, _), (expected, torchs, other_dtype, _) = run(trireme.fsdp, freezes), run(theirs, freezes)
    result[str(freezes)] = {"told": [found, expected], "far": farthest(ours, torchs), "dtypes": [dtype, other_dtype, str(ours["word.weight"].dtype), str(torchs["word.weight"].dtype)]}
_, before, _, model = run(trireme.fsdp, True)
state = {name: value + 2 ** -20 for name, value in before.items()}  # less than a digit of bf16
model.load_state_dict(state)
result["loaded"] = farthest(weights(model), state)
dcp.save({"model": before}, checkpoint_id=folder + "/dcp")
dcp.load({"model": model.state_dict()}, checkpoint_id=folder + "/dcp")
result["read in place"] = farthest(weights(model), before)
result["refused"] = raised(lambda: save_checkpoint(model, model.stepper, folder))
""")
        for freezes in ("False", "True"):
            self.assert_close(*result[freezes]["told"])
            self.assertLessEqual(result[freezes]["far"], 1e-6)
            self.assertEqual(result[freezes]["dtypes"], ["torch.bfloat16", "torch.bfloat16", "torch.float32", "torch.float32"])
        self.assertEqual([result["loaded"], result["read in place"]], [0, 0])
        self.assertIn("torch.distributed.checkpoint", result["refused"])

    def test_shards_over_some_ranks_and_replicates_over_others(self):
        result = self.ran("""
from torch.distributed.device_mesh import init_device_mesh
ranks.join()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
result = {"hsdp": compared(options={"mesh": mesh}, clip=0.05), "groups": compared(options={"reshard_after_forward": 2}, clip=0.05)}
import types
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from trireme.fsdp import wrapper
by_layers, sharded = sharded, lambda model, **options: FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
result["fsdp1 by a mesh"] = compared(options={"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}, clip=0.05)
wrapper.ranks = types.SimpleNamespace(world=lambda: types.SimpleNamespace(size=4, local_size=2, rank=ranks.world().rank))  # two hosts
hosts = sharded(net(), sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2)
zero = hosts.fsdp_wrap.root().engine().resolved_config["zero_optimization"]
assert (zero["stage"], zero["mics_shard_size"]) == (2, 2), zero
result["fsdp1 by hosts"] = compared(options={"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2}, clip=0.05)
sharded = by_layers
nn.Module.set_requires_gradient_sync = lambda self, flag: None  # of the plain model
FSDPModule.set_requires_gradient_sync = FSDPModule.set_requires_all_reduce
result["over replicas at the end"] = compared(options={"mesh": mesh}, micros=2, sync=True)
""", ranks=4)
        for name, one in result.items():
            with self.subTest(name):
                self.assert_same(one)

    def test_serves_checkpointed_and_compiled_layers_closures_and_dcps_state_dicts(self):
        result = self.ran("""
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
def change(model):
    if "wrap" in mode: model.layers[0] = checkpoint_wrapper(model.layers[0])
    if "compile" in mode: model.layers[1].compile(backend="aot_eager")
mode = "wrap"
result = {"wrapped": compared(change=change)}
mode = "compile"
result["compiled"] = compared(change=change)
model = sharded(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def closure():
    optimizer.zero_grad()
    loss = loss_of(model, *own(0))
    loss.backward()
    return loss
result["closure"] = [mean(optimizer.step(closure)) for _ in range(2)]
options, here = StateDictOptions(full_state_dict=True, cpu_offload=True), weights(model)
result["gotten"] = farthest(get_model_state_dict(model, options=options), here) if ranks.world().rank == 0 else get_model_state_dict(model, options=options)
set_model_state_dict(model, {name: value + 1 for name, value in here.items()}, options=options)
result["set"] = farthest(weights(model), {name: value + 1 for name, value in here.items()})
""")
        self.assert_same(result["wrapped"])
        self.assert_same(result["compiled"])
        self.assertLess(result["closure"][1], result["closure"][0])
        self.assertEqual([result["gotten"], result["set"]], [0, 0])

    def outcome(self, flags, words, said):
        """The files of a program under the launcher; it says whose FSDP it had. PyTorch's own, without `flags`, aborts
        now and then as its threads end."""
        path = self.folder / f"{len(list(self.folder.iterdir()))}.pt"
        for _ in range(1 if flags else 3):
            status, out, err = run([PROGRAM, "launch", "--num_gpus", 2, *flags, PYTHON, "-B", PROGRAMS / words[0], path, *words[1:]])
            if status == 0:
                break
        self.assertEqual(status, 0, err)
        self.assertIn(said, out)
        return torch.load(path)

    def assert_same_outcome(self, found, expected):
        self.assertEqual(set(found), set(expected))
        for name in found:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        self.assertGreater(abs(found["losses"][0] - found["losses"][-1]), 0.05)

    def test_runs_a_program_of_torchs_fully_shard_unchanged_with_its_outcome(self):
        expected = self.outcome([], ["train.py"], "module of fully_shard: torch.distributed.fsdp 2")
        self.assert_same_outcome(self.outcome(["--as-fsdp"], ["train.py"], "module of fully_shard: trireme.fsdp.modules 2"), expected)

    def test_runs_a_program_of_torchs_fsdp1_unchanged_with_its_outcome(self):
        theirs, ours = "module of FSDP: torch.distributed.fsdp.fully_sharded_data_parallel 2", "module of FSDP: trireme.fsdp.wrapper 2"
        expected = self.outcome([], ["train_fsdp1.py", "FULL_SHARD"], theirs)
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
            with self.subTest(strategy):
                self.assert_same_outcome(self.outcome(["--as-fsdp"], ["train_fsdp1.py", strategy], ours), expected)
        words = ["train_fsdp1.py", "FULL_SHARD", "bf16"]
        self.assert_same_outcome(self.outcome(["--as-fsdp"], words, ours), self.outcome([], words, theirs))


class Spawned(Case):
    def test_trains_in_processes_that_a_program_starts_anew(self):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        wanted = (model.weight - 3 * 0.1 * torch.full((1, 4), 3.0)).flatten().tolist()
        for method in ("spawn", "process-spawn", "process-forkserver"):
            with self.subTest(method):
                status, out, err = run([PROGRAM, "launch", "--num_gpus", 1, "--as-fsdp", PYTHON, "-B", PROGRAMS / "spawned.py", method])
                self.assertEqual(status, 0, err)
                self.assertIn("trireme trireme program", out)
                for rank in range(2):
                    told = re.search(rf"trireme trireme rank {rank}: (\[.*?\])", out)
                    self.assertIsNotNone(told, out)
                    torch.testing.assert_close(json.loads(told[1]), wanted, rtol=0, atol=1e-5)


class AllNoise(Noise):
    def test_draws_random_numbers_of_the_whole_as_rank_0_does(self):
        self.check((4, "{'mesh': torch.distributed.device_mesh.init_device_mesh('cpu', (2, 2))}"), (2, "{'reshard_after_forward': False}"))


class AllStates(States):
    def test_has_optimizer_states_as_torchs_and_takes_them_over_at_another_number_of_ranks(self):
        self.check({"AdamW", "SGD", "Adagrad", "NAdam", "amsgrad", "RAdam", "Adadelta", "Adamax", "ASGD", "RMSprop"}, (1, 4))


if __name__ == "__main__":
    main()
