"""Checkpoints that two processes save and load with torch.distributed.checkpoint, which wants numpy for that.

Arguments: the program, a folder for environments.
"""
import json
import os
import subprocess
import sys
import unittest

import torch

from peers import python_with, trireme
from torch_states import DistributedCase, saved_tensors, safetensors

RANKS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torch_ranks.py")


class TorchRanks(DistributedCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.python = python_with("numpy==2.3.4")

    def on_two_ranks(self, what, folder):
        processes = [subprocess.Popen([self.python, "-W", "ignore", RANKS, what, folder],
                                      env={**os.environ, "RANK": str(rank)}) for rank in range(2)]
        self.assertEqual([process.wait() for process in processes], [0, 0])

    def test_what_two_ranks_saved_is_read_bit_for_bit(self):
        folder = self.new_folder("double")
        self.on_two_ranks("save", folder)
        expected = torch.load(folder / "expected.pt", weights_only=True)
        self.assertGreater(len(list((folder / "saved").glob("*.distcp"))), 1)
        trireme("consolidate", folder / "saved", folder / "weights", "--dtype", "keep")
        self.same(safetensors(folder / "weights/model.safetensors"), expected["model"])
        self.expect_states(self.converted(folder)[0], expected["state"])

    def test_two_ranks_load_their_shards_of_what_is_written(self):
        folder = self.new_folder("sharded")
        trireme("convert", self.run_folder, folder / "converted", "--to", "dcp")
        tensors, _ = saved_tensors(self.checkpoints / "global_step3")
        masters = {name.removeprefix("master."): tensor for name, tensor in tensors.items() if name.startswith("master.")}
        (folder / "shapes.json").write_text(json.dumps({name: list(tensor.shape) for name, tensor in masters.items()}))
        self.on_two_ranks("load", folder)
        loaded = torch.load(folder / "loaded.pt", weights_only=False)
        self.same(loaded["model"], masters)
        self.expect_states(tensors, loaded["state"])


if __name__ == "__main__":
    del sys.argv[1:]
    unittest.main()
