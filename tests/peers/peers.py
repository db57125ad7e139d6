"""Helpers that the tests beside it share: the program, small checkpoints that it trained, environments with other
packages."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import environments

PROGRAM, ENVIRONMENTS = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
MODEL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 32,
         "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False}


def run(*command, environment=None, cwd=None):
    """(exit status, stdout, stderr)."""
    done = subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd,
                          env={**os.environ, **(environment or {})})
    return done.returncode, done.stdout, done.stderr


def must_run(*command, environment=None, cwd=None):
    status, out, err = run(*command, environment=environment, cwd=cwd)
    assert status == 0, f"{' '.join(str(word) for word in command)} ended with {status}:\n{out}{err}"
    return out


def trireme(*arguments):
    return must_run(PROGRAM, *arguments)


def python_with(*requirements):
    """A Python that has these packages of exact versions, and what this one has. Made once, in the build folder."""
    try:
        return environments.python_with(ENVIRONMENTS, *requirements)
    except environments.Unreachable:
        raise unittest.SkipTest("the package index cannot be reached, so there is nothing to compare with") from None


class TrainedCase(unittest.TestCase):
    """Tests of a folder of checkpoints that two ranks trained in bf16: `self.run_folder`."""
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
              "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    model = MODEL

    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory(prefix="trireme-peers-")
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = pathlib.Path(temporary.name)
        (cls.folder / "model.json").write_text(json.dumps(cls.model))
        (cls.folder / "config.json").write_text(json.dumps(cls.config))
        (cls.folder / "text.txt").write_text("".join(f"line {i * 7919 % 1000} of the story\n" for i in range(3000)))
        cls.run_folder = cls.folder / "run"
        trireme("train", "--model", cls.folder / "model.json", "--config", cls.folder / "config.json", "--data",
                cls.folder / "text.txt", "--seq", 32, "--ranks", 2, "--steps", 3, "--save-every", 2, "--eval-samples", 4,
                "--seed", 3, "--out", cls.run_folder)
        cls.checkpoints = cls.run_folder / "checkpoints"
