"""Programs of smp's step functions, models and optimizers, and what is refused by name."""
from harness import RankServer, main
from smp_programs import Case

RankServer.imports = ("transformers.models.gpt2.modeling_gpt2", "torch._dynamo")  # which optimizers of torch import


class Programs(Case):
    def test_evaluation_gives_lists_of_values_and_outputs_on_every_rank(self):
        found = self.ran(2, """
    begin()
    class Net(Mlp):
        def forward(self, x):
            return self.layers(x)
    net, ((x, y), _) = Net(0.5), mlp_batches()
    expected = [[chunk.item() for chunk in (F.cross_entropy(net.eval()(x), y, reduction="none").reshape(4, 2).sum(1))], bits(torch.cat([net(chunk) for chunk in x.chunk(4)]))]
    model = smp.DistributedModel(net)
    @smp.step
    def test_step(x, y):
        output = model(x)
        loss = F.cross_entropy(output, y, reduction="sum")
        return loss.item(), {"logits": output, "kind": "test"}, (loss, None)
    model.eval()
    with torch.no_grad():
        values, outputs, (losses, nothing) = test_step(x, y)
    mine = [values, bits(outputs["logits"].concat()), outputs["kind"], [loss.item() for loss in losses.outputs], nothing, type(losses).__name__, losses.outputs[0].requires_grad]
    result = [[json.loads(text) for text in smp.state.world.gather(json.dumps(mine))], expected, model.engine("").core.pipeline]
""")
        (first, second), (losses, logits), _ = found
        self.assertEqual(first, second)
        self.assertEqual(first[1:3] + first[4:], [logits, ["test"] * 4, [None] * 4, "StepOutput", False])
        self.assertEqual(first[0], first[3])
        self.assert_close(first[0], losses)

    def test_the_optimizer_before_the_model_and_schedulers(self):
        text = """
    begin()
    net, batches = Mlp(), mlp_batches(6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    early = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    optimizer = smp.DistributedOptimizer(optimizer)
    model = smp.DistributedModel(net)
    late = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9)
    import warnings
    warnings.simplefilter("error")
    class Trainer:
        @smp.step
        def train_step(self, x, labels=None):
            loss = model(x, labels)
            loss.backward()
            return loss
    trainer, losses, rates = Trainer(), [], []
    for x, y in batches:
        losses.append([loss.item() for loss in trainer.train_step(x, labels=y).outputs])
        optimizer.step()
        early.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    result = [losses, rates, weights(model), isinstance(optimizer, torch.optim.SGD)]
"""
        alone, found = self.ran(1, text), self.ran(2, text)
        self.assertEqual(found, alone)
        self.assertEqual(found[1], [0.45, 0.225, 0.225, 0.1125, 0.1125, 0.05625])

    def test_trained_weights_are_those_of_plain_pytorch(self):
        found = self.ran(2, """
    begin()
    net, batches = Mlp(), mlp_batches(4)
    import copy
    plain_net = copy.deepcopy(net)
    stepper = torch.optim.AdamW(plain_net.parameters(), lr=0.01)
    for x, y in batches:
        stepper.zero_grad()
        for index in range(4):
            (plain_net(x.chunk(4)[index], y.chunk(4)[index]) / 4).backward()
        stepper.step()
    trained(net, batches, lambda parameters: torch.optim.AdamW(parameters, lr=0.01), steps=4)
    own = dict(trained.model.local_named_parameters())
    result = of_all({name: (parameter - dict(plain_net.named_parameters())[name]).abs().max().item() for name, parameter in own.items()})
""")
        self.assertEqual(len(found), 8)
        self.assertLess(max(found.values()), 1e-6)

    def test_inputs_of_later_stages_are_not_read(self):
        text = """
    begin()
    import collections
    from torch.utils.data._utils.collate import default_collate
    model = smp.DistributedModel(Mlp(0.1))
    @smp.step(non_split_inputs=["weight"])
    def train_step(batch, weight, factor=1.0, *, others, model):
        x, y = batch
        loss = model(x, y) * weight * factor + 0 * others["z"][0].abs().sum()
        model.backward(loss)
        return loss, others["note"]
    found = []
    for x, y in mlp_batches():
        given = [(x, y), torch.tensor(0.5), 2.0, {"z": [torch.ones(4, 2, dtype=torch.complex64)], "note": "first", 3: None}]
        if smp.pp_rank():
            given = [(torch.empty(0), torch.empty(0)), torch.empty(0), 1.0, {"z": [torch.empty(0)], "note": "other", 3: None, "more": 1}]
        loss, note = train_step(*given[:3], others=given[3], model=model)
        found.append([[one.item() for one in loss.outputs], note])
    result = [[json.loads(text) for text in smp.state.world.gather(json.dumps(found))], gradients(model)]
"""
        alone, found = self.ran(1, text), self.ran(2, text)
        self.assertEqual(found[0], alone[0] * 2)
        self.assertEqual(found[1], alone[1])
        self.assertEqual(found[0][0][0][1], ["first"] * 4)

    def test_evaluation_between_training_in_each_mode(self):
        for mode in ("contextlib.nullcontext()", "torch.no_grad()", "torch.inference_mode()"):
            with self.subTest(mode):
                text = f"""
    begin()
    model = smp.DistributedModel(Mlp(0.1))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    @smp.step
    def evaluate(x, y):
        return model(x, y)
    @smp.step
    def train_step(x, y):
        loss = model(x, y)
        model.backward(loss)
        return loss
    def evaluated(batch):
        model.eval()
        with {mode}:
            losses = [loss.item() for loss in evaluate(*batch).outputs]
        model.train()
        return losses
    result, batches = [], mlp_batches(3)
    for batch in batches:
        result.append([loss.item() for loss in train_step(*batch).outputs])
        optimizer.step()
        optimizer.zero_grad()
        result.append(evaluated(batch))
"""
                self.assertEqual(self.ran(2, text), self.ran(1, text))

    def test_hooks_and_what_is_local(self):
        found = self.ran(2, """
    begin()
    net = Cnn()
    net.register_buffer("table", torch.ones(3), persistent=False)
    model, told_of = smp.DistributedModel(net), []
    early = [told(model.local_parameters), model.partitioned]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.register_post_partition_hook(lambda *given: told_of.append(["partition", given == (model, optimizer), model.partitioned]))
    model.register_post_step_hook(lambda *given: told_of.append(["step", given == (model, optimizer)]))
    model.register_post_step_hook(lambda *_: told_of.append("removed")).remove()
    calls = []
    @smp.step
    def train_step(x, y):
        calls.append(smp.is_tracing())
        loss = model(x, y)
        model.backward(loss)
    before = torch.random.get_rng_state()
    train_step(*cnn_batches()[0])
    smp.barrier(); smp.dp_barrier(); smp.mp_barrier()
    mine = [[name for name, _ in model.local_named_parameters()], [name for name, _ in model.local_named_buffers()], [name for name, _ in model.local_named_modules()],
            len(list(model.local_parameters())), len(list(model.local_buffers())), len(list(model.local_modules())), model.get_module() is net is model.module]
    result = [early, told_of, len(calls), [json.loads(text) for text in smp.state.world.gather(json.dumps(mine))], [name for name, _ in net.named_parameters()],
              [name for name, _ in net.named_modules()]]
""")
        early, told_of, calls, (first, second), parameters, modules = found
        self.assertEqual(early, ["StateError: local_named_parameters(): the model's tensors have no stages yet; they get them in the first call of a @smp.step function", False])
        self.assertEqual(told_of, [["partition", True, True], ["step", True]])
        self.assertEqual(calls, 5)  # the first micro-batch, which begins anew
        self.assertEqual(sorted(first[0] + second[0]), sorted(parameters))
        self.assertIn("table", first[1])
        self.assertIn("table", second[1])
        self.assertEqual(sorted(first[2] + second[2]), sorted(modules))
        for mine in (first, second):
            self.assertEqual(mine[3:6], list(map(len, mine[:3])))
            self.assertTrue(mine[0] and mine[6])

    def test_the_first_step_begins_anew_with_the_same_random_numbers(self):
        text = """
    import random
    import numpy
    begin()
    random.seed(1); numpy.random.seed(2)
    model, drawn = smp.DistributedModel(Mlp()), []
    @smp.step
    def train_step(x, y):
        drawn.append([random.random(), numpy.random.rand(), torch.rand(1).item()])
        model.backward(model(x, y))
    train_step(*mlp_batches()[0])
    result = [drawn[-4:], torch.rand(1).item()]
"""
        self.assertEqual(self.ran(2, text), self.ran(1, text))

    def test_copies_of_the_model_average_gradients(self):
        text = """
    smp.init({"partitions": 2 if int(os.environ["WORLD_SIZE"]) == 4 else 1, "microbatches": 4, "ddp": True})
    torch.manual_seed(5 + smp.rank())  # other weights than rank 0's
    net = Mlp(0.1)
    torch.manual_seed(5 + smp.rdp_rank())
    batches = mlp_batches()
    result = trained(net, batches, lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
"""
        alone, found = self.ran(2, text), self.ran(4, text)
        self.assertEqual(found[0], alone[0])
        self.assertEqual(found[1], alone[1])
        self.assertEqual(found[2:], ["interleaved", [0, 1]])


class Updates(Case):
    def test_adagrad_has_the_bits_of_torchs_fused_one(self):
        """Its default differs from that in the last bit, which this model makes 3e-5 of in four steps."""
        found, expected = self.ran(2, """
    import copy
    begin()
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.up, self.norm, self.down = nn.Embedding(12, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        def forward(self, x, y):
            h = self.norm(F.relu(self.up(self.embedding(x))))
            return F.cross_entropy(torch.tanh(self.down(h)) @ self.embedding.weight.t(), y)
    net = Net()
    other, batches = copy.deepcopy(net), [(torch.randint(12, (8,)), torch.randint(12, (8,))) for _ in range(4)]
    updates = torch.optim.Adagrad(other.parameters(), lr=0.1, fused=True)
    for batch in batches:
        updates.zero_grad()
        for parts in zip(*(tensor.chunk(MICRO_BATCHES) for tensor in batch)):
            (other(*parts) / MICRO_BATCHES).backward()
        updates.step()
    result = [trained(net, batches, lambda parameters: torch.optim.Adagrad(parameters, lr=0.1), steps=4)[1], {name: bits(value) for name, value in other.state_dict().items()}]
""")
        self.assertEqual(found, expected)


class Buffers(Case):
    def test_of_data_parallel_ranks_are_their_own_or_rank_0s(self):
        for partitions, ranks in ((1, 2), (2, 4)):
            for shares in (True, False):
                with self.subTest(partitions=partitions, shares=shares):
                    found = self.ran(ranks, f"""
    begin(partitions={partitions}, ddp=True)
    net = Cnn()
    model = smp.DistributedModel(net, broadcast_buffers={shares})
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.125))
    train_step = stepping(model)
    torch.manual_seed(7 + smp.rdp_rank())
    for batch in cnn_batches(2):
        optimizer.zero_grad()
        train_step(*batch)
        optimizer.step()
    names = [name for name, _ in net.named_buffers()]
    whole = model.state_dict()
    part = [{{name: bits(whole[name]) for name in names}}, {{name: bits(whole[name]) for name in whole if name not in names}}]
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps([smp.rdp_rank(), part]))]
""")
                    by_copy = {copy: part for copy, part in found}
                    self.assertEqual(by_copy[0][1], by_copy[1][1])
                    different = {name for name, value in by_copy[0][0].items() if by_copy[1][0][name] != value}
                    self.assertEqual(different, set() if shares else {"norm1.running_mean", "norm1.running_var", "norm2.running_mean", "norm2.running_var"})

    def test_the_option_is_compared(self):
        found = self.ran(2, """
    begin(partitions=1, ddp=True)
    texts = [told(lambda: smp.DistributedModel(Cnn(), broadcast_buffers=smp.rank() == 0)), told(lambda: smp.DistributedModel(Cnn(), broadcast_buffers=2))]
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps(texts))]
""")
        for rank, (text, other) in enumerate(found):
            self.assertEqual(text, f"ConfigError: smp.DistributedModel: the ranks' configurations differ in `broadcast_buffers` (here {rank == 0}); give every rank the same")
            self.assertIn("broadcast_buffers=2): expected True or False", other)


class Faults(Case):
    def test_a_gradient_that_another_stage_has_or_none(self):
        found = self.ran(2, """
    begin(auto_partition=False, default_partition=0)
    net = Mlp()
    for index in (5, 7):
        smp.set_partition(net.layers[index], 1)
    model = smp.DistributedModel(net)
    @smp.step
    def train_step(x, y):
        early = model.get_module().layers[:4](x)
        model.backward(early.square().mean())
    x, y = mlp_batches()[0]
    train_step(x, y)
    texts = [told(lambda: str(safe_get_full_grad(net.layers[index].weight) is not None)) for index in (0, 7)]
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps(texts))]
""")
        (own, other), (first, none) = found
        self.assertEqual(own, "True")
        for text, name, stage in ((other, "layers.7.weight", 1), (first, "layers.0.weight", 0)):
            self.assertEqual(text, f"StateError: safe_get_full_grad: parameter '{name}' is on stage {stage}, which has its gradient and its states: every rank of that "
                                   "stage calls it there, of model.local_parameters()")
        self.assertIn("no parameter that this rank trains has a gradient since the last step", none)
        self.assertIn("between the step function and optimizer.step(), and not on a stage whose parameters the loss does not need", none)

    _TOLD = """
    begin()
    model = smp.DistributedModel(Mlp())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = mlp_batches()
    def everywhere(text):
        return smp.state.world.gather(str(text))
"""

    def test_an_exception_on_one_rank_is_told_on_every_rank(self):
        found = self.ran(2, """
    begin()
    class Bad(Mlp):
        def forward(self, x, y):
            raise KeyError("of the model")
    model = smp.DistributedModel(Bad())
    @smp.step
    def train_step(x, y):
        model.backward(model(x, y))
    result = smp.state.world.gather(str(told(lambda: train_step(*mlp_batches()[0]))))
    with torch.inference_mode():
        result.append(told(lambda: train_step(*mlp_batches()[0])))
""")
        self.assertEqual(found[:2], ["KeyError: 'of the model'", "StateError: smp: rank 0 could not partition the model: KeyError: 'of the model'"])
        self.assertIn("StateError: smp: the model would get its stages inside of torch.inference_mode()", found[2])
        for when in ("before it calls the model", "in training"):
            found = self.ran(2, self._TOLD + f"""
    fails = {when == "before it calls the model"}
    @smp.step
    def train_step(x, y):
        if fails and smp.rank() == 1:
            raise KeyError("of the program")
        model.backward(model(x, y))
    if not fails:
        train_step(*batches[0])
        fails = True
    text = told(lambda: train_step(*batches[0]))
    result = everywhere(text)
""")
            self.assertEqual(found[1].partition("\n")[0], "KeyError: 'of the program'", when)
            self.assertIn("of the program", found[0], when)
            self.assertIn("rank 1" if fails_early(when) else "stage 1", found[0], when)

    def test_other_dropout_on_one_rank_names_the_operators(self):
        found = self.ran(2, """
    begin()
    net = Mlp(0.5 if int(os.environ["RANK"]) else 0.0)
    model = smp.DistributedModel(net)
    @smp.step
    def train_step(x, y):
        model.backward(model(x, y))
    text = told(lambda: train_step(*mlp_batches()[0]))
    result = smp.state.world.gather(text)
""")
        for text in found:
            self.assertIn("DivergedError", text)
            self.assertIn("dropout", text)

    def test_functions_arguments_and_modes_that_differ_by_rank_are_named(self):
        found = self.ran(2, self._TOLD + """
    @smp.step
    def one(x, y): model.backward(model(x, y))
    @smp.step
    def other(x, y, more=None): model.backward(model(x, y))
    rank = smp.rank()
    result = [everywhere(told(lambda: (other if rank else one)(*batches[0]))), everywhere(told(lambda: model.train(rank == 0) and one(*batches[0])))]
    model.train()
    class Extra: pass
    result += [everywhere(told(lambda: other(*batches[0], more=None if rank else Extra()))), everywhere(told(lambda: one(torch.ones(3, 2), torch.ones(4))))]
""")
        for text in found[0]:
            self.assertIn("StateError: smp.step: one(): the step function is", text.replace("other():", "one():").replace("<locals>.", ""))
        for text in found[1]:
            self.assertIn("model.training is True on rank 0 and False on rank 1; every rank runs the same program", text)
        for text in found[2]:
            self.assertIn("the arguments[1]['more'] is a __main__.Extra on the first rank of the pipeline, and it is None on stage 1; ", text)
        for text in found[3]:
            self.assertIn("ShapeError: smp.step: `x` has 3 in dim 0, fewer than `microbatches` = 4", text)

    def test_calls_at_the_wrong_moment_are_named(self):
        found = self.ran(2, self._TOLD + """
    result = [told(lambda: model(*batches[0])), told(lambda: model.backward(torch.ones(1))), told(optimizer.step)]
    @smp.step
    def forgets(x, y): return x.sum()
    result.append(told(lambda: forgets(*batches[0])))
    @smp.step
    def train_step(x, y):
        model.backward(model(x, y))
    train_step(*batches[0])
    optimizer.step()
    result += [told(lambda: train_step(*batches[0])), told(optimizer.step)]
    optimizer.zero_grad()
    result += [told(optimizer.step), told(lambda: torch.optim.SGD(model.parameters(), lr=0.1).step())]
    train_step(*batches[0])
    other = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    result += [told(other.step), told(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)), told(optimizer.step)]
""")
        for text, part in zip(found, [
                "StateError: DistributedModel: a call outside of a @smp.step function", "StateError: DistributedModel.backward(): a call outside of a @smp.step function",
                "StateError: optimizer.step(): the model's tensors have no stages yet", "forgets() has not called the model",
                "StateError: smp.step: gradients of the optimizer.step() before were not dropped", "", "StateError: optimizer.step(): no step function has called backward()",
                "StateError: SGD.step(): gradients of an smp.DistributedModel are not in .grad", "UnsupportedError: optimizer.step(): this model is stepped by another optimizer", "UnsupportedError: torch.nn.utils.clip_grad_norm_: gradients of an",
                "None"], strict=True):
            self.assertIn(part, str(text))

    def test_an_optimizer_without_a_parameter_is_refused_on_every_rank(self):
        found = self.ran(2, self._TOLD + """
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(list(model.parameters())[:-1], lr=0.1))
    @smp.step
    def train_step(x, y): model.backward(model(x, y))
    train_step(*batches[0])
    result = everywhere(told(optimizer.step))
    result.append(told(smp.DistributedOptimizer(torch.optim.SGD(model.local_parameters(), lr=0.1)).step))
""")
        text = "UnsupportedError: optimizer: 1 parameters require gradients and are in no group: layers.7.bias; add them, or freeze them by requires_grad_(False)"
        self.assertEqual([one[:len(text)] for one in found[:2]], [text, text])
        self.assertIsNone(found[2])

    def test_what_is_not_there_yet_is_refused_by_name(self):
        found = self.ran(2, self._TOLD + """
    refused = []
    for name in ("half",):
        refused.append([name, told(getattr(model, name))])
    refused.append(["bfloat16", told(lambda: model.to(torch.bfloat16))])
    refused += [["detach_outputs", told(lambda: smp.step(detach_outputs=False))], ["closure", told(lambda: optimizer.step(lambda: 1.0))]]
    for module in (torch.jit.script(nn.Linear(2, 2)), torch.compile(nn.Linear(2, 2)), nn.DataParallel(nn.Linear(2, 2)), nn.Linear(2, 2, device="meta"), model):
        refused.append(["wrap", told(lambda: smp.DistributedModel(module))])
    is_same = model.to("cpu") is model is model.cuda()
    result = [refused, is_same]
""")
        self.assertTrue(found[1])
        for name, text in found[0]:
            self.assertTrue(str(text).startswith("UnsupportedError: "), (name, text))
            if name == "detach_outputs":
                self.assertIn("results are detached, since the graph behind them is on several ranks, and its backward passes have run; call model.backward() inside", text)
            elif name in ("wrap",):
                self.assertIn("smp.DistributedModel: ", text)
            else:
                self.assertTrue("not there yet" in text, (name, text))

    def test_what_a_step_function_may_not_do_is_refused_by_name(self):
        for call, part in (("torch.autograd.grad(loss, x)", "torch.autograd.grad() inside of a step function is not there yet: gradients are there when the "),
                           ("model.backward(loss, create_graph=True)", "backward(): create_graph=True is not there yet: gradients are there when the forward pass of the micro-batch has ended"),
                           ("loss.backward(create_graph=True)", "backward(): create_graph=True is not there yet: gradients are there when"), ("loss.backward(inputs=[x])", "backward(inputs=…) is not there yet: one backward pass for each micro-batch"),
                           ("torch.func.vmap(lambda row: row * 2)(loss[None])", "a transform of torch.func (vmap, grad, jvp) of a tensor of stage 1 is not there yet"),
                           ("train_step(x, y)", "called inside of another step function"), ("loss.is_shared()", "None")):
            with self.subTest(call):
                found = self.ran(2, self._TOLD + f"""
    @smp.step
    def train_step(x, y):
        loss = model(x, y)
        {call}
    result = everywhere(told(lambda: train_step(*batches[0])))
""")
                self.assertIn(part, found[0])
                if part == "None":
                    self.assertEqual(found, ["[None, None, None, None]"] * 2)


def fails_early(when):
    """Whether the model has no stages yet."""
    return when == "before it calls the model"


if __name__ == "__main__":
    main()
