"""Programs that come back to a stage: micro-batches take turns from the second step on, or run one after the other
where the program keeps something in Python. Losses, gradients and weights have the bits of one process."""
import json
import time

from harness import RankServer, main
from smp_programs import Case

RankServer.imports = ("torch._dynamo", "numpy")  # the first: optimizers of torch import it

_BEGIN = """
    import contextvars, random, threading
    import numpy
    from torch.utils.checkpoint import checkpoint
    begin()
    random.seed(3), numpy.random.seed(3)
    class Net(nn.Module):
        '''Its layers run twice.'''
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.head = nn.Linear(8, 1)
            self.begin()
        def begin(self):
            pass
        def twice(self, x):
            for layer in [*self.layers, *self.layers]:
                x = torch.tanh(layer(x))
            return x
        def forward(self, x):
            return self.head(self.twice(x))
"""
_END = """
    net = NET
    batches = [(torch.randn(8, 8), torch.randn(8, 1)) for _ in range(4)]
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    @smp.step
    def train_step(x, y):
        loss = F.mse_loss(model(x).float(), y)
        model.backward(loss)
        return loss
    found, orders = [], []
    for number, (x, y) in enumerate(batches):
        net.number = number
        optimizer.zero_grad()
        losses = train_step(x, y)
        found.append([[loss.item() for loss in losses.outputs], gradients(model)])
        optimizer.clip_master_grads(0.5)
        optimizer.step()
        orders.append(model.engine("").core.pipeline)
    result = [found, weights(model), orders]
"""


class Turns(Case):
    def compared(self, net="Net()", more="", stages=2, order="interleaved"):
        """`order` is that of all steps but the first."""
        text = _BEGIN + more + _END.replace("NET", net)
        found = self.assert_bits_of_one_process(text, stages)
        self.assertEqual(found[2], ["sequential"] + [order] * 3)

    def compared_state(self, begin, forward, before=""):
        """A program that keeps something, so that one micro-batch runs after the other."""
        self.compared("Keeps()", order="sequential", more=before + f"""
    class Keeps(Net):
        def begin(self):
            {begin}
        def forward(self, x):
            {forward}
""")

    def test_layers_that_run_twice(self):
        for stages in (2, 3):
            with self.subTest(stages=stages):
                self.compared(stages=stages)

    def test_autocast_checkpoints_and_dropout_in_turns(self):
        self.compared("Mixed()", stages=3, more="""
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.back = nn.Parameter(torch.ones(8))
        def block(self, layer, x):
            return F.dropout(torch.tanh(layer(x)), 0.2)
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                x = x * self.back
                for layer in self.layers:
                    x = x + checkpoint(self.block, layer, x, use_reentrant=False)
            return (x.float() * self.back).sum(1, keepdim=True)
""")

    def test_weights_that_autocast_casts_once_for_several_turns(self):
        for stages in (2, 3):
            for options in ("", ", cache_enabled=False"):
                with self.subTest(stages=stages, options=options):
                    self.compared("Recurs()", stages=stages, more=f"""
    class Recurs(Net):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16{options}):
                for _ in range(3):
                    x = x + self.twice(x)
                    x = x * 0.9 if x.sum().item() > 0 else x
            with torch.autocast("cpu", torch.bfloat16{options}):
                return self.head(self.twice(x))
""")

    def test_recursion_that_reads_a_value(self):
        self.compared("Tree()", stages=3, more="""
    class Tree(Net):
        def of(self, x, depth):
            if depth == 0:
                return torch.tanh(self.layers[2](self.layers[0](x)))
            return torch.tanh(self.layers[3](self.of(x * 0.9, depth - 1) + self.layers[1](self.of(x + 0.1, depth - 1))))
        def forward(self, x):
            return self.head(self.of(x, 2)) * (1 + 0.1 * x[0, 0].item())
""")

    def test_contexts_of_a_micro_batch(self):
        self.compared("Contexts()", more="""
    factor = contextvars.ContextVar("factor", default=1.0)
    class Contexts(Net):
        def forward(self, x):
            token = factor.set(0.5 + abs(x[0, 0].item()))
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            try:
                with torch.no_grad():
                    still = self.twice(x)
                assert not still.requires_grad
                x = self.twice(x) * factor.get() + still
                assert x.requires_grad and torch.zeros(()).dtype == torch.float64
            finally:
                torch.set_default_dtype(before)
                factor.reset(token)
            assert torch.zeros(()).dtype == torch.float32
            return self.head(x) * factor.get()
""")

    def test_a_choice_of_attention_is_of_a_micro_batch(self):
        self.compared("Chooses()", more="""
    class Chooses(Net):
        def forward(self, x):
            x = self.twice(x)[None, None]
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                x = F.scaled_dot_product_attention(x, self.layers[0](x), self.layers[3](x))
                assert not torch.backends.cuda.flash_sdp_enabled()
            assert torch.backends.cuda.flash_sdp_enabled()
            return self.head(x[0, 0])
""")

    def test_numbers_on_modules(self):
        for begin, forward in (("self.count = 0", "self.count += 1; return self.head(self.twice(x)) * (1 + 0.1 * self.count)"),
                               ("self.scale = 1.0", "self.scale = x.abs().mean().item(); return self.head(self.twice(x)) * self.scale")):
            with self.subTest(begin):
                self.compared_state(begin, forward)

    def test_an_attribute_that_is_set_for_a_while(self):
        self.compared_state("self.scale = 1.0", """self.scale = 0.5 + abs(x[0, 0].item())
            try:
                x = self.twice(x) * self.scale
            finally:
                self.scale = 1.0
            return self.head(x)""")

    def test_a_list_that_blocks_fill(self):
        self.compared_state("self.seen = []", """self.seen.clear()
            for layer in [*self.layers, *self.layers]:
                x = torch.tanh(layer(x))
                self.seen.append(x.square().mean())
            return self.head(x) + 0.1 * sum(self.seen)""")

    def test_generators_of_python_and_numpy(self):
        for draw in ("random.random()", "float(numpy.random.rand())"):
            with self.subTest(draw):
                self.compared_state("pass", f"x = self.twice(x) * {draw}; return self.head(self.twice(x) * {draw})")

    def test_a_generator_of_the_model(self):
        for make, draw in (("torch.Generator().manual_seed(3)", "torch.randn((), generator=self.g)"), ("random.Random(3)", "self.g.random()"),
                           ("numpy.random.default_rng(3)", "float(self.g.random())")):
            with self.subTest(make):
                self.compared_state(f"self.g = {make}", f"x = self.twice(x) * {draw} + float(x.sum() > 0); return self.head(self.twice(x) * {draw})")

    def test_parameters_that_functional_call_sets(self):
        self.compared_state("pass", """for factor in (0.5, 1.5):
                for layer in self.layers:
                    x = torch.tanh(torch.func.functional_call(layer, {name: value * factor for name, value in layer.named_parameters()}, (x,)))
            return self.head(x)""")

    def test_a_cache_of_parametrized_weights(self):
        self.compared_state("torch.nn.utils.parametrize.register_parametrization(self.layers[0], 'weight', Symmetric())", """with cached():
                return self.head(self.twice(x))""", before="""
    from torch.nn.utils.parametrize import cached
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).t()
""")

    def test_state_that_a_later_step_begins_to_keep_is_refused(self):
        told = self.ran(2, _BEGIN + """
    class Later(Net):
        count = number = 0
        def forward(self, x):
            if self.number == 2:
                self.count += 1
            return self.head(self.twice(x)) * (1 + self.count)
""" + _END.replace("NET", "Later()").replace("losses = train_step(x, y)", """losses = told(lambda: train_step(x, y))
        if isinstance(losses, str):
            break""").replace("result = [found, weights(model), orders]", "result = [number, losses]"))
        self.assertEqual(told[0], 2)
        self.assertIn("changes the attribute 'count' of the model, which none has done so far", told[1])
        self.assertIn('write "pipeline": "sequential"', told[1])

    def test_a_mistake_of_one_rank_is_told_on_the_other(self):
        told = self.ran(2, _BEGIN + """
    class Fails(Net):
        number = 0
        def forward(self, x):
            x = self.twice(x)
            if self.number == 2 and smp.rank() == 1:
                raise ValueError("of the program")
            return self.head(self.twice(x))
""" + _END.replace("NET", "Fails()").replace("losses = train_step(x, y)", """losses = told(lambda: train_step(x, y))
        if isinstance(losses, str):
            break""").replace("result = [found, weights(model), orders]", "result = [number, losses]"))
        self.assertEqual(told[0], 2)
        self.assertIn("step failed in stage 1, forward, micro-batch", told[1])
        self.assertIn("ValueError: of the program", told[1])

    def test_ctrl_c_ends_a_forward_pass_in_its_thread(self):
        for waits, heard_in in (("while True: pass", "forward"), ("time.sleep(60)", "run")):
            with self.subTest(waits):
                began = time.monotonic()
                self.ran(2, _BEGIN + f"""
    import signal, subprocess, time, traceback
    signal.signal(signal.SIGINT, signal.default_int_handler)
    class Waits(Net):
        number = 0
        def forward(self, x):
            x = self.twice(x)
            if self.number == 2:
                assert threading.current_thread() is not threading.main_thread()
                subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -INT {{os.getpid()}}"])
                self.__dict__["began"] = time.monotonic()
                {waits}
            return self.head(x)
""" + _END.replace("NET", "Waits()").replace("losses = train_step(x, y)", """try:
            losses = train_step(x, y)
        except KeyboardInterrupt as interruption:
            frames = [frame.name for frame in traceback.extract_tb(interruption.__traceback__)]
            with open(f"{folder}/heard_{smp.rank()}", "w") as file:
                json.dump([number, time.monotonic() - net.began, frames], file)
            break""").replace("result = [found, weights(model), orders]", "result = None"))
                self.assertLess(time.monotonic() - began, 30)
                for rank in range(2):
                    number, seconds, frames = json.loads((self.folder / f"heard_{rank}").read_text())
                    self.assertEqual(number, 2)
                    self.assertLess(seconds, 3)
                    self.assertIn(heard_in, frames)

    def test_what_threads_keep_apart_is_explained(self):
        notes = self.ran(2, _BEGIN + """
    local = threading.local()
    local.scale = 2.0
    class Local(Net):
        def forward(self, x):
            return self.head(self.twice(x)) * local.scale
    net = Local()
    model = smp.DistributedModel(net)
    @smp.step
    def train_step(x):
        loss = model(x).mean()
        model.backward(loss)
        return loss
    train_step(torch.randn(8, 8))
    try:
        result = model.zero_grad() or train_step(torch.randn(8, 8)).reduce_mean().item()
    except Exception as error:
        result = [str(error), *getattr(error, "__notes__", [])]
""")
        self.assertIn("threading.local", " ".join(notes))
        self.assertIn('"pipeline": "sequential" runs all in one', " ".join(notes))


if __name__ == "__main__":
    main()
