"""Programs that smp's documentation rules out, where no other test has one."""
from harness import RankServer, main
from smp_programs import Case

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import


class Lifted(Case):
    def test_arguments_and_results_that_nothing_needs_and_the_forward_of_a_base(self):
        self.assert_bits_of_one_process("""
    begin()
    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        def forward(self, x, unused):
            return self.first(x)
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.beside = nn.Linear(16, 16), nn.Linear(16, 16)
        def forward(self, h, unused):
            return self.linear(h), self.beside(h)  # which the loss does not depend on
    class Net(Base):
        def __init__(self):
            super().__init__()
            self.inner = Inner()
        def forward(self, x, y):
            h = super().forward(x, y * 2)
            used, unused = self.inner(h, h.detach().requires_grad_())
            return F.cross_entropy(self.last(used), y), unused.sum()
    def loss_of(model, x, y):
        loss, beside = model(x, y)
        return loss
    def trained_but(net, batches):
        model = trained.model = smp.DistributedModel(net)
        @smp.step
        def train_step(x, y):
            loss = loss_of(model, x, y)
            model.backward(loss)
            return loss
        found = []
        for batch in batches:
            found.append([[loss.item() for loss in train_step(*batch).outputs], {name: value for name, value in gradients(model).items() if "beside" not in name}])
        return [found, weights(model)]
    result = trained_but(Net(), mlp_batches(1))
""")

    def test_a_tied_parameter_whose_modules_are_placed_on_two_stages(self):
        found = self.assert_bits_of_one_process("""
    begin(auto_partition=False, default_partition=0)
    net = gpt2(True)
    if smp.pp_size() > 1:
        smp.set_partition(net.transformer.h[1], 1)
        smp.set_partition(net.transformer.ln_f, 1)
        smp.set_partition(net.lm_head, 1)
    result = trained(net, ids_batches(), loss_of=causal_loss)
""")
        self.assertEqual(found[3], [0, 1])

    def test_batch_norm_has_the_numbers_of_plain_pytorch_that_adds_up_micro_batches(self):
        found = self.ran(2, """
    import copy
    begin()
    net, batches = Cnn(), cnn_batches()
    other = copy.deepcopy(net)
    expected = plain(other, batches)
    whole = copy.deepcopy(net)
    of_batch = whole(*batches[0]).item()
    given = trained(net, batches, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0), steps=1)
    buffers = {name: bits(buffer) for name, buffer in other.named_buffers()}
    result = [given[0][0], expected, {name: value for name, value in given[1].items() if name in buffers}, dict(sorted(buffers.items())), of_batch]
""")
        self.assertEqual(found[0], found[1])
        self.assertEqual(found[2], found[3])
        self.assertNotAlmostEqual(found[4], sum(found[1][0]) / 4, places=4)  # the whole batch has other statistics


class Refused(Case):
    def test_a_loader_among_the_arguments(self):
        found = self.ran(2, """
    begin()
    model = smp.DistributedModel(Mlp())
    @smp.step
    def train_step(source):
        for x, y in source:
            model.backward(model(x, y))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 6), torch.zeros(8, dtype=torch.int64)))
    made = [loader, iter(loader), (batch for batch in loader)]
    result = [[json.loads(text) for text in smp.state.world.gather(json.dumps(told(lambda: train_step(one))))] for one in made]
""")
        for texts, kind in zip(found, ("DataLoader", "_SingleProcessDataLoaderIter", "generator"), strict=True):
            for text in texts:
                self.assertRegex(text, rf"^UnsupportedError: smp.step: an argument is a .*{kind}, of which each micro-batch would take the next items; give the batch")


if __name__ == "__main__":
    main()
