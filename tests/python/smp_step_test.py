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

    def test_cnn_with_batch_norm_and_dropout(self):
        found = self.assert_bits_of_one_process("""
    begin(pipeline="simple")
    result = trained(Cnn(0.2), cnn_batches())
""")
        self.assertEqual(found[2:], ["simple", [0, 1]])

    def test_weights_after_steps_are_those_of_plain_pytorch(self):
        """Gradients of a norm far above 1 are not clipped."""
        text = """
    begin()
    net, batches = Mlp(), mlp_batches()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)
    kept = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    for batch in batches:
        optimizer.zero_grad()
        for index in range(MICRO_BATCHES):
            (50 * net(*(tensor.chunk(MICRO_BATCHES)[index] for tensor in batch)) / MICRO_BATCHES).backward()
        optimizer.step()
    expected = dict(sorted((name, bits(parameter)) for name, parameter in net.named_parameters()))
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(kept[name])
    net.zero_grad()
    found = trained(net, batches, lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.5), loss_of=lambda model, *batch: 50 * model(*batch))
    result = [found[1], expected]
"""
        for stages in (1, 2):
            with self.subTest(stages):
                self.assertEqual(*self.ran(stages, text))

    def test_mlp_of_plain_pytorch(self):
        found = self.ran(2, """
    begin()
    net, batches = Mlp(), mlp_batches()
    expected = plain(net, batches)
    net.zero_grad()
    result = [trained(net, batches)[0][0], expected]
""")
        self.assertEqual(*found)

    def test_gpt2_untied(self):
        found = self.assert_bits_of_one_process("""
    begin()
    result = trained(gpt2(False, 0.1), ids_batches(), loss_of=causal_loss)
""")
        self.assertEqual(found[2:], ["interleaved", [0, 1]])

    def test_gpt2_tied(self):
        found = self.assert_bits_of_one_process("""
    begin()
    result = trained(gpt2(True, 0.1), ids_batches(), loss_of=causal_loss)
""")
        self.assertEqual(found[2:], ["interleaved", [0, 1]])

    def test_a_branch_by_a_value_and_a_stage_that_comes_again(self):
        self.assert_bits_of_one_process("""
    begin()
    class Branches(Mlp):
        taken = 0
        def forward(self, x, y):
            h = self.layers[:4](x)
            if h.mean().item() > float(h.std()) - 1.0:
                Branches.taken += 1
                h = h * 2
            return F.cross_entropy(self.layers[4:](torch.where(h > 0, h, h * 0.5)), y)
    result = trained(Branches(0.1), mlp_batches())
    assert Branches.taken
""")

    _PRODUCT = """
    begin(auto_partition=False, default_partition=0)
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a * b
        @staticmethod
        def backward(ctx, gradient):
            a, b = ctx.saved_tensors
            return gradient * b, gradient * a
    class Gated(Mlp):
        def forward(self, x, y):
            early = self.layers[:4](x)
            late = self.layers[4:7](early)
            return F.cross_entropy(self.layers[7](PRODUCT), y)
    net = Gated(0.1)
    for index, stage in STAGES.items():
        if smp.pp_size() > 1:
            smp.set_partition(net.layers[index], stage)
    result = trained(net, mlp_batches())
"""

    def test_a_custom_function_whose_arguments_are_on_two_stages(self):
        self.assert_bits_of_one_process(self._PRODUCT.replace("PRODUCT", "Product.apply(early, Product.apply(late, early))").replace("STAGES", "{5: 1, 7: 1}"))

    def test_a_custom_function_of_what_its_stage_computed_before_another_one(self):
        self.assert_bits_of_one_process(self._PRODUCT.replace("PRODUCT", "Product.apply(F.linear(late, self.layers[3].weight), early)").replace("STAGES", "{5: 1}"))

    def test_a_stage_without_parameters(self):
        text = """
    begin(auto_partition=False, default_partition=0)
    net = Mlp(0.1)
    result = trained(net, mlp_batches(), lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
"""
        found = self.assert_bits_of_one_process(text)
        self.assertEqual(found[3], [0])

    def test_placed_by_hand(self):
        found = self.assert_bits_of_one_process("""
    begin(auto_partition=False, default_partition=0)
    net = Mlp(0.1)
    if smp.pp_size() > 1:
        smp.set_partition(net.layers[3], 1)
    result = trained(net, mlp_batches())
""")
        self.assertEqual(found[2:], ["interleaved", [0, 1]])

    def test_sums_over_micro_batches_and_two_calls_per_step(self):
        text = """
    begin()
    net, batches = Mlp(), mlp_batches()
    for batch in batches:
        for index in range(MICRO_BATCHES):
            net(*(tensor.chunk(MICRO_BATCHES)[index] for tensor in batch)).backward()
    expected = dict(sorted((name, bits(parameter.grad)) for name, parameter in net.named_parameters()))
    net.zero_grad()
    model = smp.DistributedModel(net, average_grads_across_microbatches=False, backward_passes_per_step=2)
    @smp.step
    def train_step(x, y):
        model.backward(model(x, y))
    nothing = [train_step(*batch) for batch in batches]
    result = [gradients(model), expected, nothing]
"""
        found = self.ran(2, text)
        self.assertEqual(found[0], found[1])
        self.assertEqual(found[2], [[None] * 4] * 2)

    def test_losses_of_both_stages(self):
        text = """
    begin()
    class Two(Mlp):
        def forward(self, x, y):
            h = self.layers[:4](x)
            return h.square().mean(), F.cross_entropy(self.layers[4:](h), y)
    model = smp.DistributedModel(Two(0.1))
    @smp.step
    def train_step(x, y):
        early, late = model(x, y)
        CALL
        return {"early": early, "late": late}
    found = train_step(*mlp_batches()[0])
    result = [{name: [one.item() for one in output.outputs] for name, output in found.items()}, gradients(model)]
"""
        alone = self.ran(1, text.replace("CALL", "(early * 0.5).backward(); late.backward()"))
        for call in ("model.backward([early, late], [torch.tensor(0.5), None])", "early.backward(torch.tensor(0.5)); late.backward()",
                     "torch.autograd.backward([early, late], [torch.tensor(0.5), torch.tensor(1.0)])"):
            with self.subTest(call):
                self.assertEqual(self.ran(2, text.replace("CALL", call)), alone)
        self.assertTrue(all(alone[1].values()))

    def test_one_tensor_crosses_for_each_micro_batch(self):
        found = self.ran(2, """
    begin(auto_partition=False, default_partition=0)
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.linear = nn.Parameter(torch.ones(16)), nn.Linear(16, 16)
        def forward(self, x):
            normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
            return x + self.linear(self.weight * normed)
    net = nn.Sequential(nn.Linear(6, 16), Block(), nn.Linear(16, 3))
    smp.set_partition(net[1], 1)
    smp.set_partition(net[2], 1)
    model = smp.DistributedModel(net)
    @smp.step
    def train_step(x, y):
        model.backward(F.cross_entropy(model(x), y))
    sent = []
    for x, y in mlp_batches(3):
        train_step(x, y)
        sent.append(model.engine("").core.counters()["bytes"])
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps(sent[2] - sent[1]))]
""")
        self.assertEqual(found, [8 * 16 * 4] * 2)  # activations one way, their gradients the other


if __name__ == "__main__":
    main()
