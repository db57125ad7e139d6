"""Optimizer states and weights that ranks share under smp's keys: `shard_optimizer_state`,
`sharded_data_parallel_degree`."""
import os

from harness import main
from smp_programs import Case

# Each rank has samples of its own; weights are told by state_dict(), which gathers them.
_TRAINED = """
    def begin_sharded(stages, **options):
        smp.init({"partitions": stages, "microbatches": MICRO_BATCHES, "ddp": True, **options})
        torch.manual_seed(5)

    def told_weights(model):
        return {name: bits(value) for name, value in model.state_dict().items()}

    def trained_on_own(make, steps=3, net=None, max_norm=None):
        net = net or Mlp()
        torch.manual_seed(50 + smp.rdp_rank())
        batches = mlp_batches(steps)
        model = trained_on_own.model = smp.DistributedModel(net)
        stepper = trained_on_own.optimizer = smp.DistributedOptimizer(make(model.parameters()))
        train_step, found = stepping(model), []
        for batch in batches:
            stepper.zero_grad()
            losses = train_step(*batch)
            found.append([[loss.item() for loss in losses.outputs], gradients(model), float(stepper.clip_master_grads(max_norm)) if max_norm else None])
            stepper.step()
        return [found, told_weights(model)]
"""
_ADAM = "lambda parameters: torch.optim.AdamW(parameters, lr=0.01)"


class Sharded(Case):
    def ran(self, ranks, text, **options):
        return super().ran(ranks, _TRAINED + text, **options)

    def test_training_and_norms_have_the_bits_of_ranks_that_share_nothing(self):
        for ranks, stages in ((2, 1), (4, 2)):
            text = f"""
    begin_sharded({stages}, OPTIONS)
    result = trained_on_own({_ADAM}, max_norm=0.1)
"""
            whole = self.ran(ranks, text.replace("OPTIONS", ""))
            for options in ('shard_optimizer_state=True', 'sharded_data_parallel_degree=2, sdp_gradient_clipping=1e9'):
                with self.subTest(ranks=ranks, options=options):
                    self.assertEqual(self.ran(ranks, text.replace("OPTIONS", options)), whole)

    def test_the_optimizer_tells_the_norm_before_clipping(self):
        for ranks, stages, options, scale, tolerance in ((2, 1, "", "1.0", 1e-5), (4, 2, "", "1.0", 1e-5), (2, 1, "fp16=True", "128.0", 1e-2)):
            with self.subTest(ranks=ranks, options=options):
                found = self.ran(ranks, f"""
    import copy
    begin_sharded({stages}, sharded_data_parallel_degree=2, sdp_gradient_clipping=0.05, **dict({options}))
    net = Mlp()
    other = copy.deepcopy(net)
    batches = []
    for copy_number in range(2):
        torch.manual_seed(50 + copy_number)
        batches.append(mlp_batches(1)[0])
        (other(*batches[-1]) / 2).backward()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.125), static_loss_scale={scale})
    before = optimizer._global_grad_norm
    stepping(model)(*batches[smp.rdp_rank()])
    optimizer.step()
    expected = torch.cat([p.grad.flatten() for p in other.parameters()]).norm().item()
    result = [before, expected, [json.loads(text) for text in smp.state.world.gather(json.dumps(optimizer._global_grad_norm))]]
""")
                self.assertIsNone(found[0])
                self.assertGreater(found[1], 0.1)  # it is clipped
                for norm in found[2]:
                    self.assertLess(abs(norm / found[1] - 1), tolerance)

    _RESUMED = """
    begin_sharded(STAGES, OPTIONS)
    torch.manual_seed(5)
    net = Mlp()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(MAKE(model.parameters()))
    train_step = stepping(model)
    torch.manual_seed(50 + smp.rdp_rank())
    batches = mlp_batches(3)
    def stepped(batch):
        optimizer.zero_grad()
        losses = [loss.item() for loss in train_step(*batch).outputs]
        optimizer.step()
        return losses
    if SAVES:
        stepped(batches[0]); stepped(batches[1])
        own = optimizer.local_state_dict(gather_if_shard=False)
        mine = [sorted(own), sorted(own["state"])]
        parts = {"model": model.local_state_dict(), "optimizer": own, "epoch": 7}
        if smp.state.cfg.zero_stage or smp.rdp_rank() == 0:
            smp.save(parts, PATH)
        whole = optimizer.state_dict()
        told_of = {f"{number}.{name}": bits(value) for number, one in whole["state"].items() for name, value in one.items()}
    else:
        found = smp.load(PATH)
        assert found["epoch"] == 7
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        mine, told_of = None, None
    losses = stepped(batches[2])
    of_ranks = [json.loads(text) for text in smp.state.world.gather(json.dumps(mine))]
    result = [losses, told_weights(model), told_of, of_ranks]
"""

    def _run(self, ranks, stages, options, path, saves, make=_ADAM):
        text = self._RESUMED.replace("STAGES", str(stages)).replace("OPTIONS", options).replace("PATH", repr(path)).replace("SAVES", str(saves)).replace("MAKE", f"({make})")
        return self.ran(ranks, text)

    def test_a_save_of_shards_is_resumed_bit_by_bit_at_any_layout(self):
        zero_1, zero_3 = "shard_optimizer_state=True", "sharded_data_parallel_degree=2, sdp_gradient_clipping=1e9"
        folder = self.folder
        expected = self._run(2, 1, "", f"{folder}/plain.pt", True)
        self.assertIn("plain.pt_0", os.listdir(folder))
        for options, layouts in ((zero_1, ((4, 2, zero_1), (2, 1, ""))), (zero_3, ((2, 1, zero_3),))):
            with self.subTest(options):
                path = f"{folder}/{options[:8]}.pt"
                saved = self._run(4, 2, options, path, True)
                self.assertEqual(saved[:3], expected[:3])
                self.assertEqual(sorted(name for name in os.listdir(folder) if name.startswith(options[:8])),
                                 [os.path.basename(path) + end for end in ("_0_0_0", "_0_0_1", "_1_0_0", "_1_0_1")])
                numbers = [numbers for _, numbers in saved[3]]
                self.assertEqual(sorted(sum(numbers, [])), list(range(8)))  # each rank has some, and none twice
                self.assertTrue(all(numbers))
                for ranks, stages, others in layouts:
                    self.assertEqual(self._run(ranks, stages, others, path, False)[:2], expected[:2])

    def test_state_dicts_of_one_copy_alone_name_who_does_not_come(self):
        found = self.ran(2, """
    import datetime
    import trireme.ranks
    begin_sharded(1, shard_optimizer_state=True)
    trained_on_own(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.5), steps=1)
    trireme.ranks.TIMEOUT = datetime.timedelta(seconds=2)
    from trireme.smp import messages
    result = told(trained_on_own.optimizer.state_dict) if smp.rank() == 0 else None
""")
        self.assertTrue(found.startswith("CommTimeoutError: optimizer.state_dict(): every rank of [0, 1] makes this call, and ranks [1] have not within"), found)

    def test_groups_that_shard_and_the_clipping_of_their_gradients(self):
        """Two groups of two ranks; by_hand: the norm of the mean of all gradients is limited before the update."""
        found = self.ran(4, """
    begin_sharded(1, sharded_data_parallel_degree=2, sdp_gradient_clipping=0.05)
    import copy
    net = Mlp()
    plain = copy.deepcopy(net)
    found = trained_on_own(lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.5), net=net)
    weights_now = trained_on_own.model.state_dict()
    stepper, norms = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.5), []
    batches = []
    for rank in range(4):
        torch.manual_seed(50 + rank)
        batches.append(mlp_batches(3))
    for step in range(3):
        stepper.zero_grad()
        for own in batches:
            for index in range(MICRO_BATCHES):
                (plain(*(tensor.chunk(MICRO_BATCHES)[index] for tensor in own[step])) / (4 * MICRO_BATCHES)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05).item())
        stepper.step()
    result = [max((weights_now[name] - value).abs().max().item() for name, value in plain.state_dict().items()), norms,
              trained_on_own.model.engine("").resolved_config["zero_optimization"]["mics_shard_size"]]
""")
        self.assertLess(found[0], 1e-6)
        self.assertGreater(min(found[1]), 0.1)
        self.assertEqual(found[2], 2)

    def test_registered_parameters_and_cpu(self):
        found = self.ran(2, """
    begin_sharded(1, sharded_data_parallel_degree=2)
    class Tied(Mlp):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))
            smp.register_parameter(self.layers[7], self.factor)
        def forward(self, x, y):
            return F.cross_entropy(self.layers(x) * self.factor, y)
    refused = [told(lambda: smp.register_parameter(1, nn.Parameter(torch.ones(1)))), told(lambda: smp.register_parameter(nn.Linear(1, 1), torch.ones(1)))]
    net = Tied()
    trained_on_own(lambda parameters: torch.optim.SGD(parameters, lr=0.1), net=net, steps=1)
    model = trained_on_own.model
    whole = told_weights(model)
    model.cpu()
    result = [{name: bits(value) for name, value in net.state_dict().items()} == whole, refused]
""")
        self.assertEqual(found, [True, ["ConfigError: smp.register_parameter(int, Parameter): expected a torch.nn.Module and a torch.nn.Parameter",
                                        "ConfigError: smp.register_parameter(Linear, Tensor): expected a torch.nn.Module and a torch.nn.Parameter"]])


if __name__ == "__main__":
    main()
