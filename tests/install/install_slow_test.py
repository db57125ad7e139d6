#!/usr/bin/env python3
"""As install_test.py, with the examples of stages, and the commands of docs/install.md as they stand there."""
import os
import pathlib
import re
import shlex
import shutil
import sys
import tempfile
import unittest

from install_test import CMAKE, ROOT, TORCH_PYTHON, Installed, run


class Stages(Installed):
    def test_the_examples_of_stages_have_the_same_losses_in_one_stage_and_in_two(self):
        for example in ("pipeline", "smp"):
            with self.subTest(example):
                self.compare_in_one_stage_and_in_two(example)

    def compare_in_one_stage_and_in_two(self, example):
        status, out = self.configure(example, example=example)
        self.assertEqual(status, 0, out)
        status, out = run(CMAKE, "--build", self.folder / example)
        self.assertEqual(status, 0, out)
        losses = []
        for ranks in ("1", "2"):
            run_folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
            (run_folder / "ds_config.json").write_text((self.folder / example / "ds_config.json").read_text())
            status, out = run(self.prefix / "bin/trireme", "launch", "--num_gpus", ranks, self.folder / example / example,
                              cwd=run_folder)
            self.assertEqual(status, 0, out)
            losses.append(re.findall(r"step \d+ loss \S+", out))
        self.assertEqual(len(losses[0]), 4)
        self.assertEqual(losses[0], losses[1])


class Page(Installed):
    def test_the_ways_to_start_a_program_that_it_names_start_it(self):
        status, out = self.configure("build")
        self.assertEqual(status, 0, out)
        status, out = run(CMAKE, "--build", self.folder / "build")
        self.assertEqual(status, 0, out)
        path = os.pathsep.join([str(self.prefix / "bin"), str(pathlib.Path(TORCH_PYTHON).parent), os.environ["PATH"]])
        page = " ".join((ROOT / "docs/install.md").read_text().split())
        commands = re.findall(r"`([^`]*\./minimal)`", page)
        self.assertEqual([shlex.split(command)[0] for command in commands], ["./minimal", "trireme", "torchrun", "mpirun"])
        for command in commands:
            program, *words = shlex.split(command)
            with self.subTest(command):
                found = self.folder / "build/minimal" if program == "./minimal" else shutil.which(program, path=path)
                if found is None and program == "mpirun":
                    continue  # WITH_MPI=1 scripts/setup installs it
                self.assertIsNotNone(found, path)
                if program == "mpirun":
                    words = ["--allow-run-as-root", "--oversubscribe", *words]
                status, out = run(found, *words, cwd=self.folder / "build", environment={"PATH": path, "OMP_NUM_THREADS": "1"})
                self.assertEqual(status, 0, out)
                self.assertEqual(len(re.findall(r"step \d+ loss \S+", out)), 4, out)

    def test_the_lines_for_cmake_are_those_of_the_example(self):
        block = re.search(r"```\n(find_package.*?)```", (ROOT / "docs/install.md").read_text(), re.DOTALL).group(1)
        example = (ROOT / "examples/minimal/CMakeLists.txt").read_text().replace("minimal", "my_program")
        for line in block.splitlines():
            self.assertIn(line, example)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
