"""`static_mode`: calls of modules of other stages do not run where an earlier one stands for them, and losses,
gradients and weights keep the bits of one process; what cannot stand runs."""
from harness import RankServer, main
from smp_programs import Case
from smp_random import PROGRAMS

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import

_NET = """
    import collections

    class Block(nn.Module):
        '''Blocks that get and give tuples and dicts, as those of transformers do.'''
        def __init__(self, index):
            super().__init__()
            self.index, self.norm, self.out = index, nn.LayerNorm(8), nn.Linear(16, 8)
            self.hidden, self.dropout = nn.Linear(8, 16), nn.Dropout(0.25)
        def inner(self, x):
            return self.dropout(F.relu(self.hidden(self.norm(x))))
        def forward(self, x, positions, mask=None, flags={}):
            cos, sin = positions
            y = self.inner(x * cos + sin)
            if mask is not None: y = y * mask
            return {"x": x + self.out(y), "all": (x, self.index)} if flags.get("dict") else (x + self.out(y), None)

    class Net(nn.Module):
        def __init__(self, make=Block, count=6):
            super().__init__()
            self.embed, self.blocks, self.head = nn.Linear(8, 8), nn.ModuleList([make(n) for n in range(count)]), nn.Linear(8, 4)
        def call(self, block, x, positions):
            found = block(x, positions, flags={"dict": block.index % 2 == 0})
            return found["x"] if isinstance(found, dict) else found[0]
        def after(self, x):
            return self.head(x)
        def forward(self, x, y):
            positions = torch.cos(torch.arange(8.0)), torch.sin(torch.arange(8.0))
            x = self.embed(x)
            for block in self.blocks:
                x = self.call(block, x, positions)
            return F.cross_entropy(self.after(x), y)

    def partition(net, cuts=None):
        for n, block in enumerate(net.blocks):
            smp.set_partition(block, min(n * smp.pp_size() // len(net.blocks), smp.pp_size() - 1))
        smp.set_partition(net.head, smp.pp_size() - 1)
        return net

    def batches(count, size=8):
        g = torch.Generator().manual_seed(5)
        return [(torch.randn(size, 8, generator=g), torch.randint(4, (size,), generator=g)) for _ in range(count)]

    def start(**options):
        begin(auto_partition=False, default_partition=0, **options)
        torch.manual_seed(3)

    def spared():
        return trained.model.engine("spared").core.counters()["spared"] if smp.pp_size() > 1 else None
"""

_ORDERS = ("interleaved", "simple", "sequential")


class StaticMode(Case):
    def compare(self, text, stages=(2, 3), orders=("interleaved",), spares=True):
        """The program's [result, spared] on stages, and in one process."""
        alone = self.ran(1, _NET + text.replace("OPTIONS", ""))[0]
        for count in stages:
            for order in orders:
                with self.subTest(stages=count, order=order):
                    found, spared = self.ran(count, _NET + text.replace("OPTIONS", f"static_mode=True, pipeline={order!r}"))
                    self.assertEqual(found, alone)
                    if spares is not None:
                        self.assertEqual(spared > 0, spares, spared)

    def test_calls_stand_and_bits_stay_under_every_schedule(self):
        self.compare("""
    start(OPTIONS)
    result = [trained(partition(Net()), batches(4), steps=4)[:2], spared()]
""", orders=_ORDERS)

    def test_a_step_without_the_mode_spares_nothing(self):
        self.assertEqual(self.ran(2, _NET + """
    start()
    trained(partition(Net()), batches(3), steps=3)
    result = spared()
"""), 0)

    def test_what_a_call_leaves_or_changes_makes_it_run(self):
        for name, change in {
            "an attribute": ("self.kept = y", "x + net.blocks[-2].kept.mean(-1, keepdim=True)"),
            "a loss beside": ("self.kept = y.square().mean()", "x + sum(block.kept for block in self.blocks)"),
            "a list": ("kept.append(y.mean())", "x + sum(kept.pop() for _ in self.blocks)"),
        }.items():
            with self.subTest(name):
                self.compare(f"""
    start(OPTIONS)
    kept = []
    class Leaves(Block):
        def inner(self, x):
            y = super().inner(x)
            {change[0]}
            return y
    class Uses(Net):
        def after(self, x):
            net = self
            return self.head({change[1]})
    result = [trained(partition(Uses(Leaves)), batches(4), steps=4)[:2], spared()]
""", stages=(2,))

    def test_what_tells_calls_apart_and_what_they_do_beside_operators(self):
        for name, (inner, begin) in {
            "numbers whose hashes are equal": ("super().inner(torch.softmax(x, net.number))", "x"),
            "a number of an input": ("seen.append(int(keep.sum())) or super().inner(x)", "x * (seen or [1.0])[-1]"),
            "a number that is read without an operator": ("seen.append(keep.tolist()[0]) or super().inner(x)", "x * (seen or [1.0])[-1]"),
            "a random number": ("super().inner(x) * (1.5 if torch.rand([]).item() < 0.5 else 0.5)", "x"),
            "an attribute": ("setattr(self, 'scale', 0.1 * net.number) or super().inner(x)", "x * getattr(net.blocks[-2], 'scale', 1.0)"),
            "an argument": ("flags.__setitem__('n', flags.get('n', 0) + 1) or super().inner(x)", "x * flags.get('n', 1)"),
            "a part in another mode": ("super().inner(x)", "x"),
        }.items():
            with self.subTest(name):
                self.compare(f"""
    start(OPTIONS)
    seen = []
    class Does(Block):
        def inner(self, x):
            keep, flags = net.keep, net.flags
            return {inner}
        def forward(self, x, positions, number, flags):
            return x + self.out(self.inner(x)), None
    class Uses(Net):
        number, flags, calls = -1, {{}}, 0
        def call(self, block, x, positions):
            return block(x, positions, self.number, self.flags)[0]
        def forward(self, x, y):
            self.__dict__["calls"] = self.calls + 1
            self.__dict__["number"] = -1 - (self.calls + self.calls // 3) % 2
            self.keep = (x[0] > 0).float() + self.calls
            if {name.startswith("a part")}: self.blocks[-2].dropout.train(self.calls % 2 == 0)
            flags = self.flags
            return super().forward({begin}, y)  # by what the micro-batch before has left
    net = Uses(Does)
    result = [trained(partition(net), batches(4), steps=4)[:2], spared()]
""", stages=(2,), orders=("sequential",), spares=None)

    def test_a_buffer_that_is_written_makes_it_run(self):
        self.compare("""
    start(OPTIONS)
    class Counts(Block):
        def __init__(self, index):
            super().__init__(index)
            self.register_buffer("mean", torch.zeros(8))
            self.batch_norm = nn.BatchNorm1d(8)
        def inner(self, x):
            with torch.no_grad(): self.mean.mul_(0.5).add_(x.mean(0))
            return super().inner(self.batch_norm(x) + self.mean)
    result = [trained(partition(Net(Counts)), batches(4), steps=4)[:2], spared()]
""", stages=(2,))

    def test_frozen_and_tied_weights_autocast_regions_and_sizes(self):
        programs = {
            "frozen": """
    net = Net()
    for block in net.blocks: block.hidden.requires_grad_(False)
    result = [trained(partition(net), batches(4), steps=4)[:2], spared()]
""",
            "sizes": """
    result = [trained(partition(Net()), [*batches(2), *batches(2, 4), *batches(1)], steps=5)[:2], spared()]
""",
            "tied": """
    class Tied(Net):
        def after(self, x): return F.linear(x, self.embed.weight[:4]) + self.head(F.linear(x, self.blocks[-1].hidden.weight[:8]))
        def call(self, block, x, positions): return super().call(block, x + F.linear(x, self.blocks[-1].hidden.weight[8:]) if block.index == 1 else x, positions)
    result = [trained(partition(Tied()), batches(4), steps=4)[:2], spared()]
""",
            "shared": """
    class Twice(Net):
        def call(self, block, x, positions):
            x = super().call(self.blocks[-1], x, positions) if block.index == 2 else x
            return super().call(block, x, positions)
    result = [trained(partition(Twice()), batches(4), steps=4)[:2], spared()]
""",
            "autocast": """
    class Half(Block):
        def inner(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().inner(x).float()
    result = [trained(partition(Net(Half)), batches(4), steps=4)[:2], spared()]
""",
            "regions inside": """
    class Region(Block):
        def inner(self, x): return torch.utils.checkpoint.checkpoint(super().inner, x, use_reentrant=False)
    result = [trained(partition(Net(Region)), batches(4), steps=4)[:2], spared()]
""",
            "regions around": """
    class Around(Net):
        def call(self, block, x, positions):
            return torch.utils.checkpoint.checkpoint(super().call, block, x, positions, use_reentrant=False)
    result = [trained(partition(Around()), batches(4), steps=4)[:2], spared()]
""",
            "in place": """
    class InPlace(Block):
        def inner(self, x): return F.relu_(super().inner(x) * 1.5)
    result = [trained(partition(Net(InPlace)), batches(4), steps=4)[:2], spared()]
""",
            "values": """
    class Values(Block):
        def inner(self, x): return super().inner(x) * (1.5 if x.mean().item() > 0 else 0.5)
    result = [trained(partition(Net(lambda n: Values(n) if n == 4 else Block(n))), batches(4), steps=4)[:2], spared()]
""",
        }
        for name, program in programs.items():
            with self.subTest(name):
                self.compare("\n    start(OPTIONS)" + program, stages=(2,))

    def test_what_is_used_now_and_then(self):
        for name, change in {
            "a weight that travels": "x = x * (self.blocks[-1].norm.weight if self.number % 2 else 1.5) if block.index == 1 else x",
            "a tensor that is no argument": "self.see(block, x)",
            "a weight that is frozen later": "self.blocks[-1].hidden.requires_grad_(self.number < 13)",
        }.items():
            with self.subTest(name):
                self.compare(f"""
    start(OPTIONS)
    class Extra(Block):
        extra = None
        def inner(self, x): return super().inner(x) if self.extra is None else super().inner(x + self.extra)
    class Now(Net):
        number, beside = 0, 0.0
        def see(self, block, x):  # which stage 0 uses now and then, between two stages' uses
            if block.index == 4: self.blocks[5].extra = x
            if block.index == 5: self.beside = torch.tanh(self.embed(block.extra)).mean() if self.number % 2 else 0.0
        def after(self, x): return super().after(x) + self.beside
        def call(self, block, x, positions):
            self.number += block.index == 0
            {change}
            return super().call(block, x, positions)
    result = [trained(partition(Now(Extra)), batches(6), steps=6)[:2], spared()]
""", stages=(2,), orders=("sequential",))

    def test_modes_of_training_and_gradients_that_change(self):
        self.compare("""
    start(OPTIONS)
    net = partition(Net())
    model = trained.model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    @smp.step
    def train(x, y):
        loss = model(x, y)
        model.backward(loss)
        return loss
    @smp.step
    def evaluate(x, y):
        return model(x, y)
    losses = []
    for number, (x, y) in enumerate(batches(8)):
        optimizer.zero_grad()
        losses.append(train(x, y).reduce_mean().item())
        optimizer.step()
        if number % 3 == 2:
            model.eval()
            with torch.no_grad(): losses.append(evaluate(x, y).reduce_mean().item())
            model.train()
        if number == 4: net.blocks[-1].hidden.train(False)
    result = [losses, spared()]
""", stages=(2,))

    def test_a_module_that_breaks_the_promise_is_told_on_every_stage(self):
        for name, change in {"an operator": "super().inner(x).sin() if len(calls) > 13 else super().inner(x)",
                             "another stage": "super().inner(x + (first if len(calls) % 2 else x))"}.items():
            found = self.ran(2, _NET + f"""
    start(static_mode=True, pipeline="sequential")
    calls = []
    class Other(Block):
        def inner(self, x):
            global first
            if self.index == 4: calls.append(0)
            if self.index == 0: first = x
            return {change} if self.index == 4 else super().inner(x)
    text = told(lambda: trained(partition(Net(Other)), batches(6), steps=6))
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps(text))]
""")
            for text in found:
                with self.subTest(name):
                    self.assertIn("every stage has to run the same operators", text or "")

    def test_random_programs_have_the_bits_of_one_process(self):
        for stages, pipeline in ((3, "interleaved"), (2, "simple")):
            text = PROGRAMS + f"""
    begin(pipeline={pipeline!r}, auto_partition=False, default_partition=0, STATIC)
    result = [[seed, program(seed)] for seed in range(7000, 7006)]
"""
            alone, found = self.ran(1, text.replace("STATIC", "")), self.ran(stages, text.replace("STATIC", "static_mode=True"))
            for (seed, expected), (_, own) in zip(alone, found):
                with self.subTest(seed, stages=stages, pipeline=pipeline):
                    self.assertEqual(own, expected)


if __name__ == "__main__":
    main()
