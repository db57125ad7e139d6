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
        """An engine that cuts layers over two ranks: a layer's own tensors are those of a distributed module."""
        found = self.ran(2, """
    import trireme, types
    from trireme.smp.nn import queries
    torch.manual_seed(5)
    net = smp.nn.DistributedTransformerLMHead(2, 4, 4, 16, 64, 32, 8)
    net.register_buffer("seen", torch.zeros(()))
    engine = trireme.initialize(model=net, config={"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}, "optimizer": {"type": "SGD"}})[0]
    model = types.SimpleNamespace(module=net, engine=lambda call: engine, local_named_parameters=net.named_parameters)
    modules, layer = dict(net.named_modules()), net.transformer.seq_layers[1]
    names = {id(module): name for name, module in modules.items()}
    linear = [f"transformer.seq_layers.{index}.{part}" for index in (0, 1) for part in ("attention.query", "attention.key", "attention.value", "attention.dense", "output.dense1", "output.dense2")]
    everything = [name for name, _ in net.named_parameters()]
    cut = [name for name in everything if name.rpartition(".")[0] in linear]
    asked = lambda query: [query(model, one) for one in (layer.attention.query.weight, layer.attention.dense.bias, layer.attention.layernorm.weight, net.word_embedding.weight)]
    result = [sorted(names[id(one)] for one in queries.distributed_modules(model)), sorted(linear), asked(queries.is_distributed_parameter), asked(queries.is_scaled_batch_parameter),
              [queries.is_distributed_buffer(model, net.seen), queries.is_scaled_batch_buffer(model, net.seen)],
              [name for name, _ in queries.scaled_batch_reducer_named_parameters(model)], cut,
              [name for name, _ in queries.default_reducer_named_parameters(model)], [name for name in everything if name not in cut]]
""")
        self.assertEqual(found[0], found[1])
        self.assertEqual(found[2:5], [[True, False, False, False], [True, True, False, False], [False, False]])
        self.assertEqual(found[5], found[6])
        self.assertEqual(found[7], found[8])

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
             lambda: smp.tensor_parallelism(nonsense=1).__enter__(), lambda: smp.tensor_parallelism(enabled=1).__enter__(), lambda: smp.set_tensor_parallelism(Theirs)]
    result = [[told(call) for call in calls], registry.pair_of(Theirs)]
""")
        self.assertIsNone(found[1])
        for text, part in zip(found[0], ["no class of a torch.nn.Module", "Linear is no class that is derived from smp.nn.DistributedModule", "Linear is no class that is derived", "init_hook is 3; expected a function",
                                         "init_hook has the arguments (size); expected those of", "(size, bias=False); expected", "forward_hook has the arguments (y); expected those of",
                                         "there is no option `fused_softmaxx`; did you mean `fused_softmax`?", "smp.tensor_parallelism: there is no option `nonsense`", "enabled=1): expected True or False",
                                         "type is no torch.nn.Module"], strict=True):
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
