"""Files that `trireme consolidate` and zero_to_fp32.py write, read by Hugging Face's packages. Arguments: the program,
a folder for environments."""
import json
import shutil
import sys
import unittest

import environments
from peers import PROGRAM, TrainedCase, must_run, python_with, run, trireme

# Loads each folder by transformers and by safetensors, and prints the logits' sum of absolute values and the dtype.
LOAD = """
import json, sys, torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, torch_dtype="auto")
    logits = model(torch.arange(48).view(2, 24)).logits
    names = set()
    index = folder + "/model.safetensors.index.json"
    try:
        files = sorted(set(json.load(open(index))["weight_map"].values()))
    except FileNotFoundError:
        files = ["model.safetensors"]
    for file in files:
        with safe_open(folder + "/" + file, "pt") as opened:
            names |= set(opened.keys())
    print(json.dumps({"logits": logits.flatten()[:4000:7].float().tolist(), "dtype": str(model.dtype), "names": sorted(names),
                      "missing": sorted(told["missing_keys"]), "unexpected": sorted(told["unexpected_keys"])}))
"""

# Makes the first layer's gate frozen and ties lm_head to a new name, as a checkpoint of such a model says it.
EDIT = """
import json, sys, xxhash
path = sys.argv[1] + "/manifest.json"
manifest = json.load(open(path))
gate = "model.layers.0.mlp.gate_proj.weight"
manifest["tensors"] = [tensor for tensor in manifest["tensors"]
                       if not (tensor["name"].endswith("." + gate) and not tensor["name"].startswith("model." + gate))]
values = {tensor["name"]: tensor.setdefault("values", {}) for tensor in manifest["tensors"]}
values["model." + gate].update(steps=0, aliases=["other"])
values["model.lm_head.weight"]["aliases"] = ["decoder.weight"]
del manifest["manifest_checksum"]
text = json.dumps(manifest, indent=2)[:-2] + ",\\n"
open(path, "w").write(text + '  "manifest_checksum": "' + xxhash.xxh3_64_hexdigest(text.encode()) + '"\\n}\\n')
"""


class HuggingFace(TrainedCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.python = python_with("numpy==2.3.4", environments.TRANSFORMERS, "safetensors==0.8.0", "xxhash==3.6.0")

    def consolidated(self, name, *arguments, source=None):
        folder = self.folder / name
        trireme("consolidate", source or self.run_folder, folder, *arguments)
        shutil.copy(self.folder / "model.json", folder / "config.json")
        return folder

    def loaded(self, *folders):
        out = must_run(self.python, "-c", LOAD, *folders)
        return [json.loads(line) for line in out.splitlines() if line.startswith("{")]

    def test_transformers_and_safetensors_load_one_file_and_many(self):
        one = self.consolidated("one")
        many = self.consolidated("many", "--max-shard-size", "30KB")
        half = self.consolidated("half", "--dtype", "bf16")
        keep = self.consolidated("keep", "--dtype", "keep")
        self.assertGreater(len(list(many.glob("*.safetensors"))), 2)
        results = self.loaded(one, many, half, keep)
        for result in results:
            self.assertEqual((result["missing"], result["unexpected"]), ([], []))
            self.assertEqual(result["names"], results[0]["names"])
        self.assertEqual([result["dtype"] for result in results],
                         ["torch.float32", "torch.float32", "torch.bfloat16", "torch.bfloat16"])
        self.assertEqual(results[0]["logits"], results[1]["logits"])
        self.assertEqual(results[2]["logits"], results[3]["logits"])
        self.assertNotEqual(results[0]["logits"], results[2]["logits"])
        for exact, rounded in zip(results[0]["logits"], results[2]["logits"]):
            self.assertAlmostEqual(exact, rounded, delta=0.05)  # bf16 has 8 digits of a number below 2

    def test_a_consolidated_model_is_a_checkpoint_again(self):
        one, again = self.consolidated("first"), self.consolidated("again", source=self.folder / "first")
        self.assertEqual((one / "model.safetensors").read_bytes(), (again / "model.safetensors").read_bytes())

    def test_frozen_and_tied_parameters_come_out_alike_from_the_program_and_from_python(self):
        edited = self.folder / "edited"
        shutil.copytree(self.checkpoints, edited)
        must_run(self.python, "-c", EDIT, edited / "global_step3")
        trireme("inspect", edited)  # the edit left a valid checkpoint
        for name, arguments, count in (("all", [], 21), ("trained", ["--exclude_frozen_parameters"], 20)):
            script = [self.python, edited / "zero_to_fp32.py", edited]
            files = []
            for program in (str(PROGRAM), ""):
                out = self.folder / f"{name}-{bool(program)}"
                must_run(*script, out, "--safe_serialization", *arguments,
                         environment={"TRIREME_PROGRAM": program, "PATH": "/usr/bin:/bin"})
                files.append((out / "model.safetensors").read_bytes())
            self.assertEqual(files[0], files[1])
            header = json.loads(files[0][8:8 + int.from_bytes(files[0][:8], "little")])
            aliases = {key: value for key, value in header.pop("__metadata__").items() if key != "format"}
            self.assertEqual(len(header), count)
            self.assertEqual(aliases.get("decoder.weight"), "lm_head.weight")
            self.assertEqual("other" in aliases, name == "all")
        out = must_run(self.python, "-c", "import sys; sys.path[:0] = sys.argv[1:2]; import zero_to_fp32 as z; s = "
                       "z.get_fp32_state_dict_from_zero_checkpoint(sys.argv[1]); print(s['decoder.weight'] is s['lm_head.weight'])",
                       edited)
        self.assertEqual(out.strip(), "True")

    def test_python_compares_checksums_where_it_can(self):
        broken = self.folder / "broken"
        shutil.copytree(self.checkpoints, broken)
        shard = next((broken / "global_step3").glob("shard-00001*"))
        manifest = json.loads((broken / "global_step3/manifest.json").read_text())
        master = next(tensor for tensor in manifest["tensors"] if tensor["name"] == "master.lm_head.weight")
        part = next(part for part in master["slices"] if manifest["files"][part["file"]]["name"] == shard.name)
        contents = bytearray(shard.read_bytes())
        contents[part["offset"] + 9] ^= 1
        shard.write_bytes(contents)
        status, _, err = run(self.python, broken / "zero_to_fp32.py", broken, self.folder / "no", "--safe_serialization",
                             environment={"TRIREME_PROGRAM": "", "PATH": "/usr/bin:/bin"})
        self.assertEqual(status, 1)
        self.assertIn(f"tensor \"master.lm_head.weight\" is damaged from element {part['begin']} on", err)
        self.assertEqual(list((self.folder / "no").iterdir()), [])
        text = (broken / "global_step3/manifest.json").read_text()
        self.assertIn('"size":2', text)
        (broken / "global_step3/manifest.json").write_text(text.replace('"size":2', '"size":3'))
        status, _, err = run(self.python, broken / "zero_to_fp32.py", broken, self.folder / "no", "--safe_serialization",
                             environment={"TRIREME_PROGRAM": "", "PATH": "/usr/bin:/bin"})
        self.assertEqual(status, 1)
        self.assertIn("manifest.json: damaged", err)


if __name__ == "__main__":
    del sys.argv[1:]
    unittest.main()
