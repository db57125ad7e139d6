"""Operators of a program's own run on slices of layers by the rule that the program registers."""
from harness import Case, main

_PROGRAM = """
    import torch, trireme
    from torch import nn
    from trireme.tensor.rules import register_partition_rule
    trireme.init_distributed()

    if not hasattr(torch.ops, "rules_test") or not hasattr(torch.ops.rules_test, "scaled_product"):
        @torch.library.custom_op("rules_test::scaled_product", mutates_args=())
        def scaled_product(x: torch.Tensor, weight: torch.Tensor, gain: float) -> torch.Tensor:
            return x @ weight.t() * gain
        def setup(ctx, inputs, output):
            ctx.save_for_backward(*inputs[:2])
            ctx.gain = inputs[2]
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            return gradient @ weight * ctx.gain, (gradient.flatten(0, -2).t() @ x.flatten(0, -2)) * ctx.gain, None
        scaled_product.register_autograd(backward, setup_context=setup)
    product = torch.ops.rules_test.scaled_product

    def told(call):
        try:
            return call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        def forward(self, x):
            x = self.norm(x)
            return (x + product(torch.tanh(product(x, self.up.weight, 0.5)), self.down.weight, 2.0)).square().mean()

    LAYERS = [{"patterns": ["up.weight"]}, {"patterns": ["down.weight"], "partition_type": "row"}]
    def config(**more):
        return {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
                "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": LAYERS}, **more}}
    def train(**more):
        net = Net()
        engine, *_ = trireme.initialize(model=net, config=config(**more))
        losses = []
        for step in range(3):
            loss = engine(torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(step)))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        return losses + [p.sum().item() for p in net.parameters()]
    def plain():
        net, losses = Net(), []
        optimizer = torch.optim.SGD(net.parameters(), 0.3)
        for step in range(3):
            loss = net(torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses + [p.sum().item() for p in net.parameters()]
    seen = []
    def rule(call):
        seen.append([call.name, len(call), call.results, call.is_tensor(1), call.is_tensor(2), call.value(2), call.sizes(1)])
        last = len(call.sizes(0)) - 1
        if call.cut_dim(1) == 0:
            return {1: 0}, [last]
        if call.cut_dim(1) == 1:
            return {0: last, 1: 1}, ["sum"]
        return None
"""


class Rules(Case):
    def test_an_operator_is_refused_until_it_has_a_rule(self):
        unruled, expected, found, by_tokens, on_wholes, seen = self.on_ranks(2, _PROGRAM + """
    unruled = told(train)
    register_partition_rule("rules_test::scaled_product", rule)
    result = [unruled, plain(), train(), train(sequence_parallel=True)]
    register_partition_rule("rules_test::scaled_product", lambda call: None)
    result += [train(), seen[:2]]
""")
        self.assertIn("rules_test::scaled_product is not known to tensor parallelism", unruled)
        for way, numbers in (("by the rule", found), ("by tokens", by_tokens), ("on wholes", on_wholes)):
            for one, other in zip(numbers, expected, strict=True):
                with self.subTest(way):
                    self.assertAlmostEqual(one, other, delta=1e-5)
        self.assertEqual(seen, [["rules_test::scaled_product", 3, 1, True, False, 0.5, [16, 8]], ["rules_test::scaled_product", 3, 1, True, False, 2.0, [8, 16]]])

    def test_what_a_rule_gets_wrong_is_named(self):
        texts = self.on_ranks(2, _PROGRAM + """
    result = []
    for wrong in (lambda call: ({1: 1}, [0]), lambda call: ({1: 0}, [0]), lambda call: ({1: 0}, ["mean"]), lambda call: {1: 0}, lambda call: call.sizes(2),
                  lambda call: call.value(0), lambda call: call.cut_dim(7)):
        register_partition_rule("rules_test::scaled_product", wrong)
        result.append(told(train))
    result += [told(lambda: register_partition_rule("scaled_product", rule)), told(lambda: register_partition_rule("rules_test::scaled_product", 3))]
    register_partition_rule("rules_test::scaled_product", rule)
""")
        for text, words in zip(texts, ("has a rule that does not name the dim which is cut", "gives [2, 5, 8], which its rule does not say",
                                       "gives 'mean' for a result; expected a dim or \"sum\"", "expected None or ({argument: dim}, [dim or \"sum\"])",
                                       "argument 2 is no tensor", "argument 0 is a tensor", "rules_test::scaled_product has 3 arguments",
                                       "is no name of an operator", "expected a function of a call"), strict=True):
            with self.subTest(words):
                self.assertIn(words, text)

    def test_functions_of_a_program_run_on_slices(self):
        losses, gradients = self.on_ranks(2, _PROGRAM + """
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x ** 3
        @staticmethod
        def backward(ctx, gradient):
            return 3 * gradient * ctx.saved_tensors[0] ** 2 / (1 + gradient.norm())
    class Own(Net):
        def forward(self, x):
            return (x + self.down(Cube.apply(self.up(self.norm(x))))).square().mean()
    def step():
        own, plain = Own(), Own()
        engine, *_ = trireme.initialize(model=own, config=config())
        x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
        try:
            loss = engine(x)
            engine.backward(loss)
            plain(x).backward()
            apart = max((trireme.utils.safe_get_full_grad(p) - q.grad).norm().item() for p, q in zip(own.parameters(), plain.parameters()))
        finally:
            engine.destroy()
        return [loss.item() - plain(x).item(), apart]
    result = step()
""")
        self.assertAlmostEqual(losses, 0, delta=1e-6)
        self.assertLess(gradients, 1e-5)


if __name__ == "__main__":
    main()
