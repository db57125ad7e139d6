"""Weights of 16 bits, their masters and the loss scale under smp's names."""
from harness import main
from smp_programs import Case

# [losses, gradients, norm, weights] of steps of plain PyTorch, whose weights of 16 bits follow masters in fp32, and of
# smp's. Copies of the model have batches of their own, by `copies`.
_BOTH = """
    import copy
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.norm = nn.Embedding(12, 16), nn.LayerNorm(16)
            self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
            self.register_buffer("table", torch.linspace(0.1, 1.1, 16))
            self.register_buffer("unsaved", torch.linspace(0.3, 1.3, 16), persistent=False)
        def forward(self, x, scale):
            return self.layers(self.norm(self.embedding(x) * scale.unsqueeze(1) * self.table) * self.unsaved)

    def net_batches(copy, count):
        generator = torch.Generator().manual_seed(70 + copy)
        return [(torch.randint(12, (8,), generator=generator), torch.rand(8, generator=generator) + 0.5, torch.randint(8, (8,), generator=generator)) for _ in range(count)]

    def loss_of(model, x, scale, y):
        return F.cross_entropy(model(x, scale), y)

    def numbers(named):
        return {name: value.detach().float().flatten().tolist() for name, value in named}

    class Halved(nn.Module):
        '''A module of 16 bits between inputs and outputs in fp32.'''
        def __init__(self, net, dtype):
            super().__init__()
            self.net, self.dtype = net.to(dtype), dtype
        def forward(self, x, scale):
            return self.net(x, scale.to(self.dtype)).float()

    def plain_run(net, dtype, counts, scale=1.0, max_norm=None, make=lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)):
        '''Of copies with these numbers of batches.'''
        copies = len(counts)
        model, found = Halved(net, dtype), []
        parameters = list(net.parameters())
        masters = [nn.Parameter(p.detach().float()) for p in parameters]
        stepper = make(masters)
        batches = [net_batches(copy, count) for copy, count in enumerate(counts)]
        for step in range(max(counts)):
            losses, sums = [], [torch.zeros_like(master) for master in masters]
            for copy in (copy for copy, count in enumerate(counts) if step < count):
                own = [torch.zeros_like(master) for master in masters]
                for index in range(MICRO_BATCHES):
                    loss = loss_of(model, *(tensor.chunk(MICRO_BATCHES)[index] for tensor in batches[copy][step]))
                    losses.append(loss.item())
                    net.zero_grad()
                    (loss * scale).backward()
                    for total, p in zip(own, parameters):
                        total += p.grad.float()
                for total, one in zip(sums, own):
                    total += one
            for master, total in zip(masters, sums):
                master.grad = total / (MICRO_BATCHES * copies) / scale
            of_step = {name: master.grad.flatten().tolist() for (name, _), master in zip(net.named_parameters(), masters)}
            norm = torch.nn.utils.clip_grad_norm_(masters, max_norm).item() if max_norm else None
            stepper.step()
            for p, master in zip(parameters, masters):
                p.data.copy_(master)
            found.append([losses, of_step, norm, numbers(net.named_parameters())])
        return found

    def smp_run(net, steps, max_norm=None, make=lambda p: torch.optim.AdamW(p, lr=0.01), **scale):
        model = smp_run.model = smp.DistributedModel(net)
        stepper = smp_run.optimizer = smp.DistributedOptimizer(make(model.parameters()), **scale)
        @smp.step
        def train_step(*batch):
            loss = loss_of(model, *batch)
            model.backward(loss)
            return loss
        found = []
        for batch in net_batches(smp.rdp_rank(), steps):
            stepper.zero_grad()
            losses = [loss.item() for loss in train_step(*batch).outputs]
            losses = sum((json.loads(text) for text in smp.state.world.gather(json.dumps(losses if smp.pp_rank() == smp.tp_rank() == 0 else []))), [])
            gradients = of_all({name: gradient_of(p).flatten().tolist() for name, p in model.local_named_parameters()})
            norm = float(stepper.clip_master_grads(max_norm)) if max_norm else None
            stepper.step()
            found.append([losses, gradients, norm, numbers((name, value) for name, value in model.state_dict().items() if name != "table")])
        return found

    def furthest(found, expected):
        '''The greatest differences of losses, gradients, norms and weights.'''
        worst = [0.0, 0.0, 0.0, 0.0]
        for now, then in zip(found, expected, strict=True):
            for at in range(4):
                pairs = [(now[at][name], then[at][name]) for name in then[at]] if isinstance(then[at], dict) else [(now[at], then[at])]
                for one, other in pairs:
                    if other is not None:
                        worst[at] = max(worst[at], (torch.tensor(one) - torch.tensor(other)).abs().max().item())
        return worst
"""
#: Keys of smp.init() for ranks that share layers and get the same arguments.
SHARED = '"tensor_parallel_degree": 2, "prescaled_batch": True'


class Runs(Case):
    def ran(self, ranks, text, **options):
        return super().ran(ranks, _BOTH + text, **options)

    _SKIPS = """
    smp.init({"partitions": STAGES, "microbatches": MICRO_BATCHES, "ddp": True, "fp16": True, OPTIONS})
    torch.manual_seed(5)
    net = Net()
    smp.set_tensor_parallelism(net)
    bad = []
    net.layers[4].WEIGHT.register_hook(lambda gradient: gradient * float("inf") if bad else gradient)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), dynamic_loss_scale=True,
                                         dynamic_loss_args={"init_scale": 2**10, "scale_window": 2, "min_scale": 256, "delayed_shift": 2})
    @smp.step
    def train_step(*batch):
        loss = loss_of(model, *batch)
        model.backward(loss)
        return loss
    found, before = [], None
    for step, batch in enumerate(net_batches(0, 12)):
        optimizer.zero_grad()
        bad[:] = [True] * (step in (1, 2, 5, 6, 7, 8) and smp.rdp_rank() == 0 and smp.tp_rank() == smp.tp_size() - 1)
        train_step(*batch)
        norm = float(optimizer.clip_master_grads(100.0))
        optimizer.step()
        now = {name: bits(value) for name, value in model.state_dict().items()}
        mine = [optimizer.overflow, optimizer.loss_scale, norm == -1, now == before]
        found.append([json.loads(text) for text in smp.state.world.gather(json.dumps(mine))])
        before = now
    result = found
"""

    def assert_skips(self, ranks, stages, options, of):
        """The tensor `of` of the last layer has the overflows."""
        def expected():
            """The published rule, with a window of 2 steps, two overflows before the scale halves, and a minimum."""
            scale, patience, last = 1024.0, 2, -1
            for step in range(12):
                if is_bad := step in (1, 2, 5, 6, 7, 8):
                    scale, patience = (max(scale / 2, 256.0), patience) if patience == 1 else (scale, patience - 1)
                    last = step
                elif (step - last) % 2 == 0:
                    scale, patience = scale * 2, 2
                yield [is_bad, scale, is_bad, is_bad]

        found = self.ran(ranks, self._SKIPS.replace("STAGES", str(stages)).replace("OPTIONS", options).replace("WEIGHT", of))
        self.assertEqual(found, [[of_step] * ranks for of_step in expected()])

    def assert_joined(self, ranks, stages, options, counts):
        """Losses of the copy that has batches, weights and the scale, after a step that overflows on one rank."""
        far, told = self.ran(ranks, f"""
    smp.init({{"partitions": {stages}, "microbatches": MICRO_BATCHES, "ddp": True, "fp16": True, {options}}})
    torch.manual_seed(5)
    net = Net()
    smp.set_tensor_parallelism(net)
    sgd = lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.5)
    counts, bad = {list(counts)}, []
    # The third step of the copy with most batches overflows.
    other = copy.deepcopy(net)
    of_plain = Halved(other, torch.float16)
    masters = [nn.Parameter(p.detach().float()) for p in other.parameters()]
    stepper, expected_losses = sgd(masters), []
    for step in range(4):
        sums = [torch.zeros_like(master) for master in masters]
        for number in (number for number in range(2) if step < counts[number]):
            for index in range(MICRO_BATCHES):
                other.zero_grad()
                loss = loss_of(of_plain, *(tensor.chunk(MICRO_BATCHES)[index] for tensor in net_batches(number, counts[number])[step]))
                (loss * 1024).backward()
                if counts[number] == 4:
                    expected_losses.append(loss.item())
                for total, p in zip(sums, other.parameters()):
                    total += p.grad.float() / 1024 / MICRO_BATCHES / 2
        if step != 2:
            for master, total in zip(masters, sums):
                master.grad = total
            stepper.step()
        for p, master in zip(other.parameters(), masters):
            p.data.copy_(master)
    net.layers[4].weight.register_hook(lambda gradient: gradient * float("inf") if bad else gradient)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(sgd(model.parameters()), dynamic_loss_scale=True, dynamic_loss_args={{"init_scale": 1024, "scale_window": 1000}})
    @smp.step
    def train_step(*batch):
        loss = loss_of(model, *batch)
        model.backward(loss)
        return loss
    losses = []
    with model.join():
        for step, batch in enumerate(net_batches(smp.rdp_rank(), counts[smp.rdp_rank()])):
            optimizer.zero_grad()
            bad[:] = [True] * (step == 2 and smp.tp_rank() == smp.tp_size() - 1)
            losses += [loss.item() for loss in train_step(*batch).outputs]
            bad.clear()
            optimizer.step()
    mine = [optimizer.loss_scale, optimizer.overflow]
    if len(losses) == len(expected_losses):
        mine.append((torch.tensor(losses) - torch.tensor(expected_losses)).abs().max().item())
    whole = {{name: value.float() for name, value in model.state_dict().items()}}
    far = max((whole[name] - value.float()).abs().max().item() for name, value in other.state_dict().items())
    result = [[json.loads(text) for text in smp.state.world.gather(json.dumps(value))] for value in (far, mine)]
""")
        self.assertLess(max(far), 4e-3)
        for scale, overflow, *losses in told:
            self.assertEqual([scale, overflow], [512.0, False])
            self.assertLess(max(losses, default=0), 4e-3)
        self.assertEqual(sum(len(one) - 2 for one in told), ranks // 2)



class Half(Runs):
    def test_trains_as_plain_pytorch_with_masters(self):
        """Losses, gradients and weights, bit by bit; one that rounds to the other side apart where gradients are
        clipped."""
        for key, scale, max_norm, layouts in (("fp16", 1024.0, None, ((1, 1), (2, 2), (4, 2))), ("fp16", 64.0, 0.1, ((2, 2),)), ("bf16", 1.0, 0.1, ((2, 2), (4, 2)))):
            for ranks, stages in layouts:
                with self.subTest(key=key, scale=scale, ranks=ranks):
                    worst, dtypes, *told = self.ran(ranks, f"""
    smp.init({{"partitions": {stages}, "microbatches": MICRO_BATCHES, "ddp": True, "{key}": True}})
    torch.manual_seed(5)
    net = Net()
    expected = plain_run(copy.deepcopy(net), {{"fp16": torch.float16, "bf16": torch.bfloat16}}["{key}"], [3] * {ranks // stages}, {scale}, {max_norm})
    found = smp_run(net, 3, {max_norm}, static_loss_scale={scale})
    result = [furthest(found, expected), sorted({{str(one.dtype) for one in (*net.parameters(), *net.buffers())}}), smp_run.optimizer.overflow, smp_run.optimizer.loss_scale]
""")
                    self.assertEqual(worst[0], 0)
                    self.assertLess(worst[1], 1e-6)
                    self.assertLess(worst[2], 1e-6)
                    self.assertLess(worst[3], 1e-6 if max_norm is None else 1e-3)  # one that rounds the other way
                    self.assertEqual(told, [False, scale])
                    self.assertEqual(dtypes, [{"fp16": "torch.float16", "bf16": "torch.bfloat16"}[key]])

    def test_an_overflow_on_one_stage_skips_the_step_on_all_ranks(self):
        for ranks, stages, options, of in ((2, 2, "", "bias"), (4, 2, "", "bias"), (4, 2, '"shard_optimizer_state": True', "bias"),
                                           (4, 2, '"sharded_data_parallel_degree": 2', "bias"), (2, 1, SHARED, "weight")):
            with self.subTest(ranks=ranks, options=options):
                self.assert_skips(ranks, stages, options, of)

    def test_a_copy_without_batches_follows_overflows(self):
        for counts in ((1, 4), (4, 1)):
            with self.subTest(counts=counts):
                self.assert_joined(2, 1, "", counts)

    _RESUMED = """
    smp.init({"partitions": STAGES, "microbatches": MICRO_BATCHES, "ddp": True, OPTIONS})
    torch.manual_seed(5)
    model = smp.DistributedModel(Net())
    scale = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2**12, "scale_window": 3}} if smp.state.cfg.fp16 else {}
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=MOMENTUM), **scale)
    @smp.step
    def train_step(*batch):
        loss = loss_of(model, *batch)
        model.backward(loss)
        return loss
    batches, found = net_batches(smp.rdp_rank(), 5), []
    if SAVES:
        first = 0
    else:
        saved, first = torch.load(PATH), 2
        if ORDER:
            optimizer.load_state_dict(saved["optimizer"])
        model.load_state_dict(saved["model"])
        if not ORDER:
            optimizer.load_state_dict(saved["optimizer"])
    for step in range(first, 5):
        optimizer.zero_grad()
        losses = [loss.item() for loss in train_step(*batches[step]).outputs]
        optimizer.step()
        if SAVES and step == 1:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            if smp.rank() == 0:
                smp.save(saved, PATH, partial=False)
            smp.barrier()
        if step > 1:
            found.append([losses, optimizer.loss_scale])
    result = [found, {name: bits(value.float()) for name, value in model.state_dict().items()}, sorted({str(value.dtype) for value in model.state_dict().values()}),
              sorted({name for one in saved["optimizer"]["state"].values() for name in one}), saved["optimizer"].get("loss_scaler")]
"""

    def test_is_resumed_bit_by_bit_with_masters_and_the_scale(self):
        for key, momentum in (("fp16", 0.9), ("bf16", 0.0)):
            path = f"{self.folder}/{key}.pt"

            def ran(ranks, stages, saves, options="", order=False, key=key, momentum=momentum, path=path):
                text = self._RESUMED.replace("OPTIONS", f'"{key}": True, {options}').replace("MOMENTUM", str(momentum)).replace("PATH", repr(path))
                return self.ran(ranks, text.replace("STAGES", str(stages)).replace("SAVES", str(saves)).replace("ORDER", str(order)))

            expected = ran(2, 2, True)
            self.assertEqual(expected[2], [{"fp16": "torch.float16", "bf16": "torch.bfloat16"}[key]])
            self.assertEqual(expected[3], ["master", "momentum_buffer"] if momentum else ["master"])
            self.assertEqual(expected[4], {"scale": 4096.0, "steps": 2, "last_overflow": -1, "hysteresis": 1} if key == "fp16" else None)
            for ranks, stages, order in ((2, 2, False), (1, 1, True)):
                self.assertEqual(ran(ranks, stages, False, order=order), expected)

    def test_arguments_of_the_loss_scale_are_checked(self):
        cases = [
            ("static_loss_scale=0", "ConfigError: smp.DistributedOptimizer(static_loss_scale=0): expected a number above 0"),
            ("static_loss_scale=8, dynamic_loss_scale=True", "ConfigError: smp.DistributedOptimizer(static_loss_scale=8, dynamic_loss_scale=True): a scale is fixed or changes; "
                                                             "leave one of them out"),
            ("dynamic_loss_scale=1", "ConfigError: smp.DistributedOptimizer(dynamic_loss_scale=1): expected True or False"),
            ("dynamic_loss_args={'min_scale': 1}", "ConfigError: smp.DistributedOptimizer(dynamic_loss_args={'min_scale': 1}) needs dynamic_loss_scale=True; give it, or leave "
                                                   "them out"),
            ("dynamic_loss_scale=True, dynamic_loss_args={'window': 1}", "ConfigError: smp.DistributedOptimizer(dynamic_loss_args={'window': …}): expected a dict of init_scale, "
                                                                        "scale_factor, scale_window, min_scale, delayed_shift, consecutive_hysteresis"),
            ("dynamic_loss_scale=True, dynamic_loss_args={'scale_window': 0}", "ConfigError: smp.DistributedOptimizer(dynamic_loss_args={'scale_window': 0}): expected a whole "
                                                                              "number of 1 or more"),
            ("dynamic_loss_scale=True, dynamic_loss_args={'init_scale': 3}", "UnsupportedError: smp.DistributedOptimizer(dynamic_loss_args={'init_scale': 3}) is not there yet: a "
                                                                            "scale begins as a power of 2, up to 2**126; give one"),
            ("dynamic_loss_scale=True, dynamic_loss_args={'scale_factor': 4}", "UnsupportedError: smp.DistributedOptimizer(dynamic_loss_args={'scale_factor': 4}) is not there "
                                                                              "yet: a scale is doubled and halved; leave it out"),
            ("dynamic_loss_scale=True, dynamic_loss_args={'min_scale': 2**40}", "ConfigError: smp.DistributedOptimizer(dynamic_loss_args={'min_scale': 1099511627776}): it is "
                                                                               "above init_scale=4294967296; lower it"),
        ]
        calls = ", ".join(f"told(lambda: smp.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))]), {arguments}))" for arguments, _ in cases)
        found = self.ran(1, f"""
    begin(fp16=True)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))]), static_loss_scale=None, dynamic_loss_scale=True)
    result = [[{calls}], [optimizer.loss_scale, optimizer.overflow, smp.state.cfg.fp16]]
""")
        self.assertEqual(found, [[text for _, text in cases], [2.0**32, False, True]])
        found = self.ran(1, """
    begin()
    result = told(lambda: smp.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))]), dynamic_loss_scale=True))
""")
        self.assertEqual(found, "ConfigError: smp.DistributedOptimizer(dynamic_loss_scale=True): there is a loss scale with `fp16` = true alone; give smp.init() that, or leave "
                                "it out")

    def test_what_does_not_go_with_a_loss_scale_is_named(self):
        found = self.ran(2, """
    begin(fp16=True)
    model = smp.DistributedModel(Net())
    @smp.step
    def train_step(*batch):
        model.backward(loss_of(model, *batch))
    batch = net_batches(0, 1)[0]
    train_step(*batch)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    late = told(optimizer.step)
    model.zero_grad()
    train_step(*batch)
    scaler = smp.amp.GradScaler()
    scaler.scale(torch.ones(1))
    result = [late, told(lambda: scaler.unscale_(optimizer)), told(optimizer.step)]
""")
        self.assertTrue(found[0].startswith("StateError: optimizer.step(): the step function has called backward() without a loss scale, since there was no optimizer; "), found)
        self.assertTrue(found[1].startswith("StateError: GradScaler: `fp16` = true has a loss scale of its own, "), found)
        self.assertEqual(found[2], None)


if __name__ == "__main__":
    main()
