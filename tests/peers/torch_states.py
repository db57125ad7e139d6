"""State dictionaries of torch, and tensors read from files without any package."""
import json

import torch

from peers import TrainedCase, trireme

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "BOOL": torch.bool}


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
    """All tensors of a checkpoint in our own layout, by the names in its manifest; and its values, those of tensors
    included."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    tensors = {}
    for tensor in manifest["tensors"]:
        raw = b"".join((checkpoint / manifest["files"][part["file"]]["name"]).read_bytes()
                       [part["offset"]:part["offset"] + part["bytes"]] for part in tensor["slices"])
        tensors[tensor["name"]] = torch.frombuffer(bytearray(raw), dtype=DTYPES[tensor["dtype"]]).view(tensor["shape"])
    values, members = manifest["values"], []
    for tensor in manifest["tensors"]:
        name, known = tensor["name"].removeprefix("model."), tensor.get("values", {})
        if "steps" in known:
            values.setdefault("parameter_steps", {})[name] = known["steps"]
        for alias in known.get("aliases", []):
            values.setdefault("aliases", {})[alias] = name
        if "group" in known:
            members.append((known["group"], known["position"], name))
    for group, _, name in sorted(members):
        values["parameter_groups"][group].setdefault("names", []).append(name)
    return tensors, values


class DistributedCase(TrainedCase):
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
