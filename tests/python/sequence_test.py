"""Ranks that share samples train as one process does: models of Hugging Face, and a program of DeepSpeed's AutoSP."""
import json
import pathlib
import textwrap

from harness import Case, RankServer, main

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import

HERE = pathlib.Path(__file__).parent
MODELS = f"import sys; sys.path.insert(0, {str(HERE)!r}); import sequence_programs as programs\n"


class Models(Case):
    def test_two_ranks_train_parts_as_one_process_trains_wholes(self):
        cases = [["llama", "ulysses", 0], ["llama", "ring", 3], ["gpt2", "ulysses", 3], ["bert", "ulysses", 2]]
        differences = self.on_ranks(2, MODELS + f"result = [programs.difference(*case, 2) for case in {cases}]")
        for case, found in zip(cases, differences):
            with self.subTest(case):
                self.assertLess(found, 1e-5)

    def test_padding_is_completed(self):
        self.assertLess(self.on_ranks(2, MODELS + "result = programs.difference('llama', 'ulysses', 1, 2, padded=True)"), 1e-5)


_PREPARE = """
    import torch
    import trireme
    import deepspeed
    from deepspeed.compile.passes.sp_compile import prepare_autosp_inputs

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.project = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 48)
            self.head = torch.nn.Linear(16, 32)

        def forward(self, input_ids, labels=None):
            x = self.embed(input_ids)
            self.is_part = trireme._native.core.EngineBase.tells_wholes(x)
            query, key, value = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
            attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            logits = self.head(attended.transpose(1, 2).flatten(2) + x)
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), (input_ids if labels is None else labels).flatten())

    torch.manual_seed(3)
    model = Model()
    dataloader = [{"input_ids": ids, "labels": ids.roll(-1, 1)}
                  for ids in (torch.randint(0, 32, (1, 14), generator=torch.Generator().manual_seed(i)) for i in range(3))]
    ds_config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0},
                 "compile": {"deepcompile": True, "passes": ["autosp"]}}
"""
_EXPECT = """
    import copy
    other = copy.deepcopy(model)
    plain, expected = torch.optim.SGD(other.parameters(), lr=0.1), []
    for batch in dataloader:
        loss = other(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
        expected.append(loss.item())
"""


class AutoSP(Case):
    def test_the_example_of_deepspeed_runs_as_it_stands(self):
        result = self.on_ranks(2, _PREPARE + _EXPECT + """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=ds_config,
    )
    # Compile the model before training
    engine.compile(backend='inductor')
    for batch in dataloader:
        input_ids = prepare_autosp_inputs(
            input_id=batch["input_ids"],
            label_id=batch["labels"],
            position_id=batch.get("position_ids"),
            seq_dim=1
        )
        loss = engine(input_ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    groups = deepspeed.utils.groups
    result = {"losses": losses, "expected": expected, "is_part": model.is_part, "size": engine.sequence_parallel_size, "data": engine.dp_world_size,
              "recompute": engine.resolved_config["trireme"]["recompute"],
              "ranks": torch.distributed.get_process_group_ranks(groups._get_sequence_parallel_group())}
""", as_deepspeed=True)
        self.assert_close(result["losses"], result["expected"])
        self.assertTrue(result["is_part"])
        self.assertEqual([result["size"], result["data"], result["ranks"]], [2, 1, [0, 1]])
        self.assertAlmostEqual(result["recompute"]["extra_compute"], 1 / 3)

    def test_tensors_of_a_prepared_batch_may_be_passed_one_by_one(self):
        result = self.on_ranks(2, _PREPARE + _EXPECT + """
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=ds_config)
    losses = []
    for batch in dataloader:
        prepare_autosp_inputs(batch["input_ids"], batch["labels"])
        loss = engine(batch["input_ids"], labels=batch["labels"])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    result = {"losses": losses, "expected": expected, "is_part": model.is_part}
""", as_deepspeed=True)
        self.assert_close(result["losses"], result["expected"])
        self.assertTrue(result["is_part"])

    def test_a_compiled_module_is_refused(self):
        result = self.on_ranks(2, _PREPARE + """
    engine, *_ = deepspeed.initialize(model=model, config=ds_config)
    model.compile(backend="eager")
    try:
        engine(prepare_autosp_inputs(**{"input_id": dataloader[0]["input_ids"]}))
        result = ""
    except deepspeed.errors.UnsupportedError as error:
        result = str(error)
""", as_deepspeed=True)
        self.assertIn("hides operators from sequence and tensor parallelism; leave it eager, or set sequence_parallel_size to 1", result)


class Batches(Case):
    def test_ranks_that_have_other_batches_are_told_on_every_rank(self):
        self.on_ranks(2, """
    import json, pathlib, torch, trireme
    config = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2}
    engine, *_ = trireme.initialize(model=torch.nn.Linear(2, 2), config=config)
    told, rank = [], engine.global_rank
    for batch in ({"input_ids": torch.arange(8).view(1, 8) + rank}, {"input_ids": torch.zeros(1, 8 + rank, dtype=torch.long)},
                  {"input_ids": torch.zeros(1, 8, dtype=torch.long), **({"labels": torch.zeros(1, 8, dtype=torch.long)} if rank else {})}):
        try:
            engine.cut(**batch)
        except trireme.errors.StateError as error:
            told.append(str(error))
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(told))
    result = None
""")
        for rank in range(2):
            told = json.loads((self.folder / f"{rank}.json").read_text())
            for text, words in zip(told, ("input_ids has other values on rank 1", "input_ids has 8 tokens on rank 0 and 9 on rank 1", "labels is given by rank 1")):
                self.assertIn(words, text)
            self.assertEqual(len(told), 3)

    def test_a_batch_that_the_program_has_not_cut_is_cut_by_its_names(self):
        result = self.on_ranks(2, MODELS + textwrap.dedent("""
    import copy, torch, trireme
    from zoo import models as zoo_models
    torch.manual_seed(1)
    model, ids = zoo_models.llama().train(), torch.randint(3, zoo_models.VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    expected = copy.deepcopy(model)(input_ids=ids, labels=ids).loss
    expected.backward()
    engine, *_ = trireme.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2})
    seen = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: seen.append(engine.core.is_part(inputs[0])))
    loss = engine(input_ids=ids, labels=ids).loss
    result = [loss.item(), expected.item(), seen]
"""))
        self.assertAlmostEqual(result[0], result[1], places=5)
        self.assertEqual(result[2], [True])


_WHOLES = """
    import copy, math, pickle, torch, trireme
    engine, *_ = trireme.initialize(model=torch.nn.Embedding(9, 6), config={"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2})
    whole = torch.arange(48).view(2, 24) % 9
    ids = engine.cut(input_ids=whole)["input_ids"]
    x = engine(ids)
    def refusal(call):
        try:
            return f"ran: {call()}"
        except (trireme.errors.StateError, trireme.errors.ShapeError, trireme.errors.UnsupportedError) as error:
            return str(error)
"""


class Wholes(Case):
    def test_what_is_read_off_a_part_is_the_whole_s_in_plain_numbers(self):
        result = self.on_ranks(2, _WHOLES + """
    b, s, d = x.shape
    result = [type(s) is int, [b, s, d], list(x.size()), x.size(-2), x.numel(), torch.numel(x), len(x[0]), list(x.stride()), list(x.transpose(0, 1).stride()),
              x.nbytes, x.view(b * s, d).shape[0], x.unflatten(1, (s, 1)).shape[1], x.reshape(-1, d).expand(2, -1, -1).shape[1],
              list(x.new_zeros(x.shape).shape), list(torch.zeros_like(x).shape), x[ids > 4].shape[0] == int((whole > 4).sum()), repr(ids) == repr(whole), repr(x),
              ids.tolist() == whole.tolist(), bool((torch.as_tensor(ids.numpy()) == whole).all()), [int(one) for one in ids[0]] == whole[0].tolist()]
""")
        self.assertEqual(result, [True, [2, 24, 6], [2, 24, 6], 24, 288, 288, 24, [144, 6, 1], [6, 144, 1], 1152, 48, 24, 48, [2, 24, 6], [2, 24, 6], True,
                                  True, "tensor(a part of (2, 24, 6), dtype=torch.float32)", True, True, True])

    def test_what_a_program_makes_by_a_length_meets_this_rank_s_tokens(self):
        result = self.on_ranks(2, _WHOLES + """
    n, y = x.shape[1], engine.module(whole)
    weights, taken = torch.arange(n) / n, torch.zeros(2, n, 6)
    taken[..., :4] = x[..., :4]
    taken[:, :, 4:] = 2.0
    kept = torch.zeros(2, n, 6)
    kept[..., :4], kept[..., 4:] = y[..., :4], 2.0
    pairs = [((x * weights[:, None]).sum(), (y * weights[:, None]).sum()), (x.sum() / n, y.sum() / n), (x[:, 17].sum(), y[:, 17].sum()),
             ((taken * x).sum(), (kept * y).sum()), (0.5 * n * x.mean(), 0.5 * n * y.mean()), (x[:, :n - 1].sum(), y[:, :-1].sum()),
             (torch.where(torch.ones(n, 1).bool(), x, torch.zeros(n, 6)).sum(), y.sum()), (x[torch.arange(n)[None] < torch.tensor([[3], [20]])].mean(),
             torch.cat([y[0, :3], y[1, :20]]).mean())]
    result = [(ours - plain).abs().item() for ours, plain in pairs]
""")
        self.assertLess(max(result), 1e-4)

    def test_what_is_of_one_rank_alone_is_refused_by_name(self):
        told = self.on_ranks(2, _WHOLES + """
    result = {text: refusal(call) for text, call in {
        "transform of torch.func (vmap, grad, jvp)": lambda: torch.vmap(lambda one: one.mean(0))(x),
        "aten::linalg_vector_norm normalises over": lambda: x.norm(),
        "numpy: (2, 24, 6) is a tensor of which this rank has a part; read numbers": lambda: x.detach().numpy(),
        "__deepcopy__: (2, 24, 6) is a tensor of which this rank has a part": lambda: copy.deepcopy(x.detach()),
        "__reduce_ex__: (2, 24, 6) is a tensor of which": lambda: pickle.dumps(x.detach()),
        "a storage has this rank's elements alone": lambda: x.untyped_storage(),
        "storage_offset: (1, 24, 6) is a tensor of which": lambda: x[1:].storage_offset(),
        "joins [2, 12, 6]": lambda: x + torch.ones(1, 1, 6).expand(2, 12, 6),
        "joins [2, 12, 6], ": lambda: torch.zeros(2, 12, 6).add_(x),
        "ran: (True, True)": lambda: (torch.equal(copy.deepcopy(ids), whole), torch.equal(pickle.loads(pickle.dumps(ids)), whole)),
        "ran: (False, None)": lambda: (trireme.parameters.is_numbered(x), trireme.parameters.numbered(x)),
    }.items()}
""")
        for text, refusal in told.items():
            with self.subTest(text):
                self.assertIn(text.strip(), refusal)

    def test_a_convolution_of_an_input_that_is_the_first_operator_is_right_or_refused(self):
        """It is made of other operators, which have to know that it got the tokens of one rank."""
        for ranks, samples in ((2, 2), (3, 2), (3, 3)):
            told = self.on_ranks(ranks, f"""
    import torch, trireme
    torch.manual_seed(0)
    layer, x = torch.nn.Conv1d(6, 5, 3, padding=1), torch.randn({samples}, 12, 6)
    expected = layer(x.transpose(1, 2)).square().mean().item()
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer
        def forward(self, x):
            return self.layer(x.transpose(1, 2)).square().mean()
    engine = trireme.initialize(model=Model(), config={{"train_micro_batch_size_per_gpu": {samples}, "sequence_parallel_size": {ranks},
                                                        "optimizer": {{"type": "SGD", "params": {{"lr": 0.1}}}}}})[0]
    try:
        result = abs(engine(engine.cut(x)["input_ids"]).item() - expected)
    except trireme.errors.StateError as error:
        result = str(error)
""")
            with self.subTest(ranks=ranks, samples=samples):
                if samples < ranks:
                    self.assertIn("aten::convolution has windows along dim 2 of [2, 6, 12], which sequence parallelism cuts", told)
                else:
                    self.assertLess(told, 1e-6)

    def test_extremes_over_tokens_of_selective_recomputation(self):
        """How many elements are equal to an extreme is a sum over ranks, and no copy of this rank's count."""
        told = self.on_ranks(2, """
    import copy, torch, trireme
    from trireme.utils import safe_get_full_grad
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(32, 16)
        def forward(self, ids):
            x = self.embedding(ids)
            x = (x - x.amax(1, keepdim=True)).exp()
            return (x / x.sum(1, keepdim=True)) @ self.embedding.weight.t()
    torch.manual_seed(0)
    plain, ids = Model(), torch.randint(32, (2, 8))
    engine = trireme.initialize(model=copy.deepcopy(plain), config={"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2, "trireme": {"recompute": "selective"},
                                                                    "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})[0]
    engine.backward(engine(engine.cut(ids)["input_ids"]).square().mean())
    plain(ids).square().mean().backward()
    found = safe_get_full_grad(engine.module.embedding.weight)
    result = ((found - plain.embedding.weight.grad).norm() / plain.embedding.weight.grad.norm()).item()
""")
        self.assertLess(told, 1e-5)

    def test_labels_that_a_mask_takes_meet_logits_that_it_takes(self):
        result = self.on_ranks(2, _WHOLES + """
    torch.manual_seed(0)
    head, whole_ids = torch.nn.Linear(6, 9), torch.arange(48).view(2, 24) % 9
    mask, whole_mask = ids > 3, whole_ids > 3
    loss = torch.nn.functional.cross_entropy(head(x)[mask], ids[mask])
    squares = (x[mask].mean(-1) - ids[mask].float()).square().mean()
    y = engine.module(whole_ids)
    result = [loss.item(), torch.nn.functional.cross_entropy(head(y)[whole_mask], whole_ids[whole_mask]).item(),
              squares.item(), (y[whole_mask].mean(-1) - whole_ids[whole_mask].float()).square().mean().item(), len(ids[mask]) == int(whole_mask.sum())]
""")
        self.assertAlmostEqual(result[0], result[1], places=5)
        self.assertAlmostEqual(result[2], result[3], places=4)
        self.assertTrue(result[4])

    def test_floating_labels_of_as_many_classes_as_tokens_are_not_guessed(self):
        told = self.on_ranks(2, """
    import torch, trireme
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(9, 8)
        def forward(self, input_ids, labels=None):
            return self.embed(input_ids).mean()
    engine, *_ = trireme.initialize(model=Model(), config={"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2})
    try:
        result = engine(input_ids=torch.ones(2, 8, dtype=torch.long), labels=torch.ones(2, 8)).item()
    except trireme.errors.StateError as error:
        result = str(error)
""")
        self.assertIn("may be one for each token, or classes of samples; cut the batch yourself", told)


class Layers(Case):
    def test_lists_of_layers_run_again_in_backward_as_they_are_asked_to(self):
        result = self.on_ranks(1, """
    import copy, torch, trireme
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.runs = torch.nn.Linear(4, 4), 0
        def forward(self, x, use_cache=True):
            self.runs += 1
            return torch.tanh(self.a(x)) + 0 * use_cache
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.heads = torch.nn.ModuleList(Layer() for _ in range(3)), torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.ReLU()])
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.heads[1](self.heads[0](x)).sum()
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 4)
    plain = copy.deepcopy(model)
    plain(x).backward()
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "trireme": {"recompute": "full"}}
    engine, *_ = trireme.initialize(model=model, config=config)
    engine.backward(engine(x))
    copied = copy.deepcopy(model)
    copied(x)
    wrong = (trireme.utils.safe_get_full_grad(model.layers[0].a.weight) - plain.layers[0].a.weight.grad).abs().max().item()
    result = [[layer.runs for layer in model.layers], [layer.runs for layer in copied.layers], wrong]
    engine.module.eval()(x)
    result.append(model.layers[0].runs)
    try:
        trireme.initialize(model=torch.nn.Linear(2, 2), config=config)
    except trireme.errors.ConfigError as error:
        result.append(str(error))
""")
        self.assertEqual(result[:2], [[2, 2, 2], [3, 3, 3]])
        self.assertLess(result[2], 1e-6)
        self.assertEqual(result[3], 3)
        self.assertIn("no list of modules of one class", result[4])


class Data(Case):
    def test_ranks_of_one_sequence_get_the_same_batches_and_others_others(self):
        self.on_ranks(4, """
    import json, pathlib, torch, torch.distributed as dist, trireme
    config = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2}
    engine, _, loader, _ = trireme.initialize(model=torch.nn.Linear(2, 2), config=config, training_data=list(range(8)))
    told = [[batch.item() for batch in loader], engine.dp_world_size, engine.get_data_parallel_rank(),
            dist.get_process_group_ranks(engine.get_sequence_parallel_group()),
            dist.get_process_group_ranks(trireme.utils.groups.get_data_parallel_group())]
    pathlib.Path(folder, f"{engine.global_rank}.json").write_text(json.dumps(told))
    result = None
""")
        seen = [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(4)]
        self.assertEqual(seen[0][0], seen[1][0])
        self.assertEqual(sorted(seen[0][0] + seen[2][0]), list(range(8)))
        self.assertEqual([rank[1:] for rank in seen], [[2, 0, [0, 1], [0, 2]], [2, 0, [0, 1], [1, 3]], [2, 1, [2, 3], [0, 2]], [2, 1, [2, 3], [1, 3]]])


if __name__ == "__main__":
    main()
