"""smp.step over two and more stages: more schedules, models and optimizers than smp_step_test.py has."""
from harness import RankServer, main
from smp_programs import Case

RankServer.imports = ("transformers.models.gpt2.modeling_gpt2", "torch._dynamo")  # which optimizers of torch import


class Bits(Case):
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

    def test_optimizers_of_each_kind_with_groups(self):
        for make in ("torch.optim.AdamW(groups, lr=0.01)", "torch.optim.SGD(groups, lr=0.05, momentum=0.9)", "torch.optim.RMSprop(groups, lr=0.01)",
                     "torch.optim.Adam(groups, lr=0.01, amsgrad=True)"):
            with self.subTest(make):
                found = self.assert_bits_of_one_process(f"""
    begin()
    net = Mlp()
    first, *others = net.parameters()
    groups = [{{"params": [first], "lr": 0.02}}, {{"params": others[:-1]}}, {{"params": others[-1:], "weight_decay": 0.1}}]
    result = trained(net, mlp_batches(3), lambda _: {make}, steps=3)
""")
                self.assertNotEqual(found[0][0][1], found[0][2][1])

    def test_frozen_parameters_and_what_is_not_used(self):
        self.assert_bits_of_one_process("""
    begin()
    class Unused(Mlp):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(3, 3).requires_grad_(False)
            for parameter in self.layers[0].parameters():
                parameter.requires_grad_(False)
    net = Unused()
    result = trained(net, mlp_batches())
""")

    def test_three_stages_of_which_the_first_comes_again(self):
        found = self.assert_bits_of_one_process("""
    begin()
    result = trained(gpt2(True, 0.1), ids_batches(), loss_of=causal_loss)
""", 3)
        self.assertEqual(found[3], [0, 1, 2])


if __name__ == "__main__":
    main()
