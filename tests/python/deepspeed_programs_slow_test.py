"""Programs written for DeepSpeed, each as it is under DeepSpeed itself (from PyPI) and under this package: the same
losses.

With TRIREME_RECORD=1 writes what DeepSpeed said for deepspeed_programs_test.py.
"""
import os
import unittest

import deepspeed_programs as programs
from harness import PROGRAM, PYTHON, Case, main, result_of, run


class BesideDeepSpeed(Case):
    """Every program at every stage on two ranks, and at one stage on one rank, in processes of its own."""

    @classmethod
    def setUpClass(cls):
        cls.python = programs.python_with_deepspeed()
        cls.record = {}

    @classmethod
    def tearDownClass(cls):
        if os.environ.get("TRIREME_RECORD") == "1":
            programs.write_record(cls.record)

    def said(self, launcher, python, name, stage, ranks):
        name, *arguments = programs.words_of(name, stage).split(",")
        output = self.folder / f"{name}{stage}{ranks}{len(launcher)}"
        command = [PROGRAM, "launch", "--num_gpus", ranks, "--prefix", "none", *launcher, *python, programs.FOLDER / f"{name}.py"]
        return result_of(run([*command, *(output if word == "FOLDER" else word for word in arguments)],
                             environment={"DS_ACCELERATOR": "cpu", "TRIREME_PYTHON": PYTHON}))

    def check(self, name):
        stages = programs.STAGES[name]
        for stage, ranks in [*((stage, programs.RANKS) for stage in stages), (stages[0], 1)]:
            with self.subTest(program=name, stage=stage, ranks=ranks):
                expected = self.said([], [self.python, "-B"], name, stage, ranks)
                self.record.setdefault(name, expected)
                found = self.said(["--as-deepspeed"], [], name, stage, ranks)
                self.assertLess(programs.difference(found, expected), 1e-5)


def _test_of(name):
    return lambda self: self.check(name)


for _name in programs.STAGES:
    setattr(BesideDeepSpeed, f"test_{_name}_has_the_same_losses", _test_of(_name))

if __name__ == "__main__":
    main()
