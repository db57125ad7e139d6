"""Ranks that share layers under smp's names train as one process does, and save what any number of ranks loads."""
from harness import RankServer, main
from smp_programs import Case

RankServer.imports = ("transformers.models.gpt2.modeling_gpt2", "torch._dynamo")  # which optimizers of torch import
LARGEST = 1e-5

# `DEGREE` ranks share layers; each copy of the model has its share of the samples.
_PROGRAM = """
    size = int(os.environ.get("WORLD_SIZE", 1))
    degree = min(size, DEGREE)
    smp.init({"partitions": 1, "microbatches": 2, **({"tensor_parallel_degree": degree, "ddp": True, "prescaled_batch": PRESCALED, **OPTIONS} if degree > 1 else {})})
    torch.manual_seed(5)

    def numbers(tensor):
        return tensor.detach().double().flatten().tolist()

    def own_samples(batch):
        count, number = (smp.rdp_size(), smp.rdp_rank()) if PRESCALED else (smp.dp_size(), smp.dp_rank())
        return [tensor.chunk(count)[number] for tensor in batch]

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm = smp.nn.DistributedTransformerLMHead(2, 4, 8, 32, 64, 48, 16, attention_dropout_prob=0.0, hidden_dropout_prob=0.0, causal_mask_size=16,
                                                          pre_layernorm=True, post_layernorm=False, num_token_types=2)
        def forward(self, ids):
            return self.lm((ids, None, ids % 2, None, None))

    def head_loss(model, ids):
        logits = model(ids % 48)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten() % 48), logits.detach()

    def gpt2_loss(model, ids):
        found = model(input_ids=ids, labels=ids)
        return found.loss, found.logits.detach()

    def marked_gpt2():
        with smp.tensor_parallelism():
            return gpt2(True)

    def marked_llama():
        import transformers
        with smp.tensor_parallelism():
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                                                         num_key_value_heads=2, vocab_size=64, max_position_embeddings=16))

    def batches(count=3):
        torch.manual_seed(9)
        return [(torch.randint(48, (8, 12)),) for _ in range(count)]

    def made(net, loss_of, make=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)):  # a key's bias has gradients of noise
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(make(model.parameters()))
        @smp.step
        def train_step(*batch):
            loss, logits = loss_of(model, *batch)
            model.backward(loss)
            return loss, logits
        return model, optimizer, train_step

    def gradients_of(model):
        return of_all({name: numbers(safe_get_full_grad(p)) for name, p in model.local_named_parameters()})

    def taught(model, optimizer, train_step, batches, max_norm=None):
        found = []
        for batch in batches:
            optimizer.zero_grad()
            losses, logits = train_step(*own_samples(batch))
            loss = losses.reduce_mean()
            smp.state.world.all_reduce(loss, "sum")
            one = {"loss": [loss.item() / smp.size()], "sizes": list(logits.outputs[0].shape[1:]), "gradients": gradients_of(model)}
            if max_norm is not None:
                one["norm"] = [optimizer.clip_master_grads(max_norm).item()]
                one["clipped"] = gradients_of(model)
            optimizer.step()
            found.append(one)
        return found

    def state_of(model):
        return {name: numbers(tensor) for name, tensor in sorted(model.state_dict().items()) if tensor.is_floating_point()}
"""


def furthest(found, expected):
    """(the greatest difference of two structures of numbers, over the greatest number of its list, where)."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), (sorted(found), sorted(expected))
        return max((furthest(found[name], expected[name]) + (name,) for name in expected), key=lambda one: one[0])
    if isinstance(expected, list) and expected and isinstance(expected[0], (list, dict)):
        return max((furthest(one, other) for one, other in zip(found, expected, strict=True)), key=lambda one: one[0])
    size = max(0.01, *map(abs, expected))
    differences = [abs(one - other) / size for one, other in zip(found, expected, strict=True)]
    return (float("inf") if any(one != one for one in differences) else max(differences),)


class SmpTensor(Case):
    def on(self, ranks, text, degree=2, prescaled=True, **options):
        values = {"DEGREE": degree, "OPTIONS": options, "PRESCALED": prescaled}
        program = _PROGRAM
        for name, value in values.items():
            program = program.replace(name, repr(value))
        return self.ran(ranks, program + text)

    def assert_close(self, found, expected, largest=LARGEST):
        difference, *where = furthest(found, expected)
        self.assertLessEqual(difference, largest, where)


_TRAINS = """
    model, optimizer, train_step = made(MODEL)
    result = [taught(model, optimizer, train_step, batches()[:2]), state_of(model)]
"""
_MODELS = {"gpt2": "marked_gpt2(), gpt2_loss", "head": "Head(), head_loss"}


class Trains(SmpTensor):
    def test_as_one_process(self):
        for name, model in _MODELS.items():
            text = _TRAINS.replace("MODEL", model)
            expected = self.on(1, text)
            for ranks, options in ((2, {}), (4, {"optimize": "speed"}), (2, {"optimize": "speed", "prescaled": False}), (4, {"prescaled": False})):
                with self.subTest(name, ranks=ranks, **options):
                    self.assert_close(self.on(ranks, text, **options), expected)

    def test_over_stages_as_one_process(self):
        for name, model in _MODELS.items():
            text = _TRAINS.replace("MODEL", model)
            expected = self.on(1, text)
            for ranks, options in ((4, {}), (8, {"optimize": "speed", "prescaled": False})):
                with self.subTest(name, ranks=ranks, **options):
                    self.assert_close(self.on(ranks, text, partitions=2, **options), expected)

    def test_of_results_each_rank_has_the_rows_of_its_own_samples(self):
        text = """
    model, optimizer, train_step = made(marked_gpt2(), gpt2_loss)
    @smp.step(input_split_axes={"kept": 1}, non_split_inputs=["whole"])
    def evaluate(ids, *more, whole=None, **others):
        found = model(input_ids=ids).logits
        return {"logits": found, "ids": [ids + 0, *[one["ids"] for one in more], others["other"]], "mean": found.mean(), "sum of whole": whole.sum()}
    ids, = batches()[0]
    own, = own_samples((ids,))
    with torch.no_grad():
        found = evaluate(own, {"ids": own + 1, "what": 3}, whole=torch.arange(3.0), other=(own + 2)[:, :, None])
    rows = {json.dumps(ids): [numbers(logits), more, further, other] for ids, logits, more, further, other in
            zip(*([row for row in one.concat().tolist()] for one in (found["ids"][0],)), found["logits"].concat(), *(one.concat().tolist() for one in found["ids"]))}
    result = [of_all(rows), [list(one.shape) for one in found["logits"].outputs], found["mean"].reduce_mean().item(), found["sum of whole"].outputs[0].item()]
"""
        expected = self.on(1, text)
        for ranks in (2, 4):
            found = self.on(ranks, text, prescaled=False)
            self.assertEqual(found[1], [[4 // ranks, 12, 64]] * 2)
            self.assertEqual(len(found[0]), 8)
            for ids, (logits, *others) in found[0].items():
                self.assert_close(logits, expected[0][ids][0])
                self.assertEqual(others, expected[0][ids][1:])
            self.assertEqual(found[3], 3.0)
        self.assert_close([self.on(2, text, prescaled=False)[2]], [expected[2]])

    def test_gradients_are_clipped_by_the_norm_of_all_slices(self):
        text = """
    model, optimizer, train_step = made(MODEL)
    result = taught(model, optimizer, train_step, batches()[:2], max_norm=0.25)
"""
        for name, model in {**_MODELS, "shared keys": "marked_llama(), gpt2_loss"}.items():
            degree = 4 if name == "shared keys" else 2
            with self.subTest(name):
                expected = self.on(1, text.replace("MODEL", model))
                self.assertGreater(expected[0]["norm"][0], 0.25)
                self.assert_close(self.on(degree, text.replace("MODEL", model), degree), expected)

    def test_dropout_is_the_same_on_ranks_that_share_layers_whatever_their_seeds(self):
        text = """
    net = Head()
    kept = []
    net.lm.transformer.register_forward_hook(lambda module, args, output: kept.append(bits(output[0])))
    model, optimizer, train_step = made(net, head_loss)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = RATE
    batch = batches()[0]
    torch.manual_seed(smp.rank())
    train_step(*batch)
    optimizer.step()
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps(kept))]
"""
        with_dropout, without = (self.on(2, text.replace("RATE", rate), optimize="speed") for rate in ("0.5", "0.0"))
        self.assertEqual(with_dropout[0], with_dropout[1])
        self.assertNotEqual(with_dropout[0], without[0])


_SAVES = """
    model, optimizer, train_step = made(MODEL)
    taught(model, optimizer, train_step, batches()[:1])
    if smp.rdp_rank() == 0:
        smp.save({"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict(), "epoch": 1}, FOLDER + "/partial.pt")
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}
        if smp.rank() == 0:
            smp.save(whole, FOLDER + "/full.pt", partial=False)
    smp.barrier()
    result = [taught(model, optimizer, train_step, batches()[1:]), state_of(model)]
"""
_LOADS = """
    model, optimizer, train_step = made(MODEL)
    if LATE:
        taught(model, optimizer, train_step, batches()[:2])
        with torch.no_grad():
            [parameter.add_(1) for parameter in model.module.parameters()]
    found = smp.load(FOLDER + "/" + FILE, partial=FILE == "partial.pt")
    assert found["epoch"] == 1
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    result = [taught(model, optimizer, train_step, batches()[1:]), state_of(model)]
"""


class Saves(SmpTensor):
    optimizers = ("AdamW(p, lr=1e-2, eps=1e-3)",)
    cases = {2: [(1, "partial.pt"), (4, "full.pt")], 1: [(2, "partial.pt")]}  # by the ranks that save: those that load

    def filled(self, text, optimizer, file="", late=False):
        model = f"{_MODELS['head']}, lambda p: torch.optim.{optimizer}"
        for name, value in {"MODEL": model, "FOLDER": repr(str(self.folder)), "FILE": repr(file), "LATE": repr(late)}.items():
            text = text.replace(name, value)
        return text

    def test_what_ranks_with_slices_save_any_number_of_ranks_loads(self):
        for optimizer in self.optimizers:
            for saving, loads in self.cases.items():
                expected = self.on(saving, self.filled(_SAVES, optimizer))
                for loading, file in loads:
                    with self.subTest(optimizer, saving=saving, loading=loading, file=file):
                        self.assert_close(self.on(loading, self.filled(_LOADS, optimizer, file, late=file == "full.pt")), expected)


class Cuts(SmpTensor):
    """Cuts by marks and by classes, as a program sees them."""

    def test_marks_and_own_modules_are_cut_and_all_else_is_whole(self):
        text = """
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            with smp.tensor_parallelism():
                self.marked, self.words = nn.Linear(16, 24), nn.Embedding(48, 16)
                with smp.tensor_parallelism(enabled=False):
                    self.unmarked = nn.Linear(24, 24)
            self.own, self.plain, self.few = smp.nn.DistributedLinear(24, 24), nn.Linear(24, 16, bias=False), smp.nn.DistributedLinear(1, 16)
            self.block = smp.nn.DistributedTransformerLayer(3, 8, 16, 32, 0.0, 0.0)  # heads that two ranks cannot share
            self.lm_head = nn.Linear(16, 48)
            self.register_buffer("seen", torch.zeros(()))
        def forward(self, ids):
            hidden = self.plain(self.own(self.unmarked(self.marked(self.words(ids)))))
            hidden = self.block((hidden + self.few(ids[..., None] / 48), None))[0]
            return self.lm_head(hidden)
    net = Mixed()
    smp.set_tensor_parallelism(net.lm_head, False)
    model, optimizer, train_step = made(net, head_loss)
    found = [taught(model, optimizer, train_step, batches()[:2]), state_of(model)]
    named = dict(model.module.named_parameters())
    result = [found, [name for name, one in named.items() if model.is_distributed_parameter(one)], [name for name, one in named.items() if model.is_scaled_batch_parameter(one)],
              [name for name, inner in model.module.named_modules() if any(inner is one for one in model.distributed_modules())],
              [name for name, _ in model.scaled_batch_reducer_named_parameters()], len(list(model.default_reducer_named_parameters())) + len(list(model.scaled_batch_reducer_named_parameters())) - len(named),
              [model.is_distributed_buffer(net.seen), list(net.marked.weight.shape), found[0][0]["sizes"]]]
"""
        alone, found = self.on(1, text), self.on(2, text)
        self.assert_close(found[0], alone[0])
        weights = ["marked.weight", "words.weight", "own.weight", "block.output.dense1.weight", "block.output.dense1.bias", "block.output.dense2.weight"]
        self.assertEqual(sorted(found[1]), sorted(weights))
        biases = ["marked.bias", "own.bias", "block.output.dense2.bias"]
        self.assertEqual(sorted(found[2]), sorted(weights + biases))
        self.assertEqual(found[3], ["marked", "words", "own", "block.output.dense1", "block.output.dense2"])
        self.assertEqual(found[4], found[2])
        self.assertEqual(found[5:], [0, [False, [24, 16], [12, 48]]])
        self.assertEqual(alone[1:5], [[], [], [], []])

    def test_of_a_model_of_transformers_marked_layers_alone(self):
        text = """
    net = gpt2(True)
    smp.set_tensor_parallelism(net.transformer.h[1])
    model, optimizer, train_step = made(net, gpt2_loss)
    result = [[taught(model, optimizer, train_step, batches()[:2]), state_of(model)], [name for name, one in model.module.named_parameters() if model.is_distributed_parameter(one)]]
"""
        alone, found = self.on(1, text), self.on(2, text)
        self.assert_close(found[0], alone[0])
        self.assertEqual(found[1], [f"transformer.h.1.{name}" for name in ("attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_fc.bias",
                                                                           "mlp.c_proj.weight")])

    def test_without_a_step_function_and_after_cpu_the_model_computes_as_before(self):
        found = self.on(2, """
    torch.manual_seed(5)
    plain = Head()
    ids = batches()[0][0] % 48
    expected = plain(ids)
    torch.manual_seed(5)
    model, optimizer, train_step = made(Head(), head_loss)
    @smp.step
    def evaluate(ids):
        return model(ids)
    with torch.no_grad():
        within = evaluate(ids).concat()
    outside = told(lambda: numbers(model(ids)))
    model.cpu()
    differences = [(one - expected).abs().max().item() for one in (within, model(ids))]
    result = [outside, differences, [list(p.shape) for p in model.module.parameters()] == [list(p.shape) for p in plain.parameters()]]
""")
        self.assertTrue(found[0].startswith("StateError: DistributedModel: a call outside of a @smp.step function"), found[0])
        self.assertLess(max(found[1]), LARGEST)
        self.assertTrue(found[2])


class States(SmpTensor):
    def test_of_a_copy_are_whole_or_each_ranks_own(self):
        found = self.on(4, """
    model, optimizer, train_step = made(Head(), head_loss)
    taught(model, optimizer, train_step, batches()[:1])
    own, numbered = model.local_state_dict(), optimizer.local_state_dict()["state"]
    shapes = {name: list(p.shape) for name, p in model.module.named_parameters()}
    assert all(list(value.shape) == shapes[name] for name, value in own.items() if name != "_smp_is_partial")
    mine = [len(model.state_dict(gather_to_rank0=True)), len(model.state_dict()), sorted(own), sorted(numbered), len(optimizer.state_dict()["state"])]
    result = [[json.loads(text) for text in smp.state.world.gather(json.dumps(mine))], sorted(shapes)]
""")
        ranks, names = found
        self.assertEqual([one[0] for one in ranks], [len(names), 0, len(names), 0])
        self.assertEqual({(one[1], one[4]) for one in ranks}, {(len(names), len(names))})
        self.assertEqual(ranks[:2], [[len(names), *ranks[2][1:]], ranks[3]])
        self.assertEqual(sorted(ranks[0][2] + ranks[1][2]), sorted([*names, "_smp_is_partial", "_smp_is_partial"]))
        self.assertEqual(sorted(ranks[0][3] + ranks[1][3]), list(range(len(names))))


class Refusals(SmpTensor):
    def test_keys_that_do_not_fit_are_named_with_their_fix(self):
        found = self.ran(4, """
    def read(**options):
        return told(lambda: smp.init({"partitions": 1, "ddp": True, "prescaled_batch": True, **options}))
    result = [read(tensor_parallel_degree=0), read(tensor_parallel_degree=3), read(tensor_parallel_degree=2, ddp=False),
              read(tensor_parallel_degree=2, partitions=4), read(tensor_parallel_degree="two"), read(tensor_parallel_degree=2, prescaled_batch=1)]
""")
        expected = ["ConfigError: smp.init: `tensor_parallel_degree` = 0; expected a whole number of 1 or more",
                    "ConfigError: smp.init: `pipeline_parallel_degree` = 1 · `tensor_parallel_degree` = 3 does not divide the 4 ranks; start a multiple of 3 ranks",
                    "ConfigError: smp.init: `tensor_parallel_degree` = 2 needs `ddp` = true; give it",
                    "ConfigError: smp.init: `pipeline_parallel_degree` = 4 · `tensor_parallel_degree` = 2 does not divide the 4 ranks; start a multiple of 8 ranks",
                    'ConfigError: smp.init: `tensor_parallel_degree` = "two"; expected a whole number of 1 or more',
                    "ConfigError: smp.init: `prescaled_batch` = 1; expected true or false"]
        for text, part in zip(found, expected, strict=True):
            self.assertTrue(text.startswith(part), (text, part))

    def test_other_samples_on_ranks_that_share_layers(self):
        found = self.on(4, """
    model, optimizer, train_step = made(Head(), head_loss)
    text = told(lambda: train_step(torch.full((4, 12), 1 + smp.rank() // 3)))
    result = smp.state.world.gather(text)
""")
        self.assertEqual(len(set(found)), 1)
        self.assertTrue(found[0].startswith("StateError: smp.step: train_step()") or "train_step" in found[0], found[0])
        self.assertIn("the arguments are others on rank 3 than on rank 2, and these share layers; with `prescaled_batch` = true", found[0])

    def test_samples_that_cannot_be_joined_and_results_that_are_not_by_samples(self):
        found = self.on(2, """
    model, optimizer, train_step = made(Head(), head_loss)
    def of(call, *args, **options):
        @smp.step(**options)
        def called(*args, whole=None):
            return call(*args)
        texts = smp.state.world.gather(json.dumps(told(lambda: called(*args[:-1], whole=args[-1]))))
        return [json.loads(text) for text in texts]
    rank, ids, first = smp.rank(), torch.ones(4, 3), lambda one, *others: one
    result = [of(first, ids[:2 + 2 * rank], None), of(first, ids, rank), of(first, ids, torch.tensor([rank]), non_split_inputs=["whole"]), of(first, {ids}, None),
              of(first, ids.clone().requires_grad_(), None), of(lambda one: one.sum(0), ids, None), of(first, ids.T.contiguous(), None, input_split_axes={"args": 1})]
""", prescaled=False)
        differ = "StateError: smp.step: {}: the arguments of ranks 0 and 1, which share layers, differ in more than the numbers of their samples"
        parts = [differ, differ, differ, "UnsupportedError: smp.step: {}: `args` has a set, whose samples are not joined", "UnsupportedError: smp.step: {}: `args` requires a gradient",
                 "UnsupportedError: smp.step: {}: a result of the sizes [3] is not by samples in dim 0, of which there are [4] on the ranks",
                 "UnsupportedError: smp.step: {}: a result of the sizes [3, 4] is not by samples in dim 0"]
        for texts, part in zip(found, parts, strict=True):
            for text in texts:
                self.assertTrue(str(text).startswith(part.replace("{}", text.split(": ")[2])), (text, part))

    def test_what_would_make_other_modules(self):
        found = self.on(2, """
    class Ours(nn.Linear):
        pass
    class Theirs(smp.nn.DistributedModule):
        pass
    smp.tp_register_with_module(Ours, Theirs)
    def of(make, **options):
        with smp.tensor_parallelism(**options):
            net = make()
        return told(lambda: smp.DistributedModel(net))
    import transformers
    family = transformers.GPTJForCausalLM(transformers.GPTJConfig(n_embd=32, n_layer=1, n_head=4, vocab_size=64, n_positions=16, rotary_dim=4))
    smp.set_tensor_parallelism(family.transformer.h[0])
    result = [of(lambda: Ours(4, 4)), of(lambda: nn.Linear(4, 4), use_alibi=True), of(lambda: nn.Linear(4, 4), hidden_size=3), told(lambda: smp.DistributedModel(family)),
              of(lambda: nn.Linear(4, 4), zero_init=True)]
    of(lambda: nn.Linear(4, 4), fused_softmax=True, fp32_residual_addition=False)
""")
        for text, part in zip(found, ["UnsupportedError: smp.tp_register: Ours is marked, and Theirs in the place of it is not there yet",
                                      "UnsupportedError: smp.tensor_parallelism(use_alibi=True) of Linear is not there yet",
                                      "UnsupportedError: smp.tensor_parallelism(hidden_size=3) of Linear is not there yet",
                                      'UnsupportedError: smp: modules of a "gptj" of transformers are marked for tensor parallelism, and other matrices',
                                      "UnsupportedError: smp.tensor_parallelism(zero_init=True) of Linear is not there yet with tensor_parallel_degree above 1: smp's "
                                      "documentation does not tell which weights begin at 0; leave it out, and set those that are to do so by torch.nn.init.zeros_()"], strict=True):
            self.assertTrue(text.startswith(part), (text, part))


class Ranks(SmpTensor):
    def test_by_placement(self):
        """Ranks that share layers are among those of dp_size(), whatever the order; mp · rdp = pp · dp = size."""
        for strategy, tp_of, rdp_of in (("cluster", lambda rank: rank % 2, lambda rank: rank // 2), ("DPT", lambda rank: rank % 2, lambda rank: rank // 2),
                                        ("TPD", lambda rank: rank // 2, lambda rank: rank % 2), ("spread", lambda rank: rank // 2, lambda rank: rank % 2)):
            found = self.on(4, """
    mine = [smp.pp_rank(), smp.tp_rank(), smp.rdp_rank(), smp.mp_rank(), smp.dp_rank(), smp.pp_size(), smp.tp_size(), smp.rdp_size(), smp.mp_size(), smp.dp_size()]
    mine.append([smp.get_tp_group(), smp.get_rdp_group(), smp.get_mp_group(), smp.get_dp_group()])
    mine.append([torch.distributed.get_process_group_ranks(group) for group in (smp.get_tp_process_group(), smp.get_rdp_process_group())])
    model, optimizer, train_step = made(Head(), head_loss)
    loss = taught(model, optimizer, train_step, batches()[:1])[0]["loss"]
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps([mine, loss]))]
""", placement_strategy=strategy)
            expected = self.on(1, "    result = taught(*made(Head(), head_loss), batches()[:1])[0]['loss']")
            for rank, (mine, loss) in enumerate(found):
                with self.subTest(strategy, rank=rank):
                    tp, rdp = tp_of(rank), rdp_of(rank)
                    sharing, copies = ([one for one in range(4) if of(one) == of(rank)] for of in (rdp_of, tp_of))
                    self.assertEqual(mine[:10], [0, tp, rdp, tp, rank, 1, 2, 2, 2, 4])
                    self.assertEqual(mine[10:], [[sharing, copies, sharing, [0, 1, 2, 3]], [sharing, copies]])
                    self.assert_close(loss, expected)


if __name__ == "__main__":
    main()
