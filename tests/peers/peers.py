"""What the tests beside it share: the program, small checkpoints that it trained, environments with other packages."""
import fcntl
import json
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile
import unittest

UNREACHABLE = re.compile("NewConnectionError|ConnectTimeout|ReadTimeout|Temporary failure in name resolution|ProxyError|"
                         "Network is unreachable|Max retries exceeded")
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
    name = "-".join(requirement.replace("==", "-") for requirement in requirements)
    folder = ENVIRONMENTS / name
    python, stamp = folder / "bin/python", folder / "complete"
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    with open(ENVIRONMENTS / f"{name}.lock", "w", encoding="utf-8") as lock:  # tests run side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists():
            must_run(sys.executable, "-m", "venv", "--clear", folder)
            site = must_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
            pathlib.Path(site, "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
            status, out, err = run(python, "-m", "pip", "install", "--quiet", *requirements)
            if UNREACHABLE.search(err):
                raise unittest.SkipTest("the package index cannot be reached, so there is nothing to compare with")
            assert status == 0, out + err
            stamp.touch()
    return python


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
