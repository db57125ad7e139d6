"""Marks, pairs of classes, queries and translations of layers that ranks share: with one rank along "tensor" nothing is
cut."""
from harness import RankServer, main
from smp_programs import Case

RankServer.imports = ("transformers.models.gpt2.modeling_gpt2", "torch._dynamo")  # which optimizers of torch import

_START = """
    from trireme.smp.nn import registry
    class Ours(smp.nn.DistributedModule):
        def __init__(self, width, depth=1):
            super().__init__()
"""


class Queries(Case):
    def test_nothing_is_distributed_with_one_rank_along_tensor(self):
        for ranks in (1, 2):
            found = self.ran(ranks, """
    begin()
    net = Cnn()
    net.conv2.bias.requires_grad_(False)
    model = smp.DistributedModel(net)
    stepping(model)(*cnn_batches()[0])
    named, buffers = dict(net.named_parameters()), dict(net.named_buffers())
    reduced = list(model.default_reducer_named_parameters())
    result = [list(model.distributed_modules()), any(map(model.is_distributed_parameter, named.values())), any(map(model.is_distributed_buffer, buffers.values())),
              any(map(model.is_scaled_batch_parameter, named.values())), any(map(model.is_scaled_batch_buffer, buffers.values())),
              list(model.scaled_batch_reducer_named_parameters()), all(named[name] is one for name, one in reduced), sorted(of_all({name: None for name, _ in reduced}))]
    result += [sorted(name for name in named if name != "conv2.bias"), len(reduced) < len(named) - 1]
""")
            with self.subTest(ranks):
                self.assertEqual(found[:7], [[], False, False, False, False, [], True])
                self.assertEqual(found[7], found[8])
                self.assertEqual(found[9], ranks > 1)

    def test_of_tensors_that_are_cut(self):
        """By a core that says so: those of one module, whatever the number of its tensors that are cut."""
        found = self.ran(1, """
    begin()
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model = smp.DistributedModel(net)
    class Core:
        home_of, stage = staticmethod(lambda tensor: 0), 0
        @staticmethod
        def is_slice(tensor):
            return tensor is net[0].weight or tensor is net[1].running_mean
    engine = model.engine("")
    whole, engine.core = engine.core, Core
    result = [[list(net).index(one) for one in model.distributed_modules()],
              [model.is_distributed_parameter(one) for one in net.parameters()], [model.is_distributed_buffer(one) for one in net.buffers()],
              [model.is_scaled_batch_parameter(one) for one in net.parameters()], [model.is_scaled_batch_buffer(one) for one in net.buffers()],
              [name for name, _ in model.default_reducer_named_parameters()], [name for name, _ in model.scaled_batch_reducer_named_parameters()]]
    engine.core = whole
""")
        self.assertEqual(found, [[0, 1], [True] + [False] * 5, [True, False, False], [True] * 4 + [False] * 2, [True] * 3, ["2.weight", "2.bias"],
                                 ["0.weight", "0.bias", "1.weight", "1.bias"]])

    def test_before_the_stages_and_of_other_tensors_they_are_refused_by_name(self):
        found = self.ran(2, """
    begin()
    model = smp.DistributedModel(Mlp())
    calls = [lambda: list(model.distributed_modules()), lambda: model.is_distributed_parameter(model.module.layers[0].weight), lambda: list(model.default_reducer_named_parameters())]
    result = [told(call) for call in calls]
    stepping(model)(*mlp_batches()[0])
    result += [told(lambda: model.is_distributed_parameter(torch.ones(2))), told(lambda: model.is_scaled_batch_buffer(model.module.layers[0].weight))]
""")
        for text, part in zip(found, ["StateError: distributed_modules(): the model's tensors have no stages yet", "StateError: is_distributed_parameter(): ", "StateError: default_reducer_named_parameters(): ",
                                      "ConfigError: DistributedModel.is_distributed_parameter(): Tensor is no parameter of the model",
                                      "ConfigError: DistributedModel.is_scaled_batch_buffer(): Parameter is no buffer of the model"], strict=True):
            self.assertTrue(str(text).startswith(part), (text, part))


class Registry(Case):
    def test_marks(self):
        found = self.ran(1, _START + """
    mark = lambda module: (found := registry.mark_of(module)) and [found.enabled, found.options]
    with smp.tensor_parallelism(fused_softmax=False):
        outer = nn.Sequential(nn.Linear(2, 2))
        with smp.tensor_parallelism(enabled=False):
            inner = nn.Linear(2, 2)
        after = nn.Linear(2, 2)
    @smp.tensor_parallelism()
    def made():
        return nn.Linear(2, 2)
    decorated, outside = made(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    result = [mark(outer), mark(outer[0]), mark(inner), mark(after), mark(decorated), mark(outside)]
    smp.set_tensor_parallelism(outside, True, use_alibi=True)
    smp.set_tensor_parallelism(outside[1], False)
    result += [mark(outside), mark(outside[0]), mark(outside[1])]
""")
        on = [True, {"fused_softmax": False}]
        self.assertEqual(found, [on, on, [False, {}], on, [True, {}], None, [True, {"use_alibi": True}], [True, {"use_alibi": True}], [False, {}]])

    def test_marks_and_pairs_leave_a_model_as_it_is(self):
        """Also within smp.partition(), which marks modules, too."""
        text = """
    begin(auto_partition=False, default_partition=0)
    class Head(nn.Linear):
        pass
    MARKED
    result = trained(net, mlp_batches())
    assert isinstance(net.layers[7], Head) and not isinstance(net.layers[7], smp.nn.DistributedModule)
"""
        plain, marked = (text.replace("MARKED", made) for made in ("""
    with smp.partition(smp.pp_size() - 1):
        head = Head(16, 3)
    net = Mlp()
    net.layers[7] = head""", """
    smp.tp_register_with_module(Head, smp.nn.DistributedLinear)
    with smp.tensor_parallelism():
        with smp.partition(smp.pp_size() - 1):
            head = Head(16, 3)
        net = Mlp()
    net.layers[7] = head
    smp.set_tensor_parallelism(net)"""))
        for ranks in (1, 2):
            with self.subTest(ranks):
                self.assertEqual(self.ran(ranks, marked), self.ran(ranks, plain))

    def test_pairs(self):
        found = self.ran(1, _START + """
    init, forward, back = (lambda size, *rest, bias=True, **more: ((size,), {})), (lambda x, mask=None: ((x,), {})), (lambda result: result)
    @smp.tp_register(Ours, init_hook=init, forward_hook=forward, return_hook=back)
    class Theirs(nn.Module):
        def __init__(self, size: int, *rest, bias=True, **more):
            super().__init__()
        def forward(self, x, mask: torch.Tensor = None):
            return x
    class Other(Theirs):
        pass
    pair = registry.pair_of(Theirs)
    result = [isinstance(Theirs, type), pair.distributed is Ours, (pair.init_hook, pair.forward_hook, pair.return_hook) == (init, forward, back), registry.pair_of(Other)]
    smp.tp_register_with_module(Theirs, smp.nn.DistributedTransformer)
    smp.tp_register_with_module(Other, Ours)
    result += [registry.pair_of(Theirs).distributed is smp.nn.DistributedTransformer, registry.pair_of(Other).init_hook]
    with smp.tensor_parallelism(depth=3):  # an argument of Ours
        result.append(registry.mark_of(nn.Linear(1, 1)).options)
""")
        self.assertEqual(found, [True, True, True, None, True, None, {"depth": 3}])

    def test_what_does_not_fit_is_refused_by_name(self):
        found = self.ran(1, _START + """
    class Theirs(nn.Module):
        def __init__(self, size, bias=True):
            super().__init__()
        def forward(self, x):
            return x
    register = smp.tp_register_with_module
    calls = [lambda: register(Theirs(1), Ours), lambda: register(Theirs, nn.Linear), lambda: smp.tp_register(nn.Linear)(Theirs), lambda: register(Theirs, Ours, init_hook=3),
             lambda: register(Theirs, Ours, init_hook=lambda size: ((), {})), lambda: register(Theirs, Ours, init_hook=lambda size, bias=False: ((), {})),
             lambda: register(Theirs, Ours, forward_hook=lambda y: ((), {})), lambda: smp.set_tensor_parallelism(nn.Linear(1, 1), fused_softmaxx=True),
             lambda: smp.tensor_parallelism(nonsense=1).__enter__(), lambda: smp.tensor_parallelism(enabled=1).__enter__(), lambda: smp.set_tensor_parallelism(Theirs),
             lambda: smp.init({"partitions": 1, "tensor_parallel_degree": 2, "ddp": True})]
    result = [[told(call) for call in calls], registry.pair_of(Theirs)]
""")
        self.assertIsNone(found[1])
        for text, part in zip(found[0], ["no class of a torch.nn.Module", "Linear is no class that is derived from smp.nn.DistributedModule", "Linear is no class that is derived", "init_hook is 3; expected a function",
                                         "init_hook has the arguments (size); expected those of", "(size, bias=False); expected", "forward_hook has the arguments (y); expected those of",
                                         "there is no option `fused_softmaxx`; did you mean `fused_softmax`?", "smp.tensor_parallelism: there is no option `nonsense`", "enabled=1): expected True or False",
                                         "type is no torch.nn.Module", "`tensor_parallel_degree` = 2 is not there yet"], strict=True):
            self.assertIn("Error: smp.", text)
            self.assertIn(part, text)


class Translations(Case):
    def test_state_dicts_are_those_of_transformers_already(self):
        """Also under smp's own name of the package, and from two stages."""
        text = """
    import trireme.as_smp
    trireme.as_smp.install()
    from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import translate_hf_state_dict_to_smdistributed_gpt2, translate_state_dict_to_hf_gpt2
    begin()
    net, plain = gpt2(True), gpt2(True)
    model = smp.DistributedModel(net)
    @smp.step
    def train_step(ids):
        loss = causal_loss(model, ids)
        model.backward(loss)
        return loss
    batch = ids_batches()[0]
    before = train_step(*batch).reduce_mean().item()
    plain.load_state_dict(translate_state_dict_to_hf_gpt2(model.state_dict(), 16))
    inside = sum(causal_loss(plain, ids).item() for ids in batch[0].chunk(MICRO_BATCHES)) / MICRO_BATCHES
    other = gpt2(True)
    model.zero_grad()
    model.load_state_dict(translate_hf_state_dict_to_smdistributed_gpt2(other.state_dict()))
    after = train_step(*batch).reduce_mean().item()
    expected = sum(causal_loss(other, ids).item() for ids in batch[0].chunk(MICRO_BATCHES)) / MICRO_BATCHES
    result = [abs(before - inside), abs(after - expected), abs(before - after) > 1e-3]
"""
        for ranks in (1, 2):
            with self.subTest(ranks):
                found = self.ran(ranks, text)
                self.assertLess(max(found[:2]), 1e-6)
                self.assertTrue(found[2])

    def test_every_family_has_both_ways(self):
        found = self.ran(1, """
    import importlib
    states, result = {"a.weight": torch.ones(1)}, []
    for name in ("gpt2", "gptj", "gptneo", "bert", "roberta"):
        module = importlib.import_module(f"trireme.smp.nn.huggingface.{name}")
        to, back = getattr(module, f"translate_state_dict_to_hf_{name}"), getattr(module, f"translate_hf_state_dict_to_smdistributed_{name}")
        result += [to(states) is states, to(states, max_seq_len=8) is states, back(states) is states]
    from trireme.smp.nn.huggingface import bert, gptj
    result.append(gptj.translate_hf_gptj_state_dict_to_smdistributed_gptj(states) is states)
    refused = [told(lambda: bert.translate_state_dict_to_hf_bert(states, 0)), told(lambda: bert.translate_state_dict_to_hf_bert([])),
               told(lambda: bert.translate_state_dict_to_hf_bert(smp.nn.DistributedTransformer(1, 1, 2, 2, 2).state_dict()))]
    result = [result, refused]
""")
        self.assertEqual(found[0], [True] * 16)
        for text, part in zip(found[1], ["ConfigError: translate_state_dict_to_hf_bert(max_seq_len=0): expected a whole number", "ConfigError: translate_state_dict_to_hf_bert: expected a state dict, got list",
                                         "UnsupportedError: translate_state_dict_to_hf_bert: 'seq_layers.0.attention.query.weight' is of smp.nn.DistributedTransformer"], strict=True):
            self.assertTrue(text.startswith(part), (text, part))


if __name__ == "__main__":
    main()
