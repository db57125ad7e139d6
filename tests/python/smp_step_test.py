"""smp.step over two stages: losses and every gradient are those of one process, bit by bit, and of plain PyTorch."""
from harness import RankServer, main
from smp_programs import Case

RankServer.imports = ("transformers.models.gpt2.modeling_gpt2", "torch._dynamo")  # which optimizers of torch import


class Bits(Case):
    def test_mlp_with_dropout(self):
        found = self.assert_bits_of_one_process("""
    begin()
    result = trained(Mlp(0.3), mlp_batches(), lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
""")
        self.assertEqual(found[2:], ["interleaved", [0, 1]])

    def test_mlp_of_plain_pytorch(self):
        found = self.ran(2, """
    begin()
    net, batches = Mlp(), mlp_batches()
    expected = plain(net, batches)
    net.zero_grad()
    result = [trained(net, batches)[0][0], expected]
""")
        self.assertEqual(*found)

    def test_cnn_with_batch_norm_and_dropout_under_each_schedule(self):
        for pipeline in ("interleaved", "simple", "sequential"):
            text = f"""
    begin(pipeline={pipeline!r})
    result = trained(Cnn(0.2), cnn_batches())
"""
            with self.subTest(pipeline):
                found = self.assert_bits_of_one_process(text)
                self.assertEqual(found[2:], [pipeline, [0, 1]])

    def test_gpt2_untied_under_each_schedule(self):
        for pipeline in ("interleaved", "simple", "sequential"):
            with self.subTest(pipeline):
                found = self.assert_bits_of_one_process(f"""
    begin(pipeline={pipeline!r})
    result = trained(gpt2(False, 0.1), ids_batches(), loss_of=causal_loss)
""")
                self.assertEqual(found[2:], [pipeline, [0, 1]])

    def test_gpt2_tied(self):
        found = self.assert_bits_of_one_process("""
    begin()
    result = trained(gpt2(True, 0.1), ids_batches(), loss_of=causal_loss)
""")
        self.assertEqual(found[2:], ["sequential", [0, 1]])

    def test_gpt2_of_plain_pytorch(self):
        for tied in (False, True):
            with self.subTest(tied=tied):
                found = self.ran(2, f"""
    begin()
    net, batches = gpt2({tied}), ids_batches()
    net.train()
    expected = plain(net, batches, causal_loss)
    net.zero_grad()
    result = [trained(net, batches, loss_of=causal_loss)[0][0], expected]
""")
                self.assertEqual(*found)


if __name__ == "__main__":
    main()
