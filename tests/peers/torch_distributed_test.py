"""Checkpoints of torch.distributed.checkpoint: read bit for bit, and written so that torch fills a model and an optimizer.

Arguments: the program, a folder for environments.
"""
import json
import os
import subprocess
import sys
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "BOOL": torch.bool}


class Net(torch.nn.Module):
    """Odd sizes, so that ranks hold unequal parts; two dtypes, a scalar, integers, a frozen and a tied parameter."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.second = torch.nn.Linear(7, 3, dtype=torch.bfloat16)
        self.frozen = torch.nn.Parameter(torch.randn(3, 4, 5), requires_grad=False)
        self.tied = torch.nn.Linear(5, 7, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("count", torch.tensor(12))
        self.register_buffer("table", torch.arange(6).view(2, 3))

    def forward(self, x):
        return self.second(self.first(x).bfloat16()).float() + self.tied(x).sum() + self.frozen.sum()


def trained(model, lr=0.01):
    optimizer = torch.optim.AdamW([{"params": [p for p in model.parameters() if p.requires_grad and p.dim() > 1]},
                                   {"params": [p for p in model.parameters() if p.requires_grad and p.dim() == 1],
                                    "weight_decay": 0.0, "lr": lr / 2}], lr=lr)
    for step in range(3):
        model(torch.full((2, 5), 1.0 + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def whole(value):
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return value


def save_on_ranks(folder):
    """What each of two processes runs: FSDP2's shards, and a tensor that is cut by its second and third dims."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=int(os.environ["RANK"]), world_size=2)
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    for step in range(2):
        net(torch.full((2, 5), 1.0 + step + dist.get_rank())).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(net, optimizer)
    mesh = init_device_mesh("cpu", (2,))
    for dim in (1, 2):
        weights[f"cut.{dim}"] = distribute_tensor(torch.randn(3, 5, 4), mesh, [Shard(dim)])
    dcp.save({"model": weights, "optim": states}, checkpoint_id=f"{folder}/saved")
    expected = {"model": whole(weights), "state": whole(states["state"])}
    if dist.get_rank() == 0:
        torch.save(expected, f"{folder}/expected.pt")
    dist.destroy_process_group()


def load_on_ranks(folder):
    """Fills the shards of two processes from what `trireme convert` wrote, and saves them whole."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=int(os.environ["RANK"]), world_size=2)
    shapes = json.load(open(f"{folder}/shapes.json", encoding="utf-8"))
    model = module_of(shapes)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": states}, checkpoint_id=f"{folder}/converted")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    weights, states = get_state_dict(model, optimizer)
    loaded = {"model": whole(weights), "state": whole(states["state"]), "groups": states["param_groups"]}
    if dist.get_rank() == 0:
        torch.save(loaded, f"{folder}/loaded.pt")
    dist.destroy_process_group()


def module_of(shapes, dtype=torch.float32):
    """A module with parameters of these names."""
    root = torch.nn.Module()
    for name, shape in shapes.items():
        module = root
        *parents, leaf = name.split(".")
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, torch.nn.Module())
            module = getattr(module, parent)
        module.register_parameter(leaf, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))
    return root


if sys.argv[1] in ("save", "load"):  # one of the two processes
    (save_on_ranks if sys.argv[1] == "save" else load_on_ranks)(sys.argv[2])
    sys.exit()

from peers import PROGRAM, TrainedCase, run, trireme  # noqa: E402  (it reads the arguments of a test)


def safetensors(path):
    """A file's tensors, read without any package."""
    contents = path.read_bytes()
    length = int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8:8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = torch.frombuffer(bytearray(contents[begin:end]), dtype=DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors


def saved_tensors(checkpoint):
    """All tensors of a checkpoint in our own layout, by the names in its manifest; and its values."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    tensors = {}
    for tensor in manifest["tensors"]:
        raw = b"".join((checkpoint / manifest["files"][part["file"]]["name"]).read_bytes()
                       [part["offset"]:part["offset"] + part["bytes"]] for part in tensor["slices"])
        tensors[tensor["name"]] = torch.frombuffer(bytearray(raw), dtype=DTYPES[tensor["dtype"]]).view(tensor["shape"])
    return tensors, manifest["values"]


class TorchDistributed(TrainedCase):
    def on_two_ranks(self, what, folder):
        processes = [subprocess.Popen([sys.executable, "-W", "ignore", __file__, what, folder],
                                      env={**os.environ, "RANK": str(rank)}) for rank in range(2)]
        self.assertEqual([process.wait() for process in processes], [0, 0])

    def new_folder(self, name):
        (self.folder / name).mkdir()
        return self.folder / name

    def same(self, found, expected):
        self.assertEqual(sorted(found), sorted(expected))
        for name, tensor in expected.items():
            self.assertEqual(found[name].dtype, tensor.dtype, name)
            self.assertTrue(torch.equal(found[name], tensor), name)

    def converted(self, folder):
        trireme("convert", folder / "saved", folder / "ours", "--to", "trireme", "--out-tag", "one")
        return saved_tensors(folder / "ours/one")

    def expect_states(self, tensors, states):
        for name, state in states.items():
            for key in ("exp_avg", "exp_avg_sq"):
                self.assertTrue(torch.equal(tensors[f"optimizer.{key}.{name}"], state[key]), (name, key))

    def test_what_one_process_saved_is_read_bit_for_bit(self):
        folder = self.new_folder("single")
        torch.manual_seed(3)
        model = Net()
        optimizer = trained(model)
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": states}, checkpoint_id=folder / "saved")
        trireme("consolidate", folder / "saved", folder / "weights", "--dtype", "keep")
        self.same(safetensors(folder / "weights/model.safetensors"), weights)
        tensors, values = self.converted(folder)
        self.expect_states(tensors, states["state"])
        self.assertEqual(values["parameter_steps"], {name: 3 for name in states["state"]})
        self.assertEqual(values["group_lrs"], [0.01, 0.005])
        self.assertEqual(values["global_steps"], 3)
        self.assertIn("PyTorch DCP checkpoint", trireme("inspect", folder / "saved"))

    def test_what_two_ranks_saved_is_read_bit_for_bit(self):
        folder = self.new_folder("double")
        self.on_two_ranks("save", folder)
        expected = torch.load(folder / "expected.pt", weights_only=True)
        self.assertGreater(len(list((folder / "saved").glob("*.distcp"))), 1)
        trireme("consolidate", folder / "saved", folder / "weights", "--dtype", "keep")
        self.same(safetensors(folder / "weights/model.safetensors"), expected["model"])
        self.expect_states(self.converted(folder)[0], expected["state"])

    def test_the_state_dictionary_of_a_model_alone_is_read_under_its_own_names(self):
        folder = self.new_folder("alone")
        weights = get_model_state_dict(Net())
        for name, state in (("flat", weights), ("nested", {"app": {"model": weights, "rng": torch.arange(3)}})):
            dcp.save(state, checkpoint_id=folder / name)
            trireme("consolidate", folder / name, folder / f"{name}-weights", "--dtype", "keep")
            self.same(safetensors(folder / f"{name}-weights/model.safetensors"), weights)

    def test_torch_fills_a_model_and_an_optimizer_from_what_is_written(self):
        folder = self.new_folder("written")
        trireme("convert", self.run_folder, folder / "converted", "--to", "dcp")
        tensors, values = saved_tensors(self.checkpoints / "global_step3")
        masters = {name.removeprefix("master."): tensor for name, tensor in tensors.items() if name.startswith("master.")}
        for dtype in (torch.float32, torch.bfloat16):
            model = module_of({name: tensor.shape for name, tensor in masters.items()}, dtype)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
            weights, states = get_state_dict(model, optimizer)
            dcp.load({"model": weights, "optim": states}, checkpoint_id=folder / "converted")
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
            for name, parameter in model.named_parameters():
                self.assertTrue(torch.equal(parameter, masters[name].to(dtype)), name)
                # Rounding the master is how the engine's own weights come about.
                if dtype == torch.bfloat16:
                    self.assertTrue(torch.equal(parameter, tensors["model." + name]), name)
                state = optimizer.state[parameter]
                self.assertEqual(state["step"].item(), values["parameter_steps"][name])
                for key in ("exp_avg", "exp_avg_sq"):
                    self.assertTrue(torch.equal(state[key], tensors[f"optimizer.{key}.{name}"].to(state[key].dtype)), name)
            group = optimizer.param_groups[0]
            params = values["config"]["optimizer"]["params"]
            self.assertEqual((group["lr"], list(group["betas"]), group["eps"], group["weight_decay"]),
                             (values["lr"], params["betas"], params["eps"], params["weight_decay"]))
            optimizer.step()  # a loaded optimizer goes on

    def test_two_ranks_load_their_shards_of_what_is_written(self):
        folder = self.new_folder("sharded")
        trireme("convert", self.run_folder, folder / "converted", "--to", "dcp")
        tensors, _ = saved_tensors(self.checkpoints / "global_step3")
        masters = {name.removeprefix("master."): tensor for name, tensor in tensors.items() if name.startswith("master.")}
        (folder / "shapes.json").write_text(json.dumps({name: list(tensor.shape) for name, tensor in masters.items()}))
        self.on_two_ranks("load", folder)
        loaded = torch.load(folder / "loaded.pt", weights_only=False)
        self.same(loaded["model"], masters)
        self.expect_states(tensors, loaded["state"])

    def test_what_is_written_opens_again_with_the_values_it_came_from(self):
        folder = self.new_folder("again")
        trireme("convert", self.run_folder, folder / "saved", "--to", "dcp")
        tensors, values = self.converted(folder)
        originals, original_values = saved_tensors(self.checkpoints / "global_step3")
        self.assertEqual(values, original_values)
        for name, tensor in originals.items():
            if name.startswith("optimizer."):
                self.assertTrue(torch.equal(tensors[name], tensor), name)
            if name.startswith("master."):
                self.assertTrue(torch.equal(tensors["model." + name.removeprefix("master.")], tensor), name)

    def test_damage_is_named(self):
        folder = self.new_folder("damaged")
        trireme("convert", self.run_folder, folder / "saved", "--to", "dcp")
        data = folder / "saved/__0_0.distcp"
        contents = data.read_bytes()

        def refusal():
            status, _, err = run_consolidate(folder)
            self.assertEqual(status, 1, err)
            self.assertFalse((folder / "out").exists() and list((folder / "out").iterdir()))
            return err

        data.write_bytes(contents[:len(contents) // 2])
        self.assertIn("it is truncated", refusal())
        data.write_bytes(b"\0" * 4096 + contents[4096:])
        self.assertIn(str(data), refusal())
        data.unlink()
        self.assertIn(str(data), refusal())
        (folder / "saved/.metadata").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
        self.assertIn(".metadata", refusal())
        data.write_bytes(contents)
        status, _, err = run(PROGRAM, "convert", self.run_folder, folder / "saved", "--to", "dcp")
        self.assertEqual(status, 1)
        self.assertIn("a checkpoint is there already", err)


def run_consolidate(folder):
    return run(PROGRAM, "consolidate", folder / "saved", folder / "out")


if __name__ == "__main__":
    del sys.argv[1:]
    unittest.main()
