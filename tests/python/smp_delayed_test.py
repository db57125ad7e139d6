"""smp.delay_param_initialization() and smp.model_creation()."""
from harness import RankServer, main
from smp_programs import Case

RankServer.imports = ("transformers.models.gpt2.modeling_gpt2", "torch._dynamo")  # which optimizers of torch import

_MODELS = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.words = nn.Linear(6, 256), nn.Embedding(64, 256, padding_idx=0)
            self.inner = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 256))
            self.scale = nn.Parameter(torch.randn(256, 256) * 0.02 + torch.eye(256))
            self.register_buffer("mask", torch.tril(torch.ones(64, 64)), persistent=False)
            self.register_buffer("seen", torch.zeros(2000))
            self.weights = [torch.linspace(0, 1, 2000)]
            self.last = nn.Linear(256, 3)
            nn.init.trunc_normal_(self.inner[0].weight, std=0.02)
            nn.init.orthogonal_(self.inner[2].weight)
            with torch.no_grad():
                self.inner[4].weight.mul_(0.5)[3:5].fill_(0.25)
            self.mean = self.inner[4].weight.mean().item()
        def forward(self, x, y):
            h = self.first(x) + self.words(y + 1) + self.mask[3, :1]
            h = self.inner(h) @ self.scale * (1 + self.mean) + self.weights[0][-1]
            return F.cross_entropy(self.last(h), y) + self.seen.sum()
    def made(kind, delays):
        torch.manual_seed(11)
        with smp.delay_param_initialization(delays):
            net = Net() if kind == "net" else gpt2(True)
        return net, torch.rand(3).tolist()
"""


class Bits(Case):
    cases = {"net": (2,), "gpt2": (2,)}  #: numbers of ranks

    def test_weights_losses_and_gradients_have_the_bits_of_a_model_that_was_made_at_once(self):
        for kind, batches, loss_of in (("net", "mlp_batches()", "None"), ("gpt2", "ids_batches()", "causal_loss")):
            text = _MODELS + f"""
    begin()
    net, drawn = made({kind!r}, DELAYS)
    if smp.rank() == 1:
        torch.manual_seed(99)
    torch.manual_seed(3)
    result = [*trained(net, {batches}, lambda parameters: torch.optim.AdamW(parameters, lr=0.01), loss_of={loss_of}), drawn]
"""
            expected = self.ran(1, text.replace("DELAYS", "False"))
            for ranks in self.cases[kind]:
                with self.subTest(kind, ranks=ranks):
                    found = self.ran(ranks, text.replace("DELAYS", "True"))
                    self.assertEqual(found[:2], expected[:2])
                    self.assertEqual(found[4], expected[4])  # generators go on as without


class Delayed(Case):
    def test_a_rank_has_its_stage_alone_and_at_most_one_tensor_more(self):
        found = self.ran(2, """
    from trireme.smp import delayed
    begin(auto_partition=False, default_partition=0, delayed_parameter_initialization=True)
    def kilobytes(what):
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith(what))
    width, layers = 1024, 16  # 4 MiB each
    wide = lambda: nn.Sequential(nn.Linear(6, width), *(nn.Linear(width, width) for _ in range(layers)), nn.Linear(width, 3))
    with smp.model_creation():
        nn.Linear(width, width)  # imports
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the highest is counted anew
    before = kilobytes("VmRSS")
    with smp.model_creation():
        net = wide()
    after = kilobytes("VmHWM") - before
    given, give = [], delayed.give
    def measured(*args):
        give(*args)
        given.append(kilobytes("VmHWM") - before)
    delayed.give = measured
    for index in range(layers // 2 + 1, layers + 2):
        smp.set_partition(net[index], 1)
    model = smp.DistributedModel(net)
    @smp.step
    def evaluate(x):
        return model(x)
    with torch.no_grad():
        evaluate(torch.ones(8, 6))
    here = lambda tensor: tensor.numel() * 4 if told(lambda: tensor.untyped_storage().data_ptr() > 0) is True else 0
    held = sum(here(parameter) for parameter in net.parameters())
    own = sum(parameter.numel() * 4 for parameter in model.local_parameters())
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps([held, own, after, given[0]]))]
""")
        layer = 1024 * 1024 * 4 // 1024  # KiB
        for held, own, after, highest in found:
            self.assertEqual(held, own)
            self.assertLess(after, 3 * layer)  # of 16 layers
            self.assertLess(highest, own // 1024 + 3 * layer)

    def test_ranks_with_other_seeds_have_rank_0s_weights(self):
        found = self.ran(4, _MODELS + """
    begin(partitions=2, ddp=True)
    def of(seed):
        torch.manual_seed(seed)
        with smp.delay_param_initialization():
            return Net()
    net = of(5 + smp.rank())
    torch.manual_seed(5)
    expected = {name: bits(tensor) for name, tensor in Net().state_dict().items()}
    model = smp.DistributedModel(net)
    with torch.no_grad():
        smp.step(lambda x, y: model(x, y))(*mlp_batches()[0])
    own = {name: bits(tensor) for named in (model.local_named_parameters(), model.local_named_buffers()) for name, tensor in named if name in expected}
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps([expected[name] == value for name, value in own.items()]))]
""")
        for one in found:
            self.assertTrue(one and all(one), found)

    def test_states_that_are_loaded_before_the_first_step_wait_for_the_stages(self):
        found = self.ran(2, _MODELS + """
    begin()
    net, _ = made("net", True)
    other = Net()
    model = smp.DistributedModel(net)
    less = {name: value for name, value in other.state_dict().items() if name != "last.bias"}
    texts = [told(lambda: model.load_state_dict(less)), told(lambda: model.load_state_dict({**less, "last.bias": torch.zeros(4)})), told(model.state_dict), told(lambda: net.first.weight.sum())]
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        smp.step(lambda x, y: model(x, y))(*mlp_batches()[0])
    folder = FOLDER
    smp.save_checkpoint(folder, "a", model=model)
    first = model.state_dict()
    del model
    again, _ = made("net", True)
    model = smp.DistributedModel(again)
    smp.resume_from_checkpoint(folder, "a")
    with torch.no_grad():
        smp.step(lambda x, y: model(x, y))(*mlp_batches()[0])
    second = model.state_dict()
    result = [texts, [bits(value) == bits(first[name]) == bits(second[name]) for name, value in other.state_dict().items()]]
""".replace("FOLDER", repr(str(self.folder / "saved"))))
        self.assertTrue(found[1] and all(found[1]))
        for text, part in zip(found[0], ("it lacks 'last.bias'", "'last.bias' is [4], and [3] in the model", "has no numbers before the model's tensors get their stages",
                                         "has no numbers before the model's tensors get their stages")):
            self.assertIn(part, text)

    def test_a_trace_that_needs_values_is_refused_by_name_and_goes_without(self):
        text = """
    begin(OPTIONS)
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.first, self.last = torch.ones(64, 64) * 0.5, nn.Linear(6, 64), nn.Linear(64, 3)
        def forward(self, x, y):
            h = self.first(x) @ self.table
            return F.cross_entropy(self.last(h if h.sum() > 0 else -h), y)
    torch.manual_seed(1)
    with smp.delay_param_initialization(DELAYS):
        net = Reads()
        net.wide = nn.Linear(64, 64)
    torch.manual_seed(2)
    result = told(lambda: trained(net, mlp_batches())[:2])
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps(result))]
"""
        for told in self.ran(2, text.replace("OPTIONS", "").replace("DELAYS", "True")):
            for part in ("ConfigError: smp.init: `skip_tracing` = false", "reads values", "has no numbers before the model's tensors get their stages", "set `skip_tracing` to true"):
                self.assertIn(part, told)
        expected = self.ran(1, text.replace("OPTIONS", "").replace("DELAYS", "False"))
        found = self.ran(2, text.replace("OPTIONS", "skip_tracing=True").replace("DELAYS", "True"))
        self.assertEqual(found[0], expected[0])

    def test_a_model_of_transformers_that_reads_values_says_which_key_to_set(self):
        text = """
    begin(OPTIONS)
    torch.manual_seed(11)
    with smp.delay_param_initialization():
        net = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=8, vocab_size=64, use_cache=False, bos_token_id=0, eos_token_id=0))
    model = smp.DistributedModel(net, MEASURED)
    with torch.no_grad():
        result = told(lambda: smp.step(lambda ids: model(input_ids=ids, labels=ids).loss)(torch.ones(4, 8, dtype=torch.long)).reduce_mean().item() > 0)
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps(result))]
"""
        for options, measured, parts in (("", "", ("`skip_tracing` = false", "set `skip_tracing` to true")),
                                         ("", "trace_memory_usage=True", ("(trace_execution_times=False, trace_memory_usage=True)", "leave both out"))):
            for told in self.ran(2, "    import transformers\n" + text.replace("OPTIONS", options).replace("MEASURED", measured)):
                for part in ("ConfigError: ", *parts):
                    self.assertIn(part, told)
        self.assertEqual(self.ran(2, "    import transformers\n" + text.replace("OPTIONS", "skip_tracing=True").replace("MEASURED", "")), [True, True])

    def test_dtypes_and_what_is_refused(self):
        found = self.ran(2, """
    begin(delayed_parameter_initialization=True)
    with smp.model_creation(dtype=torch.bfloat16):
        net = nn.Linear(64, 64)
    after = str(torch.empty(1).dtype)
    texts = [told(lambda: smp.model_creation(dtype=torch.int64).__enter__()), told(lambda: smp.model_creation(nonsense=1).__enter__()),
             told(lambda: smp.delay_param_initialization(1).__enter__()), told(lambda: smp.register_parameter(net, 3)), told(lambda: smp.register_parameter(net, net.weight))]
    with smp.delay_param_initialization():
        odd = nn.Linear(64, 64 + 64 * smp.rank())
        with smp.delay_param_initialization(False):
            texts.append(told(lambda: nn.Linear(64, 64).weight.sum().item() < 9))
    texts.append(told(lambda: smp.DistributedModel(odd).partition((torch.ones(2, 64),))))
    result = [str(net.weight.dtype), after, [json.loads(text) for text in smp.state.world.gather(json.dumps(texts))]]
""")
        self.assertEqual(found[:2], ["torch.bfloat16", "torch.float32"])
        for texts in found[2]:
            for text, part in zip(texts, ("model_creation(dtype=torch.int64): expected a floating-point one", "nonsense", "(enabled=1): expected True or False",
                                          "(Linear, int): expected", None, True, "ranks have made other tensors")):
                self.assertTrue(part in text if isinstance(part, str) else text is part, (text, part))


if __name__ == "__main__":
    main()
