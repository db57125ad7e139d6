"""The script that lies beside checkpoints. Arguments: the program, a folder for environments."""
import importlib.util
import json
import os
import shutil
import sys
import unittest

import torch

from peers import PROGRAM, TrainedCase, run, trireme

SYSTEM_PATH = os.pathsep.join(folder for folder in os.environ["PATH"].split(os.pathsep)
                              if not os.path.exists(os.path.join(folder, "trireme")))
WITH_PROGRAM = {"TRIREME_PROGRAM": str(PROGRAM)}
ALONE = {"TRIREME_PROGRAM": "", "PATH": SYSTEM_PATH}
BARE_PYTHON = [sys.executable, "-I", "-S"]  # without torch or anything else that was installed


class ZeroToFp32(TrainedCase):
    def convert(self, out, *arguments, environment=ALONE, python=(sys.executable,)):
        status, said, err = run(*python, self.checkpoints / "zero_to_fp32.py", self.checkpoints, self.folder / out, *arguments,
                                environment=environment)
        self.assertEqual(status, 0, said + err)
        return sorted(path.name for path in (self.folder / out).iterdir())

    def contents(self, out):
        return {path.name: path.read_bytes() for path in (self.folder / out).iterdir()}

    def imported(self):
        spec = importlib.util.spec_from_file_location("zero_to_fp32", self.checkpoints / "zero_to_fp32.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def test_python_alone_writes_the_safetensors_that_the_program_writes(self):
        for out, arguments, files in [
                ("one", [], ["model.safetensors"]),
                ("two", ["--max_shard_size", "60KB"],
                 ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors",
                  "model.safetensors.index.json"]),
                ("three", ["-t", "global_step2"], ["model.safetensors"])]:
            self.assertEqual(self.convert(out + "-program", "--safe_serialization", *arguments, environment=WITH_PROGRAM), files)
            self.assertEqual(self.convert(out + "-alone", "--safe_serialization", *arguments, python=BARE_PYTHON), files)
            program, alone = self.contents(out + "-program"), self.contents(out + "-alone")
            for name in files:
                if name.endswith(".json"):
                    self.assertEqual(json.loads(program[name]), json.loads(alone[name]))
                else:
                    self.assertEqual(program[name], alone[name], name)
        self.assertNotEqual(self.contents("one-alone"), self.contents("three-alone"))

    def test_torch_loads_the_same_masters_from_every_way(self):
        self.assertEqual(self.convert("bin-program", environment=WITH_PROGRAM), ["pytorch_model.bin"])
        self.assertEqual(self.convert("bin-alone"), ["pytorch_model.bin"])
        program, alone = (torch.load(self.folder / out / "pytorch_model.bin", weights_only=True)
                          for out in ("bin-program", "bin-alone"))
        state = self.imported().get_fp32_state_dict_from_zero_checkpoint(str(self.checkpoints))
        self.assertIn("model.embed_tokens.weight", state)
        for other in (program, alone):
            self.assertEqual(set(other), set(state))
            for name, tensor in state.items():
                self.assertEqual(tensor.dtype, torch.float32)
                self.assertTrue(torch.equal(other[name], tensor), name)
        # Masters, not rounded weights.
        self.assertFalse(torch.equal(state["lm_head.weight"], state["lm_head.weight"].bfloat16().float()))
        # Read here on its own, byte by byte.
        manifest = json.loads((self.checkpoints / "global_step3/manifest.json").read_text())
        master = next(tensor for tensor in manifest["tensors"] if tensor["name"] == "master.lm_head.weight")
        raw = b"".join((self.checkpoints / "global_step3" / manifest["files"][part["file"]]["name"]).read_bytes()
                       [part["offset"]:part["offset"] + part["bytes"]] for part in master["slices"])
        self.assertTrue(torch.equal(state["lm_head.weight"].flatten(), torch.frombuffer(bytearray(raw), dtype=torch.float32)))

    def test_the_checkpoint_counts_and_not_rounded_weights_that_a_trainer_puts_beside_it(self):
        self.convert("want", "--safe_serialization")
        rounded = self.checkpoints / "model.safetensors"
        self.addCleanup(rounded.unlink)
        trireme("consolidate", self.checkpoints, self.folder / "bf16", "--dtype", "bf16", "--weights-only")
        shutil.copy(self.folder / "bf16" / "model.safetensors", rounded)
        for out, environment, python in (("with-program", WITH_PROGRAM, [sys.executable]), ("without", ALONE, BARE_PYTHON)):
            status, said, err = run(*python, self.checkpoints / "zero_to_fp32.py", self.checkpoints, self.folder / out,
                                    "--safe_serialization", environment=environment)
            self.assertEqual(status, 0, said + err)
            self.assertIn("global_step3", err)
            self.assertEqual(self.contents(out), self.contents("want"))

    def test_a_model_gets_the_weights(self):
        head = torch.nn.Module()
        head.lm_head = torch.nn.Linear(32, 256, bias=False)
        module = self.imported()
        self.assertIs(module.load_state_dict_from_zero_checkpoint(head, str(self.checkpoints), tag="global_step2"), head)
        state = module.get_fp32_state_dict_from_zero_checkpoint(str(self.checkpoints), tag="global_step2")
        self.assertTrue(torch.equal(head.lm_head.weight, state["lm_head.weight"]))

    def test_what_is_missing_is_said_in_one_line(self):
        def refusal(*arguments, environment=ALONE, python=(sys.executable,)):
            status, _, err = run(*python, self.checkpoints / "zero_to_fp32.py", *arguments, environment=environment)
            self.assertEqual(status, 1, err)
            self.assertNotIn("Traceback", err)
            return err

        out = self.folder / "nothing"
        self.assertIn("needs torch, or the program `trireme` on PATH", refusal(self.checkpoints, out, python=BARE_PYTHON))
        self.assertIn("Unable to find 'latest' file", refusal(self.folder, out))
        self.assertIn("is no complete checkpoint", refusal(self.checkpoints, out, "-t", "global_step9"))
        self.assertIn("no complete checkpoint", refusal(self.checkpoints, out, "-t", "global_step9", environment=WITH_PROGRAM))
        self.assertIn("'5 potatoes' is no size", refusal(self.checkpoints, out, "--max_shard_size", "5 potatoes"))
        self.assertFalse(out.exists())

    def test_a_truncated_shard_is_refused_without_the_program(self):
        broken = self.folder / "broken"
        shutil.copytree(self.checkpoints, broken)
        shard = next((broken / "global_step3").glob("shard-00001*"))
        shard.write_bytes(shard.read_bytes()[:-1])
        status, _, err = run(sys.executable, broken / "zero_to_fp32.py", broken, self.folder / "no", environment=ALONE)
        self.assertEqual(status, 1)
        self.assertIn(str(shard), err)
        self.assertFalse((self.folder / "no").exists())

    def test_a_save_restores_the_script_where_somebody_changed_it(self):
        other = self.folder / "other"
        shutil.copytree(self.run_folder, other)
        script = other / "checkpoints/zero_to_fp32.py"
        text = script.read_text()
        self.assertTrue(os.access(script, os.X_OK))
        script.write_text("changed")
        trireme("train", "--model", self.folder / "model.json", "--config", self.folder / "config.json", "--data",
                self.folder / "text.txt", "--seq", 32, "--ranks", 2, "--steps", 4, "--eval-samples", 4, "--seed", 3, "--out",
                other, "--resume")
        self.assertEqual(script.read_text(), text)


if __name__ == "__main__":
    del sys.argv[1:]
    unittest.main()
