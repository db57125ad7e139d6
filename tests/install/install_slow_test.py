#!/usr/bin/env python3
"""As install_test.py, with the example of pipeline stages."""
import pathlib
import re
import sys
import tempfile
import unittest

from install_test import CMAKE, Installed, run


class Pipeline(Installed):
    def test_the_pipeline_example_has_the_same_losses_in_one_stage_and_in_two(self):
        status, out = self.configure("pipeline", example="pipeline")
        self.assertEqual(status, 0, out)
        status, out = run(CMAKE, "--build", self.folder / "pipeline")
        self.assertEqual(status, 0, out)
        losses = []
        for ranks in ("1", "2"):
            run_folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
            (run_folder / "ds_config.json").write_text((self.folder / "pipeline/ds_config.json").read_text())
            status, out = run(self.prefix / "bin/trireme", "launch", "--num_gpus", ranks, self.folder / "pipeline/pipeline",
                              cwd=run_folder)
            self.assertEqual(status, 0, out)
            losses.append(re.findall(r"step \d+ loss \S+", out))
        self.assertEqual(len(losses[0]), 4)
        self.assertEqual(losses[0], losses[1])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
