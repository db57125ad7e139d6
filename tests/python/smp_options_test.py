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
