"""Each program of benchmarks/ explains itself at once: --help says what it measures, and a wrong flag names the right
ones.

  help_test.py BUILD PYTHON   the folder of the build, and the Python that runs the drivers of peers
"""
import pathlib
import re
import subprocess
import sys
import unittest

FOLDER = pathlib.Path(__file__).resolve().parent.parent.parent / "benchmarks"
BUILD, PYTHON = pathlib.Path(sys.argv[1]), sys.argv[2]
LIMIT_S = 20  # of a busy host; libtorch's load takes most of a second, and no benchmark ends in this time


def commands():
    """(name, command) of every program."""
    for source in sorted(FOLDER.glob("*.cpp")):
        program = BUILD / "benchmarks" / source.stem
        if program.exists() or "benchmark/benchmark.h" not in source.read_text():  # left out without Google Benchmark
            yield source.name, [str(program)]
    for source in sorted(FOLDER.glob("*.py")):
        if "__main__" in source.read_text():
            yield source.name, [PYTHON, "-B", str(source)]
    for source in sorted(FOLDER.glob("*.sh")):
        yield source.name, ["sh", str(source)]


def run(command, *flags):
    return subprocess.run([*command, *flags], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S)


class EveryBenchmark(unittest.TestCase):
    def test_says_at_once_what_it_measures_and_which_flags_it_has(self):
        for name, command in commands():
            with self.subTest(name):
                told = run(command, "--help")
                self.assertEqual((told.returncode, told.stderr), (0, ""))
                self.assertGreater(len(told.stdout.split()), 12, told.stdout)
                if (FOLDER / name).suffix != ".sh" and name != "comm_table.py":
                    self.assertIn("--smoke", told.stdout)

    def test_refuses_an_unknown_flag_and_names_those_that_there_are(self):
        for name, command in commands():
            with self.subTest(name):
                told = run(command, "--no-such-flag", "3")
                self.assertEqual((told.returncode, told.stdout), (2, ""), told.stderr)
                self.assertIn("--no-such-flag", told.stderr)
                known = re.findall(r"--?[a-z][a-z-]*", told.stderr.replace("--no-such-flag", ""))
                self.assertTrue(known, told.stderr)

    def test_in_cpp_refuses_a_value_that_is_none(self):
        for flags, why in ((["--steps", "many"], "--steps many: no whole number of at least 1"),
                           (["--rounds", "0"], "--rounds 0: no whole number of at least 1"),
                           (["--systems", "nocomm,zero4"], "--systems zero4: there are nocomm,zero3"),
                           (["--steps"], "--steps needs a value"),
                           (["--step", "3"], "Did you mean `--steps`?")):
            with self.subTest(why):
                told = run([str(BUILD / "benchmarks/train_bench")], *flags)
                self.assertEqual((told.returncode, told.stdout), (2, ""))
                self.assertIn(why, told.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
