"""Checkpoints of torch.distributed.checkpoint: read bit for bit, and written so that torch fills a model and an
optimizer.

Arguments: the program, a folder for environments.
"""
import sys
import unittest

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict

from peers import PROGRAM, run, trireme
from torch_states import DistributedCase, module_of, safetensors, saved_tensors


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


class TorchDistributed(DistributedCase):
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

    def test_what_is_written_opens_again_with_the_values_it_came_from(self):
        folder = self.new_folder("again")
        trireme("convert", self.run_folder, folder / "saved", "--to", "dcp")
        tensors, values = self.converted(folder)
        originals, original_values = saved_tensors(self.checkpoints / "global_step3")
        self.assertEqual(values, original_values)
        self.same(tensors, originals)  # 16-bit weights too, in whose place torch sees their masters

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
