"""tools/bits prints the same hashes in each run of a build, and others for other weights. Argument: a build folder."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parent.parent.parent / "tools/bits"
BUILD = sys.argv[1]


class Bits(unittest.TestCase):
    def hashes(self, steps):
        lines = subprocess.check_output([sys.executable, "-B", TOOL, BUILD, "--steps", str(steps)], text=True).splitlines()
        self.assertEqual(lines, sorted(lines))
        return dict(line.split() for line in lines)

    def test_two_runs_are_alike_and_another_step_changes_every_hash(self):
        first = self.hashes(5)
        self.assertEqual(len(first), 21)
        self.assertEqual(self.hashes(5), first)
        for name, after in self.hashes(6).items():
            with self.subTest(name):
                self.assertRegex(after, "^[0-9a-f]{64}$")
                self.assertNotEqual(after, first[name])

    def test_a_folder_that_is_no_build_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, "-B", TOOL, folder], text=True, stderr=subprocess.PIPE)
        self.assertEqual(done.returncode, 1)
        self.assertIn("CMakeCache.txt is not there: name a build folder", done.stderr)


if __name__ == "__main__":
    del sys.argv[1:]
    unittest.main()
