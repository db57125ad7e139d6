"""Runs Python programs on ranks and compares what rank 0 says. Argument of a test: the program `trireme`.

    class MyTest(Case):
        def test_something(self):
            result = self.on_ranks(2, "import trireme; result = {'size': trireme.comm.world().size}")
            self.assertEqual(result["size"], 2)

    if __name__ == "__main__":
        main()
"""
import atexit
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import unittest

PROGRAM = pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None
PYTHON = sys.executable
_REPORT = "TEST_RESULT "
_SERVER = pathlib.Path(__file__).with_name("rank_server.py")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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


class _OwnServer:
    """A server that serves this test alone."""

    def __init__(self, imports):
        self._process = subprocess.Popen(  # pylint: disable=consider-using-with
            [PYTHON, "-B", "-u", _SERVER, *imports], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.requests, self.answers = self._process.stdin, self._process.stdout

    def end(self):
        self.requests.close()
        self._process.wait()
        self.answers.close()


class _SharedServer:
    """The server that ctest has started for all tests. Raises OSError: there is none."""

    def __init__(self, imports):
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(os.environ.get("TRIREME_TEST_RANK_SERVER", ""))
        except OSError:
            self._socket.close()
            raise
        self.requests, self.answers = self._socket.makefile("w"), self._socket.makefile("r")
        self.requests.write(json.dumps(imports) + "\n")

    def end(self):
        for file in (self.requests, self.answers, self._socket):
            file.close()


class RankServer:
    """A Python with torch that forks ranks (rank_server.py), for programs that are not about how a rank is started or
    ended.

    `imports` names the modules that most programs of a test import, so that the server imports them once, for all
    ranks: a test sets it before the first run().
    """

    imports = ()
    _server = None

    @classmethod
    def run(cls, ranks, words, *, as_deepspeed=False, environment=None, folder=None, timeout_s=240):
        """As launch() of a script and its arguments, without the launcher: (exit status, stdout, stderr).

        Of `environment` the ranks get what is read once they run: variables of Trireme.
        """
        if others := [name for name in environment or () if not name.startswith("TRIREME_")]:
            raise ValueError(f"{others}: may be read before a rank is forked; use launch()")
        if cls._server is None:
            try:
                cls._server = _SharedServer(cls.imports)
            except OSError:
                cls._server = _OwnServer(cls.imports)
            atexit.register(cls._server.end)
        with tempfile.NamedTemporaryFile("w+") as out, tempfile.NamedTemporaryFile("w+") as err:
            request = {"ranks": ranks, "words": [str(word) for word in words], "as_deepspeed": as_deepspeed, "folder": folder and str(folder),
                       "out": out.name, "err": err.name, "timeout_s": timeout_s,
                       "environment": {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}}
            cls._server.requests.write(json.dumps(request) + "\n")
            cls._server.requests.flush()
            answer = json.loads(cls._server.answers.readline())
            said = out.read(), err.read()
        if answer["timed_out"]:
            raise AssertionError(f"{words} ran longer than {timeout_s} s:\n{said[0]}\n{said[1]}")
        return (next(filter(None, answer["statuses"]), 0), *said)


def result_of(done):
    """The report() of rank 0 in a run() that must have succeeded."""
    status, out, err = done
    told = [line.partition(_REPORT)[2] for line in out.splitlines() if _REPORT in line]
    if status or not told:
        raise AssertionError(f"exit status {status}, {len(told)} results\n{out[-6000:]}\n{err[-6000:]}")
    return json.loads(told[-1])


# The value that a snippet leaves in `result` is rank 0's result; `folder` is the test's own.
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

    def on_ranks(self, ranks, text, *, as_deepspeed=False, launched=False, environment=None, **options):
        """The JSON value that rank 0 leaves in `result`. 0 ranks: one process without a launcher's variables.

        The ranks are forked by the RankServer, or `launched`: each a Python of its own, which has imported nothing.
        """
        script = self.snippet(text)
        if not launched:
            return result_of(RankServer.run(ranks, [script], as_deepspeed=as_deepspeed, environment=environment, **options))
        words = ["-m", "trireme.as_deepspeed"] if as_deepspeed else []
        return result_of(launch(ranks, [*words, script], environment=environment, **options))

    def assert_close(self, found, expected, relative=1e-5):
        """Two sequences of numbers of one length, pairwise within `relative`."""
        self.assertEqual(len(found), len(expected))
        for index, (one, other) in enumerate(zip(found, expected)):
            self.assertLessEqual(abs(one - other), relative * max(abs(other), 1e-12), f"[{index}] {found} {expected}")


def main():
    """unittest.main() without the program's path."""
    del sys.argv[1:2]
    unittest.main(verbosity=2)
