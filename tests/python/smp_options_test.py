"""Options of smp that say how a program runs, and change no number."""
from harness import RankServer, main
from smp_programs import Case

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import


class OnlyForward(Case):
    _EVALUATES = """
    begin(OPTIONS)
    torch.manual_seed(3)
    net, batches = Mlp(), mlp_batches()
    model = smp.DistributedModel(net)
    @smp.step
    def evaluate(x, y):
        return model(x, y), net.layers(x).requires_grad, torch.is_grad_enabled()
    steps = [evaluate(x, y) for x, y in batches]
    result = [[[loss.item() for loss in losses.outputs] for losses, _, _ in steps], [[trained, enabled] for _, trained, enabled in steps]]
"""

    def test_step_functions_evaluate_with_the_bits_of_one_process(self):
        alone = self.ran(1, self._EVALUATES.replace("OPTIONS", ""))
        found = self.ran(2, self._EVALUATES.replace("OPTIONS", "pipeline='_only_forward'"))
        self.assertEqual(found[0], alone[0])
        self.assertEqual(alone[1], [[[True] * 4, [True] * 4]] * 2)
        self.assertEqual(found[1], [[[False] * 4, [False] * 4]] * 2)

    def test_a_backward_pass_is_refused_by_name_on_every_rank(self):
        for ranks, call in ((2, "model.backward(loss)"), (2, "loss.backward()"), (1, "model.backward(loss)")):
            with self.subTest(call, ranks=ranks):
                found = self.ran(ranks, f"""
    begin(pipeline="_only_forward")
    model = smp.DistributedModel(Mlp())
    @smp.step
    def train_step(x, y):
        loss = model(x, y)
        {call}
        return loss
    text = told(lambda: train_step(*mlp_batches()[0]))
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps(text))]
""")
                for text in found:
                    self.assertIn('`pipeline` = "_only_forward" of smp.init() has step functions without backward passes; leave that out to train', text)


class Measured(Case):
    _NETS = """
    begin(memory_weight=WEIGHT)
    class Layer(nn.Module):
        def __init__(self, work):
            super().__init__()
            self.linear, self.work = nn.Linear(32, 32), work
        def forward(self, x):
            x = self.linear(x)
            for _ in range(6):
                x = self.work(x)
            return x
    class Net(nn.Module):
        def __init__(self, works):
            super().__init__()
            self.layers, self.last = nn.Sequential(*map(Layer, works)), nn.Linear(32, 3)
        def forward(self, x, y):
            return F.cross_entropy(self.last(self.layers(x)), y)
    def slow(x):
        return x + torch.linalg.svdvals(torch.eye(200) + x[:1, :1] * 0).sum() * 0  # many FLOPs, few bytes
    model = smp.DistributedModel(Net([WORKS]), MEASURES)
    torch.manual_seed(1)
    batch = (torch.randn(8, 32), torch.randint(3, (8,)))
    net = model.get_module()
    expected = [net(x, y).item() for x, y in zip(batch[0].chunk(4), batch[1].chunk(4))]
    losses = [loss.item() for loss in stepping(model)(*batch).outputs]
    homes = model.engine("").homes
    result = [[homes[f"layers.{index}.linear.weight"] for index in range(6)], losses == expected]
"""

    def stages(self, weight, works, measures):
        found = self.ran(2, self._NETS.replace("WEIGHT", str(weight)).replace("WORKS", works).replace("MEASURES", measures))
        self.assertTrue(found[1])
        return found[0]

    def test_a_partition_goes_by_seconds_of_operators(self):
        works = "slow, torch.tanh, torch.tanh, torch.tanh, torch.tanh, torch.tanh"
        self.assertEqual(self.stages(0.0, works, "trace_execution_times=True"), [0, 1, 1, 1, 1, 1])
        self.assertEqual(self.stages(0.0, works.replace("slow", "torch.tanh"), ""), [0, 0, 0, 1, 1, 1])

    def test_a_partition_goes_by_the_results_that_a_backward_pass_needs(self):
        # large results, of which nothing is kept
        works = "torch.tanh, " + ", ".join(["lambda x: torch.cat([x + 1.0] * 60)[:len(x)]"] * 4) + ", torch.tanh"
        self.assertEqual(self.stages(1.0, works, "trace_memory_usage=True")[:5], [0, 0, 0, 1, 1])
        found = self.stages(1.0, works.replace("torch.tanh", "lambda x: torch.tanh(x.repeat(300, 1))[:len(x)]", 1), "trace_memory_usage=True")
        self.assertEqual(found, [0, 1, 1, 1, 1, 1])

    def test_what_does_not_fit_is_refused_by_name(self):
        found = self.ran(1, """
    begin(skip_tracing=True)
    result = [told(lambda: smp.DistributedModel(Mlp(), trace_execution_times=True)), told(lambda: smp.DistributedModel(Mlp(), trace_memory_usage=1)),
              told(lambda: smp.DistributedModel(Mlp(), trace_memory_usage=True))]
""")
        for text, part in zip(found, ("`skip_tracing` of smp.init() is true", "trace_memory_usage=1): expected True or False", "`skip_tracing` of smp.init() is true"), strict=True):
            self.assertIn(part, text)
        text = self.ran(1, """
    begin()
    result = told(lambda: smp.DistributedModel(Mlp(), trace_execution_times=True, trace_device="cpu"))
""")
        self.assertIn("times are those of the device that trains", text)


class Accepted(Case):
    def test_modes_of_messages_change_no_bit_even_where_the_pattern_changes(self):
        program = """
    begin(OPTIONS)
    class Net(Mlp):
        def forward(self, x, y):
            times = 1 + int(x.sum() > 0)  # which the mode would have to follow
            for _ in range(times):
                x = x * 0.5 + self.layers[:3](x).sum() * 0.01
            return F.cross_entropy(self.layers(x), y)
    torch.manual_seed(4)
    result = trained(Net(), [(x + shift, y) for shift, (x, y) in zip((-3, 3, -3), mlp_batches(3))], steps=3)[:2]
"""
        alone = self.ran(1, program.replace("OPTIONS", ""))
        self.assertEqual(self.ran(2, program.replace("OPTIONS", "static_mode=True, fast_mode=True, deterministic_server=True")), alone)

    def test_variables_of_smps_transport_are_told_of_once_by_rank_0(self):
        found = self.ran(2, """
    import logging
    from trireme.log import logger
    said = []
    class Said(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())
    logger.addHandler(Said())
    os.environ.update(SMP_NCCL_THROTTLE_LIMIT="8", SMP_DISABLE_D2D="1", SMP_D2D_GPU_BUFFER_SIZE_BYTES="1000")
    begin()
    smp.init({"partitions": 2, "microbatches": MICRO_BATCHES})
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps([text for text in said if "SMP_" in text]))]
""")
        self.assertEqual(found, [["smp.init: SMP_NCCL_THROTTLE_LIMIT, SMP_DISABLE_D2D, SMP_D2D_GPU_BUFFER_SIZE_BYTES of the environment, for smp's own transport, change "
                                  "nothing: a stage sends what the next one needs, as soon as it has it"], []])


if __name__ == "__main__":
    main()
