"""Programs as users write them, in more layouts than layouts_of_users_test.py has."""
import layouts_of_users_test as quick
from harness import main


class All(quick.Layouts):
    def test_recomputation_beside_parts_and_slices(self):
        modes = [{"trireme": {"recompute": mode}} for mode in ("full", "selective", {"mode": "selective", "extra_compute": 0.333})]
        names = ("SoftmaxOverTokensByHand", "CheckpointByHooks", "LargestFeature", "LossInPieces", "PackedDocuments", "OneKeyHead", "LinearChain")
        for sequence, tensor in ((2, 1), (1, 2)):
            self.assert_programs(2, [(name, sequence, tensor, mode) for name in names for mode in modes], timeout_s=600)

    def test_four_parts_and_two_parts_of_two_slices(self):
        for sequence, tensor in ((4, 1), (2, 2)):
            names = ("SoftmaxOverTokensByHand", "LossInPieces", "PackedDocuments", "LinearChain", "CheckpointByHooks")
            self.assert_programs(4, [(name, sequence, tensor, {"stage": stage, **quick.SELECTIVE}) for stage, name in enumerate(names[:4])], timeout_s=600)
            self.assert_programs(4, [(name, sequence, tensor, {"accumulation": 2, "optimizer": "AdamW"}) for name in names], timeout_s=600)

    def test_stages_that_exchange_several_tensors(self):
        self.assert_stages(2, [{"micro_batches": 4, "schedule": "interleaved", "stage": 1}], timeout_s=600)
        self.assert_stages(4, [{"sequence": 2}, {"sequence": 2, "attention": "ring", "micro_batches": 4, "schedule": "zb-v"}, {"tensor": 2, "stage": 1},
                               {"tensor": 2, "micro_batches": 4, "schedule": "interleaved"}], timeout_s=600)

    def test_a_checkpoint_goes_on_in_another_layout(self):
        self.assert_resumed(2, [((1, 2, 2), (2, 1, 0))], timeout_s=600)
        self.assert_resumed(4, [((2, 2, 1), (1, 1, 3)), ((1, 4, 0), (2, 2, 3)), ((1, 1, 3), (2, 2, 1)), ((4, 1, 3), (1, 2, 2))], timeout_s=600)


if __name__ == "__main__":
    main()
