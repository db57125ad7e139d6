"""`cmake --install` gives what a foreign project and a person need.

Arguments: cmake, build folder, ninja, compiler, and a Python with torch.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CMAKE, BUILD, NINJA, COMPILER, TORCH_PYTHON = sys.argv[1:6]


def run(*command, cwd=None, environment=None):
    """(exit status, what was printed)."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, **(environment or {})})
    return done.returncode, done.stdout


class Installed(unittest.TestCase):
    """The installation in a folder of the test's own."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="trireme-install-")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.prefix = cls.folder / "prefix"
        status, out = run(CMAKE, "--install", BUILD, "--prefix", cls.prefix)
        assert status == 0, out

    def configure(self, name, *flags, example="minimal"):
        return run(CMAKE, "-S", ROOT / "examples" / example, "-B", self.folder / name, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={NINJA}",
                   f"-DCMAKE_CXX_COMPILER={COMPILER}", f"-DCMAKE_PREFIX_PATH={self.prefix}", *flags)


class Install(Installed):
    def test_the_program_runs_from_where_it_is_installed(self):
        status, out = run(self.prefix / "bin/trireme", "--help")
        self.assertEqual(status, 0, out)
        self.assertIn("train", out)

    def test_the_manual_to_which_errors_point_is_installed(self):
        status, out = run(self.prefix / "bin/trireme", "docs", "config")
        self.assertEqual((status, out), (0, (ROOT / "docs/config.md").read_text()))

    def test_a_foreign_project_builds_and_trains_alone_and_on_two_ranks(self):
        status, out = self.configure("build")
        self.assertEqual(status, 0, out)
        status, out = run(CMAKE, "--build", self.folder / "build")
        self.assertEqual(status, 0, out)
        program = self.folder / "build/minimal"
        for command in ([program], [self.prefix / "bin/trireme", "launch", "--num_gpus", "2", program]):
            with self.subTest(str(command)):
                run_folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
                (run_folder / "ds_config.json").write_text((self.folder / "build/ds_config.json").read_text())
                status, out = run(*command, cwd=run_folder)
                self.assertEqual(status, 0, out)
                losses = [float(line.split()[-1]) for line in out.splitlines() if " loss " in line]
                self.assertEqual(len(losses), 4, out)
                self.assertLess(losses[-1], 0.2 * 8, out)  # 8: the variance of a sum of 8 standard normal values
                self.assertTrue(any((run_folder / "checkpoints").iterdir()))
                self.compare_with_python_twin(command[:-1], run_folder, out)

        with self.subTest("without its configuration, one line says so"):
            status, out = run(program, cwd=self.prefix)
            self.assertEqual(status, 1, out)
            self.assertRegex(out, r"\Aminimal: ds_config\.json: [^\n]*No such file or directory; give the path of a configuration[^\n]*\n\Z")

    def compare_with_python_twin(self, launcher, run_folder, expected):
        """minimal.py prints the same losses as the C++ program, and saves the same bits."""
        package = pathlib.Path(BUILD) / "python"
        if not package.exists():  # this Python has no headers
            return
        (run_folder / "checkpoints").rename(run_folder / "of_cpp")
        environment = {"PYTHONPATH": str(package)}
        status, out = run(*launcher, TORCH_PYTHON, "-B", ROOT / "examples/minimal/minimal.py", cwd=run_folder, environment=environment)
        self.assertEqual(status, 0, out)
        losses = lambda text: re.findall(r"step \d+ loss \S+", text)
        self.assertEqual(len(losses(expected)), 4)
        self.assertEqual(losses(out), losses(expected))
        compare = ("import torch; from trireme.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as state_dict; "
                   "cpp, python = (state_dict(folder) for folder in ('of_cpp', 'checkpoints')); "
                   "assert cpp.keys() == python.keys() and len(cpp) == 4 and all(torch.equal(cpp[k], python[k]) for k in cpp)")
        status, out = run(TORCH_PYTHON, "-B", "-c", compare, cwd=run_folder, environment=environment)
        self.assertEqual(status, 0, out)

    def test_another_torch_is_refused_by_version(self):
        other = self.folder / "torch"
        other.mkdir()
        (other / "version.py").write_text("__version__ = '9.8.7+cpu'\n")
        status, out = self.configure("other", f"-DTRIREME_TORCH_DIR={other}")
        self.assertNotEqual(status, 0)
        self.assertIn("is torch 9.8.7", " ".join(out.split()))

    def test_a_folder_without_torch_is_refused(self):
        status, out = self.configure("none", f"-DTRIREME_TORCH_DIR={os.devnull}")
        self.assertNotEqual(status, 0)
        self.assertIn("holds no torch package", " ".join(out.split()))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
