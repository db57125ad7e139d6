"""The tests of Hugging Face's programs with the newest versions that the package index has."""
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "peers"))
import environments  # pylint: disable=wrong-import-position
from harness import PROGRAM, Case, main, run  # pylint: disable=wrong-import-position

PACKAGES = ("transformers", "accelerate", "peft")
TESTS = ("trainer", "accelerate", "pretrained", "models", "as_deepspeed")


class Newest(Case):
    def test_programs_of_hugging_face_run_unchanged(self):
        try:
            # a new folder, so that nothing is older than today
            python = environments.python_with(self.folder, *PACKAGES)
        except environments.Unreachable:
            raise unittest.SkipTest("the package index cannot be reached") from None
        versions = f"import importlib.metadata as m; print({{name: m.version(name) for name in {PACKAGES}}})"
        print(run([python, "-c", versions])[1].strip(), file=sys.stderr)
        for name in TESTS:
            with self.subTest(test=name):
                status, out, err = run([python, "-B", pathlib.Path(__file__).parent / f"{name}_test.py", PROGRAM], timeout_s=900)
                self.assertEqual(status, 0, out[-3000:] + err[-6000:])


if __name__ == "__main__":
    main()
