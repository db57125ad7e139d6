"""Weights of 16 bits beside layers that ranks share, over stages, and with copies that end before others."""
from harness import main
from smp_precision_test import SHARED, Runs


class Shared(Runs):
    def test_stages_whose_ranks_share_layers_train_as_plain_pytorch_with_masters(self):
        """To rounding: ranks add up products of 16 bits in another order."""
        for ranks, stages in ((2, 1), (4, 2)):
            with self.subTest(ranks=ranks):
                worst, *told = self.ran(ranks, f"""
    smp.init({{"partitions": {stages}, {SHARED}, "microbatches": MICRO_BATCHES, "ddp": True, "fp16": True}})
    torch.manual_seed(5)
    net = Net()
    smp.set_tensor_parallelism(net)
    expected = plain_run(copy.deepcopy(net), torch.float16, [3], 1024.0, 0.1, lambda p: torch.optim.SGD(p, lr=0.5))
    found = smp_run(net, 3, 0.1, lambda p: torch.optim.SGD(p, lr=0.5), static_loss_scale=1024.0)
    cut = sorted(name for name, p in net.named_parameters() if smp_run.model.is_distributed_parameter(p))
    cut = sorted(of_all(dict.fromkeys(cut)))
    result = [furthest(found, expected), cut, smp_run.optimizer.overflow, smp_run.optimizer.loss_scale]
""")
                # 4 of 2^10, the last bit of 16
                for far, tolerance in zip(worst, (4e-3, 4e-3, 4e-3, 4e-3), strict=True):
                    self.assertLess(far, tolerance)
                self.assertEqual(told, [["embedding.weight", "layers.0.weight", "layers.2.weight", "layers.4.weight"], False, 1024.0])

    def test_an_overflow_on_one_slice_of_one_stage_skips_the_step_on_all_ranks(self):
        self.assert_skips(4, 2, SHARED, "weight")

    def test_copies_of_slices_and_stages_without_batches_follow_overflows(self):
        for ranks, stages, options, counts in ((4, 2, "", (1, 4)), (4, 1, SHARED, (1, 4)), (4, 1, SHARED, (4, 1)), (8, 2, SHARED, (1, 4))):
            with self.subTest(ranks=ranks, options=options, counts=counts):
                self.assert_joined(ranks, stages, options, counts)


if __name__ == "__main__":
    main()
