"""Habits of programs inside of smp's step functions: losses, gradients and weights have the bits of one process."""
from harness import RankServer, main
from smp_programs import Case

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import


class Habits(Case):
    _BEGIN = """
    begin()
    class Two(Mlp):
        def forward(self, x):
            early = self.layers[:4](x)
            return early, self.layers[4:](early)
"""
    _END = """
    net, batches = NET, mlp_batches()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.125))
    @smp.step
    def train_step(x, y):
        STEP
    found = []
    for x, y in batches:
        optimizer.zero_grad()
        losses = train_step(x, y)
        found.append([[loss.item() for loss in losses.outputs], gradients(model)])
        optimizer.step()
    result = [found, weights(model)]
"""

    def compared(self, step, net="Two(0.1)", more=""):
        step = "\n".join("    " * 2 + line for line in step.strip().splitlines()).lstrip()
        return self.assert_bits_of_one_process(self._BEGIN + more + self._END.replace("STEP", step).replace("NET", net))

    def test_two_losses_and_two_backward_passes(self):
        for keep in ("", ", retain_graph=True"):
            with self.subTest(keep):
                self.compared(f"""
early, logits = model(x)
model.backward(early.square().mean(){keep})
loss = F.cross_entropy(logits, y)
model.backward(loss)
return loss
""")

    def test_a_loss_of_both_stages(self):
        self.compared("""
early, logits = model(x)
loss = F.cross_entropy(logits, y) + 0.5 * early.abs().mean() + (logits.mean() - early.mean()).square()
loss.backward()
return loss
""")

    def test_hooks_and_kept_gradients(self):
        self.compared("""
early, logits = model(x)
early.register_hook(lambda gradient: gradient * 2)
logits.retain_grad()
loss = F.cross_entropy(logits, y)
model.backward(loss)
return loss
""")

    def test_hooks_that_the_model_hangs_on_tensors(self):
        hooked = """
    class Hooked(Two):
        def forward(self, x):
            early = self.layers[:4](x)
            READ
            early.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            early.retain_grad()
            late = self.layers[4:](early)
            late.register_hook(lambda gradient: gradient * 3)
            return early, late + early.mean()
"""
        for read in ("pass", "assert early.sum().item() > -1e9"):
            with self.subTest(read):
                self.compared("""
_, logits = model(x)
loss = F.cross_entropy(logits, y)
model.backward(loss)
return loss
""", net="Hooked(0.1)", more=hooked.replace("READ", read))

    def test_a_backward_pass_that_the_model_begins(self):
        for call in ("model.backward(early.square().mean())", "early.square().mean().backward()"):
            with self.subTest(call):
                self.compared("""
_, logits = model(x)
loss = F.cross_entropy(logits, y)
model.backward(loss)
return loss
""", net="Begins(0.1)", more=f"""
    class Begins(Two):
        def forward(self, x):
            early = self.layers[:4](x)
            {call}
            return early, self.layers[4:](early)
""")

    def test_a_mixture_of_experts_on_both_stages(self):
        self.compared("""
_, logits = model(x)
loss = F.cross_entropy(logits, y)
model.backward(loss)
return loss
""", net="Experts()", more="""
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(6, 4)
            self.experts = nn.ModuleList([nn.Linear(6, 16) for _ in range(4)])
            self.head = nn.Linear(16, 3)
        def forward(self, x):
            weights, choice = self.gate(x).softmax(-1).topk(1)
            found = torch.zeros(x.shape[0], 16)
            for index, expert in enumerate(self.experts):
                rows = (choice[:, 0] == index).nonzero()[:, 0]
                found = found.index_add(0, rows, expert(x[rows]) * weights[rows])
            return found, self.head(found)
""")

    def test_an_average_that_a_module_keeps(self):
        self.compared("""
early, logits = model(x)
kept.mean = early.detach().mean(0) if kept.mean is None else kept.mean * 0.9 + early.detach().mean(0) * 0.1
loss = F.cross_entropy(logits, y) + 0.1 * (early - kept.mean).square().mean()
model.backward(loss)
return loss
""", more="""
    class kept:
        mean = None
""")

    def test_writes_in_place(self):
        self.compared("""
early, logits = model(x)
logits = logits.clone()
logits[:, 0] += early[:, 1]
early = early * 1.0
early.mul_(0.5).add_(logits.mean())
loss = F.cross_entropy(logits, y) + early.mean()
model.backward(loss)
return loss
""")


if __name__ == "__main__":
    main()
