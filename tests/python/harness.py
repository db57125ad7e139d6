"""Runs Python programs on ranks and compares what rank 0 says. Argument of a test: the program `trireme`.

    class MyTest(Case):
        def test_something(self):
            result = self.on_ranks(2, "import trireme; result = {'size': trireme.comm.world().size}")
            self.assertEqual(result["size"], 2)

    if __name__ == "__main__":
        main()
"""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import unittest

PROGRAM = pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None
PYTHON = sys.executable
_REPORT = "TEST_RESULT "


def run(command, *, environment=None, folder=None, timeout_s=240):
    """(exit status, stdout, stderr); the whole process group is ended after `timeout_s`, which is a failure."""
    with subprocess.Popen([str(word) for word in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}, start_new_session=True) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(f"{command} ran longer than {timeout_s} s:\n{out}\n{err}") from None
    return process.returncode, out, err


def launch(ranks, words, **options):
    """run() of Python with `words`, as `ranks` ranks of `trireme launch`; 0 ranks: without a launcher."""
    launcher = [PROGRAM, "launch", "--num_gpus", ranks, "--prefix", "none"] if ranks else []
    return run([*launcher, PYTHON, "-B", "-u", *words], **options)


def result_of(done):
    """What report() of rank 0 said in a run() that must have succeeded."""
    status, out, err = done
    told = [line.partition(_REPORT)[2] for line in out.splitlines() if _REPORT in line]
    if status or not told:
        raise AssertionError(f"exit status {status}, {len(told)} results\n{out[-6000:]}\n{err[-6000:]}")
    return json.loads(told[-1])


# What a snippet leaves in `result` is rank 0's result; `folder` is the test's own.
_FRAME = """
import os, sys
folder = {folder!r}
{snippet}
if os.environ.get("RANK", "0") == "0":
    import json
    sys.stdout.write("\\n{report}" + json.dumps(result) + "\\n")
"""


class Case(unittest.TestCase):
    """A test with a folder of its own, `self.folder`."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()  # pylint: disable=consider-using-with
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def write(self, name, text):
        """A file in the test's folder, by its path."""
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return path

    def snippet(self, text):
        """`text` as a script that says what it leaves in `result`."""
        return self.write("snippet.py", _FRAME.format(folder=str(self.folder), snippet=textwrap.dedent(text), report=_REPORT))

    def on_ranks(self, ranks, text, *, as_deepspeed=False, **options):
        """The JSON value that rank 0 leaves in `result`. 0 ranks: one process without a launcher."""
        words = ["-m", "trireme.as_deepspeed"] if as_deepspeed else []
        return result_of(launch(ranks, [*words, self.snippet(text)], **options))

    def assert_close(self, found, expected, relative=1e-5):
        """Two sequences of numbers of one length, pairwise within `relative`."""
        self.assertEqual(len(found), len(expected))
        for index, (one, other) in enumerate(zip(found, expected)):
            self.assertLessEqual(abs(one - other), relative * max(abs(other), 1e-12), f"[{index}] {found} {expected}")


def main():
    """unittest.main() without the program's path."""
    del sys.argv[1:2]
    unittest.main(verbosity=2)
