"""torch.utils.checkpoint and smp.checkpoint inside of smp.step: losses and gradients have the bits of one process, and
those of the same program that keeps its activations; less is kept."""
from harness import RankServer, main
from smp_programs import Case

RankServer.imports = ("transformers.models.gpt2.modeling_gpt2", "torch._dynamo")  # which optimizers of torch import

_LAYERS = """
    import functools
    import torch.utils.checkpoint
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential
    begin(auto_partition=False, default_partition=0)

    def placed(net, layers):
        for index in layers if smp.pp_size() > 1 else ():
            smp.set_partition(net.layers[index], 1)
        return net
"""


class Bits(Case):
    def assert_bits_of_what_keeps_activations(self, text, kept="run(function, *args)", checkpointed="checkpoint(function, *args, use_reentrant=False)", stages=2):
        """`text` calls `again(function, *args)`."""
        def with_again(body):
            return _LAYERS + f"""
    def run(function, *args):
        return function(*args)
    def again(function, *args):
        again.calls += 1
        return {body}
    again.calls = 0
{text}
    assert again.calls
"""

        found = self.assert_bits_of_one_process(with_again(checkpointed), stages)
        self.assertEqual(found[:2], self.ran(stages, with_again(kept))[:2])
        return found

    def test_every_layer_of_gpt2_by_transformers(self):
        self.skip_where_mkl_rounds_otherwise()
        text = """
    begin()
    net = gpt2(False, 0.1)
    ENABLE
    result = trained(net, ids_batches(), loss_of=causal_loss)
"""
        plain = self.ran(2, text.replace("ENABLE", ""))
        for is_reentrant in (False, True):
            with self.subTest(is_reentrant):
                found = self.assert_bits_of_one_process(
                    text.replace("ENABLE", f"net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={{'use_reentrant': {is_reentrant}}})"))
                self.assertEqual(found, plain)
        self.assertEqual(plain[2:], ["interleaved", [0, 1]])

    def test_sequential_of_plain_pytorch(self):
        for is_reentrant in (False, True):
            with self.subTest(is_reentrant):
                found = self.ran(2, _LAYERS + f"""
    class Parts(Mlp):
        def forward(self, x, y):
            return F.cross_entropy(checkpoint_sequential(self.layers, 3, x, use_reentrant={is_reentrant}), y)
    net, batches = placed(Parts(), range(3, 8)), [(x.requires_grad_(), y) for x, y in mlp_batches()]
    expected = plain(net, batches)
    net.zero_grad()
    result = [trained(net, [(x.detach(), y) for x, y in batches])[0][0], expected]
""")
                self.assertEqual(*found)

    def test_dropout_in_a_region_of_each_stage(self):
        found = self.assert_bits_of_what_keeps_activations("""
    class Parts(Mlp):
        def forward(self, x, y):
            h = again(self.layers[:4], x)
            return F.cross_entropy(again(self.layers[4:], F.dropout(h, 0.2)), y)
    result = trained(placed(Parts(0.3), range(4, 8)), mlp_batches())
""")
        self.assertEqual(found[2:], ["interleaved", [0, 1]])

    def test_a_region_over_two_stages(self):
        self.assert_bits_of_what_keeps_activations("""
    class Parts(Mlp):
        def forward(self, x, y):
            h = self.layers[0](x)
            def part(x, h):
                return F.dropout(self.layers[3:7](F.dropout(F.dropout(h, 0.1) * self.layers[1:3](h), 0.2)), 0.1) + h
            return F.cross_entropy(self.layers[7](again(part, x, h) + h), y)
    result = trained(placed(Parts(0.3), (3, 4, 5)), mlp_batches())
""")

    def test_a_region_over_three_stages_that_come_again(self):
        self.assert_bits_of_what_keeps_activations("""
    class Parts(Mlp):
        def forward(self, x, y):
            def part(x):
                h = self.layers[:3](x)
                for layer in (3, 5, 3):
                    h = h + F.dropout(self.layers[layer](torch.tanh(h)), 0.25)
                return h
            return F.cross_entropy(self.layers[7](again(part, x)), y)
    net = Parts(0.3)
    for layer, stage in ((3, 1), (5, 2)) if smp.pp_size() > 1 else ():
        smp.set_partition(net.layers[layer], stage)
    result = trained(net, mlp_batches())
""", stages=3)

    def test_values_that_are_read_in_a_region(self):
        self.assert_bits_of_what_keeps_activations("""
    class Parts(Mlp):
        taken = 0
        def forward(self, x, y):
            h = self.layers[:3](x)
            def part(h):
                late = self.layers[3:5](h)
                if h.mean().item() > float(late.std()) - 2.0:
                    Parts.taken += 1
                    late = late * h.sum().item()
                early = h[h > 0.1]
                return late + late[late > 0].mean() * early.square().mean()
            return F.cross_entropy(self.layers[5:](again(part, h)), y)
    result = trained(placed(Parts(0.1), range(3, 8)), mlp_batches())
    assert Parts.taken
""")

    def test_regions_in_regions(self):
        self.assert_bits_of_what_keeps_activations("""
    class Parts(Mlp):
        def forward(self, x, y):
            h = self.layers[:3](x)
            def inner(h):
                return self.layers[3:5](F.dropout(h, 0.3) * h.max().item())
            def outer(h):
                return F.dropout(again(inner, F.dropout(h, 0.2)), 0.1) + again(self.layers[5:7], h) + h
            return F.cross_entropy(self.layers[7](again(outer, h)), y)
    result = trained(placed(Parts(0.1), (3, 4)), mlp_batches())
""")

    def test_writes_in_a_region_and_a_custom_function(self):
        self.assert_bits_of_what_keeps_activations("""
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a * b
        @staticmethod
        def backward(ctx, gradient):
            a, b = ctx.saved_tensors
            return gradient * b, gradient * a
    class Parts(Mlp):
        def forward(self, x, y):
            h = self.layers[:3](x)
            def part(h):
                late = torch.tanh(self.layers[3](h))
                room = torch.zeros(h.shape[0], 2, h.shape[1])
                room[:, 0] = late
                room[:, 1] += h.exp()
                late = late.mul(2).add_(h).view(-1).view(h.shape)
                late[h > 0.5] = 0.25
                return Product.apply(Product.apply(h, late), room.sum(1))
            return F.cross_entropy(self.layers[5:](again(part, h)), y)
    result = trained(placed(Parts(0.1), range(3, 8)), mlp_batches())
""")

    def test_names_of_smp(self):
        calls = ["smp.checkpoint(self.layers[:4], x)", "smp.checkpoint(self.layers[:4], input=x, preserve_rng_state=False)",
                 *(f"smp.checkpoint_sequential(self.layers[:4], x, strategy='{strategy}')" for strategy in ("each", "contiguous", "group_2")), "self.layers[:4](x)"]
        marked = ["smp.set_activation_checkpointing(net)", "smp.set_activation_checkpointing(net.layers, strategy='contiguous')",
                  "for layer in net.layers: smp.set_activation_checkpointing(layer)"]
        text = _LAYERS + """
    class Parts(Mlp):
        def forward(self, x, y):
            return F.cross_entropy(self.layers[4:](CALL), y) if CALL_FIRST else super().forward(x, y)
    net = placed(Parts(0.3), (1, 2, *range(5, 8)))
    MARK
    result = trained(net, mlp_batches())
"""
        def program(call, mark):
            return text.replace("CALL_FIRST", str(bool(call))).replace("CALL", call or "x").replace("MARK", mark or "pass")

        expected = self.ran(2, program("", ""))
        for call, mark in (*((call, "") for call in calls), *(("", mark) for mark in marked)):
            with self.subTest(call=call, mark=mark):
                self.assertEqual(self.assert_bits_of_one_process(program(call, mark)), expected)


class OnTheHost(Case):
    _TEXT = """
    begin(OPTIONS)
    from trireme.smp import offload
    moved = []
    class Counted(offload.Waiting):
        def __init__(self, tensor):
            moved.append(tensor.shape)
            super().__init__(tensor)
    offload.Waiting = Counted
    DEVICE
    net = gpt2(False, 0.1)
    net.gradient_checkpointing_enable()
    result = [*trained(net, ids_batches(1), steps=1, loss_of=causal_loss), len(moved)]
"""

    def test_activations_that_are_there_stay(self):
        for ranks in (1, 2):
            text = self._TEXT.replace("DEVICE", "")
            plain = self.ran(ranks, text.replace("OPTIONS", ""))
            self.assertEqual(self.ran(ranks, text.replace("OPTIONS", "offload_activations=True, activation_loading_horizon=2")), plain)
            self.assertEqual(plain[-1], 0)

    def test_is_refused_on_devices_where_ranks_have_the_model_together(self):
        text = """
    begin(offload_activations=True)
    from trireme.smp import offload
    offload.local_device = lambda: torch.device("cuda:0")
    result = [told(lambda: type(smp.DistributedModel(Mlp())).__name__), smp.rank()]
"""
        self.assertEqual(self.ran(1, text)[0], "DistributedModel")
        self.assertEqual(self.ran(2, text)[0], "UnsupportedError: smp.DistributedModel: `offload_activations` = true on cuda:0 with 2 ranks that have the model together is not "
                                               "there yet: a stage does not move another one's activations; leave it out, or give 1 for `pipeline_parallel_degree` and "
                                               "`tensor_parallel_degree`")

    def test_others_go_there_and_come_back_with_their_bits(self):
        """As if the activations were on a device."""
        text = self._TEXT.replace("DEVICE", "offload._is_elsewhere = lambda tensor: True")
        plain, found = (self.ran(1, text.replace("OPTIONS", options)) for options in ("", "offload_activations=True"))
        self.assertEqual(found[:-1], plain[:-1])
        # in four micro-batches two layers keep their argument
        self.assertEqual([plain[-1], found[-1]], [0, 8])


class Written(Case):
    """Tensors that the function writes besides its results are written twice, in one process's order."""

    _NORM = """
    class Normed(Mlp):
        def __init__(self):
            super().__init__()
            self.norm, self.late = nn.BatchNorm1d(16), nn.BatchNorm1d(16)
        def forward(self, x, y):
            h = checkpoint(lambda x: self.norm(self.layers[:3](x)), x, use_reentrant=False)
            h = checkpoint(lambda h: self.late(self.layers[3:6](h)), h, use_reentrant=False)
            return F.cross_entropy(self.layers[6:](h), y)
    net = placed(Normed(), range(3, 8))
    if smp.pp_size() > 1:
        smp.set_partition(net.late, 1)
"""

    def test_statistics_of_batch_norm_under_every_pipeline(self):
        for pipeline in ("interleaved", "simple", "sequential"):
            with self.subTest(pipeline):
                text = (_LAYERS + self._NORM).replace("begin(", f"begin(pipeline='{pipeline}', ")
                found = self.assert_bits_of_one_process(text + "    result = trained(net, mlp_batches(3), steps=3)")
                self.assertEqual(found[2], "sequential")

    def test_statistics_are_those_of_plain_pytorch_that_runs_one_micro_batch_after_the_other(self):
        text = _LAYERS + self._NORM + """
    batches = mlp_batches()
    import copy
    other = copy.deepcopy(net)
    plain(other, batches)
    trained(net, batches, steps=1)
    result = [weights(trained.model), {name: bits(buffer) for name, buffer in other.named_buffers()}]
"""
        found, expected = self.ran(2, text)
        self.assertEqual({name: found[name] for name in expected}, expected)

    def test_a_norm_that_is_not_trained_and_an_evaluation_before(self):
        text = _LAYERS + self._NORM + """
    STATE
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.125))
    @smp.step
    def train_step(x, y):
        loss = model(x, y)
        if torch.is_grad_enabled():
            model.backward(loss)
        return loss
    with torch.no_grad():
        train_step(*mlp_batches()[0])
    used = []
    for batch in mlp_batches(3):
        optimizer.zero_grad()
        train_step(*batch)
        used.append(model.engine("").core.pipeline)
        optimizer.step()
    result = [weights(model), used]
"""
        for state, expected in (("pass", ["sequential"] * 3), ("net.eval()", ["sequential", "interleaved", "interleaved"])):
            with self.subTest(state):
                program = text.replace("STATE", state)
                (alone, _), (found, used) = self.ran(1, program), self.ran(2, program)
                self.assertEqual(found, alone)
                self.assertEqual(used, expected)

    def test_what_begins_to_write_later_or_writes_what_every_stage_has_is_refused_on_every_rank(self):
        late = """
    model = smp.DistributedModel(net)
    net.eval()
    @smp.step
    def train_step(x, y):
        model.backward(model(x, y))
    for batch in mlp_batches():
        model.zero_grad()
        train_step(*batch)
    net.train()
    model.zero_grad()
    texts = told(lambda: train_step(*mlp_batches()[0]))
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps(texts))]
"""
        for text in self.ran(2, _LAYERS + self._NORM + late):
            self.assertIn("writes a tensor that outlives the micro-batch, which no function that runs again has done so far", text)
            self.assertIn("\"pipeline\": \"sequential\"", text)
        counter = """
    class Counting(Mlp):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(2, dtype=torch.long), persistent=False)
        def part(self, h):
            made = torch.tensor([1, 2])
            made[0] += 3
            made.add_(1)
            self.calls.view(-1)[1] += 1
            return self.layers[:3](h)
        def forward(self, x, y):
            return F.cross_entropy(self.layers[3:](checkpoint(self.part, x, use_reentrant=False)), y)
    net = placed(Counting(), range(3, 8))
    model = smp.DistributedModel(net)
    @smp.step
    def train_step(x, y):
        model.backward(model(x, y))
    texts = told(lambda: train_step(*mlp_batches()[0]))
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps(texts))]
"""
        for text in self.ran(2, _LAYERS + counter):
            self.assertIn("writes a tensor that every stage has and that was made outside of the function", str(text))
        for text in self.ran(2, _LAYERS + counter.replace("self.calls.view(-1)[1] += 1", "pass")):
            self.assertEqual(text, [None] * 4)


class Kept(Case):
    _COUNTED = _LAYERS + """
    kept, runs = [0], [0]
    def count(tensor):
        kept[0] += tensor.nbytes
        return tensor
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        def forward(self, x):
            runs[0] += 1
            return self.down(torch.tanh(self.up(x))) + x
    net = nn.Sequential(*(Layer() for _ in range(4)))
    for layer in net[2:] if smp.pp_size() > 1 else ():
        smp.set_partition(layer, 1)
    MARK
    model = smp.DistributedModel(net)
    @smp.step
    def train_step(x):
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = model(x).square().mean()
        model.backward(loss)
    train_step(torch.randn(32, 8))
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps([kept[0], runs[0]]))]
"""

    def test_a_stage_keeps_less_and_runs_its_own_layers_again_alone(self):
        plain, marked = (self.ran(2, self._COUNTED.replace("MARK", mark)) for mark in
                         ("pass", "for layer in net: smp.set_activation_checkpointing(layer)"))
        self.assertEqual([runs for _, runs in plain], [16, 16])  # 4 layers, 4 micro-batches
        self.assertEqual([runs for _, runs in marked], [24, 24])  # and 2 layers of its own again
        for (before, _), (after, _) in zip(plain, marked):
            self.assertLess(after, before / 3)


class Refused(Case):
    _TOLD = _LAYERS + """
    class Parts(Mlp):
        def forward(self, x, y):
            h = self.layers[:3](x)
            return F.cross_entropy(self.layers[3:](CALL), y)
    model = smp.DistributedModel(placed(Parts(0.1), range(3, 8)))
    @smp.step
    def train_step(x, y):
        model.backward(model(x, y))
    texts = told(lambda: train_step(*mlp_batches()[0]))
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps(texts))]
"""

    def test_what_is_not_known_to_be_right_is_refused_on_every_rank(self):
        policy = "lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts([])"
        for call, part in ((f"checkpoint(torch.relu, h, use_reentrant=False, context_fn={policy})", "with context_fn or debug inside of a step function is not there yet"),
                           ("checkpoint(torch.relu, h, use_reentrant=False, debug=True)", "with context_fn or debug inside of a step function is not there yet"),
                           *((f"checkpoint(lambda h: ({root}, h * 2)[1], h, use_reentrant=False)",
                              "return the loss, and call model.backward(loss) in the step function") for root in ("model.backward(h.sum())", "h.sum().backward()")),
                           ("smp.checkpoint(torch.relu, h)", "is no torch.nn.Module"), ("smp.checkpoint_sequential(self.layers[3:], h, 'group_0')", "expected \"each\""),
                           ("smp.checkpoint_sequential(self, h)", "is no torch.nn.Sequential")):
            with self.subTest(call):
                found = self.ran(2, self._TOLD.replace("CALL", call))
                for text in found:
                    self.assertIn(part, str(text))

    def test_a_function_that_runs_otherwise_the_second_time(self):
        found = self.ran(2, self._TOLD.replace("CALL", "checkpoint(lambda h: (h.exp() if torch._C._current_graph_task_id() == -1 else h.tanh()).mul(2).exp(), h, "
                                                       "use_reentrant=False)"))
        for text in found:
            self.assertIn("the function ran aten::tanh in the backward pass of micro-batch 0 as its operator 0 where it had run aten::exp in the forward pass", text)

    def test_a_function_that_runs_otherwise_in_a_later_step(self):
        """Its second run changes what it reads, and stages run it again at other times."""
        found = self.ran(2, _LAYERS + """
    class Parts(Mlp):
        def part(self, h):
            Parts.calls += 1
            return h.exp() if LATER else self.layers[3:](h).tanh()
        def forward(self, x, y):
            return F.cross_entropy(checkpoint(self.part, self.layers[:3](x), use_reentrant=False), y)
    Parts.calls = 0
    model = smp.DistributedModel(placed(Parts(0.1), range(3, 8)))
    @smp.step
    def train_step(x, y):
        model.backward(model(x, y))
    (x, y), = mlp_batches(1)
    train_step(x, y)
    model.zero_grad()
    texts = told(lambda: train_step(x, y))
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps([texts, Parts.calls]))]
""".replace("LATER", "Parts.calls > 5 and smp.rank() == 0"))
        for text, _ in found:
            self.assertIn("of micro-batch 1;", text)
            self.assertIn("or what a function changes that torch.utils.checkpoint runs again, at other times on each stage", text)


class AsSmp(Case):
    def test_the_module_of_smp_that_has_checkpoint(self):
        found = self.ran(1, """
    import trireme.as_smp
    trireme.as_smp.install()
    import smdistributed.modelparallel.torch as smd
    from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint, checkpoint_sequential
    result = checkpoint is smd.checkpoint is smp.checkpoint and checkpoint_sequential is smp.checkpoint_sequential
""")
        self.assertTrue(found)


if __name__ == "__main__":
    main()
