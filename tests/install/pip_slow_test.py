"""`pip install .`: what the wheel holds, and that it works beside the torch it was built against.

Arguments: a folder for environments, build folder, ninja's folder, compiler. Run by a Python that has torch; exits 77
when PyPI, where the build's own tools come from, cannot be reached. Nothing is installed from there: torch comes from
that Python.
"""
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile
import unittest
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/peers"))
import environments  # pylint: disable=wrong-import-position

ENVIRONMENTS, BUILD, TOOLS, COMPILER = (pathlib.Path(word) for word in sys.argv[1:5])
TORCH = pathlib.Path(sysconfig.get_path("purelib"))
MYPY = "mypy==2.4.1"

TRAIN = """
import os, sys
import torch, trireme

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
engine, *_ = trireme.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 3}})
x = torch.arange(8.0).reshape(2, 4) / 8
for step in range(3):
    loss = engine(x).pow(2).mean()
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print("loss", loss.item(), "of", engine.world_size, "under", sys.prefix, flush=True)
"""

# Typed by what a checker is to know of the package; the last line is wrong.
TYPED = """
import torch
import trireme
from trireme._native import core

model = torch.nn.Linear(2, 2)
engine, optimizer, loader, schedule = trireme.initialize(model=model, config={})
reveal_type(engine)
reveal_type(core.Engine.get_lr)
trireme.initialize(model=3)
from trireme.runtime.lr_schedules import WarmupLR
"""


def run(*command, folder=None, **environment):
    """(exit status, what was printed)."""
    done = subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder,
                          env={**os.environ, **environment})
    return done.returncode, done.stdout


def must(*command, **options):
    status, out = run(*command, **options)
    assert status == 0, f"{command} ended with {status}:\n{out}"
    return out


def tool_versions():
    """The build's own tools, as pyproject.toml pins them. cmake and ninja are beside the torch that is used."""
    text = (ROOT / "pyproject.toml").read_text()
    return re.findall(r"scikit-build-core==[\d.]+", text)


class Pip(unittest.TestCase):
    """One wheel for all tests, and an environment that has it. `tools` is the Python that builds."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="trireme-pip-")  # pylint: disable=consider-using-with
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name).resolve()
        os.environ["PATH"] = f"{TOOLS}:{os.environ['PATH']}"
        must(cls.tools, "-m", "pip", "wheel", ROOT, "--no-build-isolation", "--no-deps", "--no-index", "-w", cls.folder,
             f"--config-settings=build-dir={BUILD / 'wheel'}", CXX=str(COMPILER))
        cls.wheel, = cls.folder.glob("*.whl")
        cls.python = cls.environment("environment", TORCH)
        cls.site = pathlib.Path(must(cls.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())

    @classmethod
    def environment(cls, name, *paths):
        """A fresh environment's Python, which sees the packages in `paths` and has the wheel."""
        must(sys.executable, "-m", "venv", cls.folder / name)
        python = cls.folder / name / "bin/python"
        site = pathlib.Path(must(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        (site / "torch.pth").write_text("".join(f"{path}\n" for path in paths))
        # With its dependencies: torch as it is satisfies them.
        must(python, "-m", "pip", "install", "--no-index", "--disable-pip-version-check", cls.wheel)
        return python

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def test_the_wheel_holds_everything_once_and_is_of_this_python(self):
        names = set(zipfile.ZipFile(self.wheel).namelist())
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        for name in (f"_core{suffix}", "_core.pyi", "py.typed", "_build.py", "__init__.py", "comm/__init__.py", "lib/libtrireme.so",
                     "bin/trireme", "include/trireme/trireme.h", "lib/cmake/Trireme/TriremeConfig.cmake", "deepspeed_path/deepspeed/__init__.py",
                     "deepspeed_path/deepspeed-0.19.8.egg-info"):
            self.assertIn(f"trireme/{name}", names)
        self.assertEqual(sum(name.endswith((".so", ".a")) or ".so." in name for name in names), 2, names)
        self.assertFalse([name for name in names if "test" in name.lower() or "__pycache__" in name])
        self.assertIn(f"-cp{sys.version_info[0]}{sys.version_info[1]}-", self.wheel.name)

    def test_no_file_names_a_folder_of_the_machine_that_built_it(self):
        with zipfile.ZipFile(self.wheel) as wheel:
            for name in wheel.namelist():
                for folder in (ROOT, BUILD, TORCH):
                    self.assertNotIn(str(folder).encode(), wheel.read(name), f"{name} names {folder}")

    def test_the_command_is_the_program(self):
        command = self.python.parent / "trireme"
        self.assertEqual(run(command, "--version"), (0, f"trireme {re.search(r'-([0-9.]+)-', self.wheel.name).group(1)}\n"))
        self.assertEqual(must(self.python, "-W", "ignore", "-m", "trireme", "--version"), must(command, "--version"))
        status, out = run(command, "no-such-command")
        self.assertEqual(status, run(self.site / "trireme/bin/trireme", "no-such-command", LD_LIBRARY_PATH=str(TORCH / "torch/lib"))[0])
        self.assertNotEqual(status, 0)
        self.assertIn("no-such-command", out)
        process = subprocess.Popen([command, "launch", "--num_gpus", "1", "sleep", "60"])  # pylint: disable=consider-using-with
        self.addCleanup(process.kill)
        program = pathlib.Path(f"/proc/{process.pid}/exe")
        while os.readlink(program) != str(self.site / "trireme/bin/trireme"):
            self.assertIsNone(process.poll())
        process.terminate()
        process.wait(timeout=30)

    def test_the_manual_to_which_errors_point_comes_along(self):
        self.assertEqual(run(self.python.parent / "trireme", "docs", "config"), (0, (ROOT / "docs/config.md").read_text()))

    def test_a_command_deepspeed_is_made_beside_trireme(self):
        made = self.python.parent / "deepspeed"
        self.addCleanup(made.unlink)
        self.assertEqual(must(self.python.parent / "trireme", "deepspeed", "--install"), f"made {made}\n")
        script = self.write("says.py", "import sys, deepspeed; print(sys.argv[1:], deepspeed.__version__)")
        self.assertIn("['--local_rank=0', '-x'] 0.19.8\n", must(made, script, "-x"))

    def test_two_ranks_train_under_the_python_of_the_command(self):
        script = self.write("train.py", TRAIN)
        out = must(self.python.parent / "trireme", "launch", "--num_gpus", "2", script, folder=self.folder, OMP_NUM_THREADS="1")
        losses = [float(loss) for loss in re.findall(r"loss (\S+) of 2 under \S+/environment$", out, re.MULTILINE)]
        self.assertEqual(len(losses), 3, out)
        self.assertEqual(losses, sorted(losses, reverse=True), out)

    def test_it_answers_to_its_other_name(self):
        script = self.write("named.py", "import importlib.metadata, deepspeed; print(importlib.metadata.version('deepspeed'), deepspeed.__version__)")
        self.assertEqual(must(self.python, "-W", "ignore", "-m", "trireme.as_deepspeed", script).split()[-2:], ["0.19.8", "0.19.8"])

    def test_another_project_builds_against_its_headers_and_library(self):
        prefix = must(self.python, "-c", "import trireme; print(trireme.cmake_prefix_path)").split()[-1]
        build = self.folder / "minimal"
        # `python3` is the environment's, as in an activated one: torch is not beside the package here, but in its path.
        path = f"{self.python.parent}:{os.environ['PATH']}"
        must("cmake", "-S", ROOT / "examples/minimal", "-B", build, "-G", "Ninja", f"-DCMAKE_CXX_COMPILER={COMPILER}",
             f"-DCMAKE_PREFIX_PATH={prefix}", PATH=path)
        must("cmake", "--build", build)
        self.assertIn("step 200 loss", must(build / "minimal", folder=build, OMP_NUM_THREADS="1"))

    def test_another_torch_is_refused_by_its_version(self):
        self.write("other/sitecustomize.py", "import torch; torch.__version__ = '9.8.7+cpu'\n")
        status, out = run(self.python, "-c", "import trireme", PYTHONPATH=str(self.folder / "other"))
        self.assertNotEqual(status, 0)
        self.assertRegex(out, r"ImportError: trireme: built against torch \d+\.\d+\.\d+, but torch 9\.8\.7\+cpu is installed; install torch==")

    def test_without_torch_the_command_says_so(self):
        (self.folder / "bare").mkdir()
        must(self.python, "-m", "pip", "install", "--no-index", "--no-deps", "--target", self.folder / "bare", self.wheel)
        status, out = run(sys.executable, "-I", "-S", "-c", "import sys; sys.path.append(sys.argv.pop(1)); import _trireme_program as p; p.main()",
                          self.folder / "bare", "--version")
        self.assertEqual(status, 1, out)
        self.assertRegex(out, r"\Atrireme: \S+ has no torch, [^\n]*\n\Z")

    def test_a_type_checker_knows_the_package(self):
        script = self.write("typed.py", TYPED)
        status, out = run(self.tools, "-m", "mypy", "--python-executable", self.python, "--no-incremental", script, folder=self.folder)
        self.assertEqual(status, 1, out)
        self.assertIn('Revealed type is "trireme.deepspeed.engine.DeepSpeedEngine"', out)
        self.assertRegex(out, r"group: (builtins\.)?int =\) -> (builtins\.)?float")
        self.assertRegex(out, r'typed\.py:10: error: Argument "model" to "initialize" has incompatible type "int"')
        self.assertIn("Found 1 error", out)


if __name__ == "__main__":
    try:
        Pip.tools = environments.python_with(ENVIRONMENTS, *tool_versions(), MYPY)
    except environments.Unreachable as reason:
        print(f"the package index cannot be reached: {reason}")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1], verbosity=2)
