"""Scripts written for smp over two and four stages, beside copies of the model, and in bf16; one with layers that ranks
share, too."""
import shutil

from harness import main
from smp_scripts_test import Scripts

PROGRAMS = ("mnist", "bert_pretraining")
_OPTIONS = {"timeout_s": 600}


class All(Scripts):
    """By kind of layout; each program."""

    def assert_stages(self, name, stages, pipeline, *words, **more):
        """Bits of one process."""
        with self.subTest(name, stages=stages, pipeline=pipeline, words=words):
            expected = self.alone(name, 4, *words, **_OPTIONS)
            found = self.report("stages", stages, name, {"partitions": stages, "microbatches": 4, "pipeline": pipeline, **more}, *words, **_OPTIONS)
            self.assert_same(found, expected)
            self.assertEqual(len(found["elements"]), stages)

    def test_two_stages_each_way(self):
        for name in PROGRAMS:
            self.assert_stages(name, 2, "simple", memory_weight=1.0)
            self.assert_stages(name, 2, "interleaved", optimize="speed", active_microbatches=2)

    def test_two_stages_in_bf16(self):
        for name in PROGRAMS:
            self.assert_stages(name, 2, "interleaved", "--amp")

    def test_four_stages(self):
        for name in PROGRAMS:
            self.assert_stages(name, 4, "interleaved")

    def assert_files(self, name, kinds_of_stages, *words):
        """Files of two stages go on over other numbers of stages, the parts and the whole."""
        of_two = {"partitions": 2, "microbatches": 4}
        whole = self.report("stages", 2, name, of_two, "--dropout", "0", *words, **_OPTIONS)
        for stages, kind in kinds_of_stages:
            with self.subTest(name, stages=stages, kind=kind, words=words):
                self.assert_resumes("stages", stages, name, {**of_two, "partitions": stages}, kind, whole, *words, **_OPTIONS)

    def test_files_go_on_over_two_and_four_stages_and_in_one_process(self):
        for name in PROGRAMS:
            self.assert_files(name, [(2, "partial"), (2, "full"), (4, "partial"), (1, "partial"), (1, "full")])

    def test_files_of_training_in_bf16_go_on(self):
        for name in PROGRAMS:
            self.assert_files(name, [(2, "partial"), (2, "full")], "--amp")

    def test_two_copies_of_two_stages(self):
        for name in PROGRAMS:
            for words in ((), ("--amp",)):
                for placement in ("spread", "cluster"):
                    # Random numbers are drawn by the copy, and sums over copies have another order.
                    parameters = {"partitions": 2, "microbatches": 4, "ddp": True, "placement_strategy": placement}
                    with self.subTest(name, words=words, placement=placement):
                        expected = self.alone(name, 8, "--copies", "2", "--dropout", "0", *words, **_OPTIONS)
                        found = self.report("copies", 4, name, parameters, "--dropout", "0", *words, **_OPTIONS)
                        for one, other in zip(found["losses"], expected["losses"], strict=True):
                            self.assert_close(one, other, relative=1e-2 if words else 1e-3)


class Gpt2(Scripts):
    """The script has its degrees as arguments."""

    def trained(self, folder, ranks, **arguments):
        words = [word for name, value in arguments.items() for word in (f"--{name}", value)]
        return self.report(folder, ranks, "gpt2_training", None, *words, **_OPTIONS)

    def assert_as(self, found, expected):
        """Losses and sums of weights of the steps that were run, within 1e-5; what is generated is the same."""
        self.assert_close(found["losses"], expected["losses"][-len(found["losses"]):])
        self.assert_close(list(found["weights"].values()), list(expected["weights"].values()), 1e-4)
        self.assert_close(found["test"], expected["test"])
        self.assertAlmostEqual(found["generated"], expected["generated"], places=6)

    def test_stages_and_layers_that_ranks_share_together(self):
        expected = self.trained("alone", 1)
        for ranks, stages, slices, more in ((2, 1, 2, {}), (2, 2, 1, {}), (4, 2, 2, {}), (8, 2, 2, {}), (4, 2, 2, {"optimize": "memory", "manual_partition": 1}),
                                            (4, 2, 2, {"skip_tracing": 1, "delayed_param": 1}), (8, 2, 2, {"shard_optimizer_state": 1}), (4, 2, 2, {"placement_strategy": "spread"}),
                                            (2, 2, 1, {"activation_checkpointing": 1, "offload_activations": 1}), (2, 1, 2, {"activation_checkpointing": 1})):
            with self.subTest(ranks=ranks, stages=stages, slices=slices, **more):
                found = self.trained("shared", ranks, pipeline_parallel_degree=stages, tensor_parallel_degree=slices, **more)
                self.assert_as(found, expected)

    def test_files_of_stages_and_slices_go_on(self):
        both = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}
        expected = self.trained("saved", 4, **both)
        for number, (ranks, kind, layout) in enumerate(((4, "partial", both), (1, "full", {}), (1, "partial", {}), (2, "full", {"pipeline_parallel_degree": 2}))):
            with self.subTest(kind=kind, **layout):
                shutil.copytree(self.folder / "saved", self.folder / f"resumed{number}")
                found = self.trained(f"resumed{number}", ranks, resume=kind, **layout)
                self.assertEqual(len(found["losses"]), 12)
                self.assert_as(found, expected)

    def test_in_16_bits(self):
        for kind in ("fp16", "bf16"):
            with self.subTest(kind):
                expected = self.trained("alone", 1, **{kind: 1})
                found = self.trained("shared", 4, pipeline_parallel_degree=2, tensor_parallel_degree=2, **{kind: 1})
                self.assert_close(found["losses"], expected["losses"], 0.1)


if __name__ == "__main__":
    main()
