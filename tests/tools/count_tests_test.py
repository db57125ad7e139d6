"""tools/count_tests counts what ran inside of each entry of ctest's log."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parent.parent.parent / "tools/count_tests"
ENTRY = """1/4 Testing: {name}
1/4 Test: {name}
Command: "program"
Output:
----------------------------------------------------------
{output}
<end of output>
Test Passed.
"""
SUITE = """[==========] Running 3 tests from 1 test suite.
[  SKIPPED ] Comm.UnderMpirun (2 ms)
[==========] 3 tests from 1 test suite ran. (12 ms total)
[  PASSED  ] 2 tests.
[  SKIPPED ] 1 test, listed below:
[  SKIPPED ] Comm.UnderMpirun"""


class CountTests(unittest.TestCase):
    def run_on(self, *entries):
        with tempfile.TemporaryDirectory() as folder:
            log = pathlib.Path(folder, "Testing/Temporary/LastTest.log")
            log.parent.mkdir(parents=True)
            log.write_text("Start testing\n" + "".join(ENTRY.format(name=n, output=o) for each in entries for n, o in each.items()))
            return subprocess.check_output([sys.executable, "-B", TOOL, folder], text=True)

    def test_tests_inside_of_suites_and_files_are_counted_and_the_skipped_named(self):
        self.assertEqual(self.run_on({"comm_test.Comm": SUITE, "python.a_test": "Ran 2 tests in 1.0s\n\nOK",
                                      "python.b_test": "Ran 4 tests in 1.0s\n\nOK (skipped=1)",
                                      "python.c_test": "skipped: no network"}),
                         "7 tests ran, 2 skipped\n  skipped: Comm.UnderMpirun\n  skipped: python.b_test\n"
                         "  skipped as a whole, or ended early: python.c_test\n")

    def test_what_ran_again_counts_once_and_is_named(self):
        first, second = {"python.a_test": "Ran 2 tests in 1.0s\n\nFAILED"}, {"python.a_test": "Ran 2 tests in 1.0s\n\nOK"}
        self.assertEqual(self.run_on(first, second), "2 tests ran, 0 skipped\n  failed, and was run again: python.a_test\n")

    def test_a_folder_without_a_log_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, "-B", TOOL, folder], text=True, stderr=subprocess.PIPE)
        self.assertEqual(done.returncode, 1)
        self.assertIn("run ctest in that build folder first", done.stderr)


if __name__ == "__main__":
    unittest.main()
