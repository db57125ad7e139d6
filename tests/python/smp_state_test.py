"""States of smp's models and optimizers: partial and whole state dicts, files, and messages of ranks."""
import os
import tempfile
import textwrap

from harness import RankServer, main
from smp_programs import PRELUDE, Case

RankServer.imports = ("transformers.models.gpt2.modeling_gpt2", "torch._dynamo")  # which optimizers of torch import

_OPTIMIZERS = {"AdamW": "torch.optim.AdamW(parameters, lr=0.01)", "SGD": "torch.optim.SGD(parameters, lr=0.1, momentum=0.5)",
               "NAdam": "torch.optim.NAdam(parameters, lr=0.01)"}

# `folder` and `make` are there. A program that trains two steps, saves, trains two more; and one that loads and trains
# those.
_TRAINS = """
    begin(**({"ddp": True} if DDP else {}))
    net, batches = Mlp(), mlp_batches(4)
    def make():
        trained.model = smp.DistributedModel(net)
        return trained.model, smp.DistributedOptimizer((lambda parameters: OPTIMIZER)(trained.model.parameters()))
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    train_step = stepping(model)
    def train(batches):
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            losses.append([loss.item() for loss in train_step(x, y).outputs])
            optimizer.step()
            scheduler.step()
        return losses
"""
_SAVES = """
    train(batches[:2])
    if smp.rdp_rank() == 0:
        smp.save({"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict(), "scheduler": scheduler.state_dict(), "epoch": 2}, FOLDER + "/partial.pt")
    if smp.dp_rank() == 0:
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        if smp.rank() == 0:
            smp.save(whole, FOLDER + "/full.pt", partial=False)
    smp.barrier()
    result = [train(batches[2:]), weights(model)]
"""
_LOADS = """
    found = smp.load(FOLDER + "/" + FILE, partial=FILE == "partial.pt")
    assert FILE == "full.pt" or found["epoch"] == 2
    with torch.no_grad():
        [parameter.zero_() for parameter in net.parameters()]
    if WHEN == "after the first step":
        train([(x + 1, y) for x, y in batches[:1]])
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    scheduler.load_state_dict(found["scheduler"])
    result = [train(batches[2:]), weights(model)]
"""
_PLAIN = """
    begin()
    net, batches = Mlp(), mlp_batches(4)
    found = torch.load(FOLDER + "/full.pt")
    with torch.no_grad():
        [parameter.zero_() for parameter in net.parameters()]
    net.load_state_dict(found["model"])
    optimizer = (lambda parameters: OPTIMIZER)(net.parameters())
    optimizer.load_state_dict(found["optimizer"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    scheduler.load_state_dict(found["scheduler"])
    losses = []
    for x, y in batches[2:]:
        optimizer.zero_grad()
        losses.append([])
        for index in range(4):
            loss = net(x.chunk(4)[index], y.chunk(4)[index])
            (loss / 4).backward()
            losses[-1].append(loss.item())
        optimizer.step()
        scheduler.step()
    result = [losses, {name: bits(tensor) for name, tensor in sorted(net.state_dict().items())}]
"""


class States(Case):
    optimizers = ("AdamW",)

    def program(self, text, folder, optimizer="AdamW", file="partial.pt", when="before", ddp=False):
        for name, value in {"OPTIMIZER": _OPTIMIZERS[optimizer], "FOLDER": repr(folder), "FILE": repr(file), "WHEN": repr(when), "DDP": repr(ddp)}.items():
            text = text.replace(name, value)
        return text

    def saved(self, folder, ranks=2, **options):
        return self.ran(ranks, self.program(_TRAINS + _SAVES, folder, **options))

    def loaded(self, folder, ranks=2, **options):
        return self.ran(ranks, self.program(_TRAINS + _LOADS, folder, **options))

    def test_saves_of_two_stages_go_on_bit_by_bit_on_any_number_and_in_plain_pytorch(self):
        for optimizer in self.optimizers:
            with self.subTest(optimizer), tempfile.TemporaryDirectory() as folder:
                expected = self.saved(folder, optimizer=optimizer)
                self.assertEqual(sorted(os.listdir(folder)), ["full.pt", "partial.pt_0", "partial.pt_1"])
                self.assertEqual(self.loaded(folder, optimizer=optimizer), expected)
                self.assertEqual(self.loaded(folder, 3, optimizer=optimizer, when="after the first step"), expected)
                self.assertEqual(self.loaded(folder, 1, optimizer=optimizer, file="full.pt"), expected)
                self.skip_where_mkl_rounds_otherwise()
                self.assertEqual(self.ran(1, self.program(_PLAIN, folder, optimizer)), expected)

    def test_saves_of_four_ranks_as_two_by_two_and_of_four_stages(self):
        with tempfile.TemporaryDirectory() as folder:
            expected = self.saved(folder, 4)
            for ranks, file in ((1, "partial.pt"), (2, "full.pt")):
                self.assertEqual(self.loaded(folder, ranks, file=file), expected)
            self.assertEqual(sorted(os.listdir(folder)), ["full.pt", *(f"partial.pt_{rank}" for rank in range(4))])
            text = self.program(_TRAINS + "    optimizer.state_dict()\n" + _SAVES, folder, ddp=True).replace("begin(**", "begin(partitions=2, **")
            found = self.ran(4, text)
            self.assertEqual(sorted(os.listdir(folder)), ["full.pt", "partial.pt_0", "partial.pt_1"])
            loads = self.program(_TRAINS + _LOADS, folder, ddp=True).replace("begin(**", "begin(partitions=2, **")
            self.assertEqual(self.ran(4, loads), found)

    def test_counts_of_batch_norm_are_loaded_where_they_are(self):
        found = self.ran(3, """
    begin()
    model = smp.DistributedModel(Cnn())
    train_step = stepping(model)
    train_step(*cnn_batches()[0])
    whole = {name: value + 1 for name, value in model.state_dict().items()}
    keys = model.load_state_dict(whole)
    own = model.state_dict()
    result = [[json.loads(text) for text in smp.state.world.gather(json.dumps([bits(own[name]) == bits(value) for name, value in whole.items()]))], keys.missing_keys]
""")
        self.assertEqual(found[1], [])
        self.assertTrue(all(all(one) for one in found[0]))

    def test_what_state_dicts_have(self):
        found = self.ran(2, """
    begin()
    net = gpt2(True)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    before = [list(model.state_dict()) == list(net.state_dict()), optimizer.state_dict()["state"], told(model.local_state_dict), told(optimizer.local_state_dict)]
    @smp.step
    def train_step(ids):
        loss = causal_loss(model, ids)
        model.backward(loss)
        return loss
    train_step(*ids_batches()[0])
    optimizer.step()
    local, whole, first = model.local_state_dict(), model.state_dict(), model.state_dict(gather_to_rank0=True)
    own, all_states = optimizer.local_state_dict(), optimizer.state_dict()
    mine = {name: value for name, value in whole.items() if name in local}
    tied = [whole[name].data_ptr() for name in ("transformer.wte.weight", "lm_head.weight")]
    expected = {name: bits(value) for name, value in net.named_parameters() if model.engine("").homes[name] == smp.pp_rank()}
    part = [list(whole) == list(net.state_dict()), local.pop("_smp_is_partial"), own.pop("_smp_is_partial"), {name: bits(value) for name, value in local.items()} ==
            {name: bits(value) for name, value in mine.items()}, all(bits(local[name]) == value for name, value in expected.items()), len(first), tied[0] == tied[1],
            list(all_states["state"]), all_states["param_groups"] == own["param_groups"], all(bits(own["state"][number]["exp_avg"]) ==
            bits(all_states["state"][number]["exp_avg"]) for number in own["state"]), 0 < len(own["state"]) < len(all_states["state"])]
    result = [before, [json.loads(text) for text in smp.state.world.gather(json.dumps(part))], len(whole), len(list(net.parameters()))]
""")
        before, (first, second), names, parameters = found
        self.assertEqual(before[:2], [True, {}])
        self.assertIn("StateError: local_state_dict(): the model's tensors have no stages yet", before[2])
        self.assertIn("StateError: optimizer.local_state_dict(): the model's tensors have no stages yet", before[3])
        right = [True, True, True, True, True]
        self.assertEqual(first, [*right, names, True, list(range(parameters)), True, True, True])
        self.assertEqual(second, [*right, 0, True, list(range(parameters)), True, True, True])

    def test_state_dicts_are_snapshots(self):
        for optimizer in ("AdamW(model.parameters(), lr=0.01)", "NAdam(model.parameters(), lr=0.01)", "SGD(model.parameters(), lr=0.1, momentum=0.9)"):
            for ranks in (1, 2):
                with self.subTest(optimizer=optimizer, ranks=ranks):
                    self.assertEqual(self.ran(ranks, f"""
    begin()
    model = smp.DistributedModel(Cnn())
    optimizer = smp.DistributedOptimizer(torch.optim.{optimizer})
    train_step, batches = stepping(model), cnn_batches(3)
    def trains(batch):
        optimizer.zero_grad()
        train_step(*batch)
        optimizer.step()
    def tensors(value):
        if isinstance(value, torch.Tensor):
            return [value]
        return [tensor for inner in value.values() for tensor in tensors(inner)] if isinstance(value, dict) else []
    def all_bits():
        return [[bits(tensor) for tensor in tensors(one)] for one in taken]
    taken = [model.state_dict()]
    before = all_bits()
    trains(batches[0])
    taken += [model.state_dict(), model.local_state_dict(), optimizer.state_dict(), optimizer.local_state_dict()]
    own = [before[0], *all_bits()[1:]]
    trains(batches[1])
    later = [model.state_dict(), model.local_state_dict(), optimizer.state_dict(), optimizer.local_state_dict()]
    part = [all_bits() == own, all(own), all(bits(a) != bits(b) for one, other in zip(taken[1:], later) for a, b in zip(tensors(one), tensors(other)) if a.ndim > 1)]
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps(part))]
"""), [[True, True, True]] * ranks)

    def test_stages_that_do_not_come_to_a_collective_call_are_named(self):
        found = self.ran(3, """
    import datetime, time
    import trireme.ranks
    begin()
    model = smp.DistributedModel(Mlp())
    train_step = stepping(model)
    train_step(*mlp_batches()[0])
    other = None
    if smp.rank() == 0:
        trireme.ranks.TIMEOUT = datetime.timedelta(seconds=2)
        other = told(model.state_dict)
    else:
        time.sleep(4)
    result = other
""")
        self.assertEqual(found, "CommTimeoutError: DistributedModel.state_dict(): every rank of [0, 1, 2] makes this call, and ranks [1, 2] have not within 0:00:02; "
                                "call it on all of them")

    def test_ranks_that_make_different_calls_are_told_of_both(self):
        found = self.ran(2, """
    begin()
    model = smp.DistributedModel(Mlp())
    train_step = stepping(model)
    train_step(*mlp_batches()[0])
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps(told(lambda: model.state_dict(gather_to_rank0=smp.rank() == 1))))]
""")
        for text in found:
            self.assertRegex(text, r"StateError: DistributedModel.state_dict\(\): .*'gather_to_rank0': .* here \(rank \d\), and DistributedModel.state_dict\(\): .* on rank \d")

    def test_cpu_gives_every_rank_a_plain_module(self):
        found = self.ran(2, """
    begin()
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b, self.c = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6), nn.Linear(6, 8)
            self.c.weight = self.a.weight
            self.register_buffer("ones", torch.ones(8), persistent=False)
        def forward(self, x):
            return self.c(self.b(self.norm(self.a(x)))) * self.ones
    net, (x, _) = Tied(), mlp_batches()[0]
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    @smp.step
    def train_step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss
    train_step(x)
    optimizer.step()
    expected = {name: bits(value) for name, value in model.state_dict().items()}
    same = model.cpu() is model is model.cpu()
    own = {name: bits(value) for name, value in net.state_dict().items()}
    net.eval()
    model(x).sum().backward()
    import copy
    part = [same, own == expected, net.c.weight is net.a.weight, bits(net(x)) == bits(copy.deepcopy(net)(x)), net.a.weight.grad is not None, model.partitioned, told(optimizer.step), told(lambda: train_step(x))]
    result = [[json.loads(text) for text in smp.state.world.gather(json.dumps(part))], bits(net(x)), len(expected)]
""")
        for part in found[0]:
            self.assertEqual(part[:6], [True, True, True, True, True, False])
            for text in part[6:]:
                self.assertIn("model.cpu() has made the module a plain one", text)

    def test_what_does_not_fit_is_told_and_nothing_changes(self):
        found = self.ran(2, """
    begin()
    net = Mlp()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    train_step = stepping(model)
    train_step(*mlp_batches()[0])
    optimizer.step()
    optimizer.zero_grad()
    whole, states, before = model.state_dict(), optimizer.state_dict(), weights(model)
    less = {name: value + 1 for name, value in whole.items() if name != "layers.7.bias"}
    texts = [told(lambda: model.load_state_dict(less)), told(lambda: model.load_state_dict({**less, "layers.7.bias": torch.zeros(4)})),
             told(lambda: model.load_state_dict({**whole, "more": torch.zeros(4)})), told(lambda: model.load_state_dict({**model.local_state_dict(), "_smp_is_partial": True, "more": 1})),
             told(lambda: optimizer.load_state_dict({**states, "state": {0: {"exp_avg": torch.zeros(16, 6)}, 6: {"exp_avg": torch.zeros(3, 16)}}})),
             told(lambda: optimizer.load_state_dict({**states, "param_groups": []}))]
    same = weights(model) == before
    keys = model.load_state_dict(less, strict=False)
    result = [texts, same, keys.missing_keys, keys.unexpected_keys, weights(model)["layers.7.bias"] == before["layers.7.bias"], weights(model)["layers.7.weight"] == before["layers.7.weight"]]
""")
        texts = found[0]
        self.assertEqual(texts[0], "StateError: load_state_dict(): it lacks 'layers.7.bias'; load what was saved of such a model, or give strict=False to load what fits")
        self.assertEqual(texts[1], "ShapeError: load_state_dict(): 'layers.7.bias' is [4], and [3] in the model: load what was saved of such a model")
        self.assertIn("the model lacks 'more'", texts[2])
        self.assertIn("the model lacks 'more'", texts[3])
        self.assertIn("states ['exp_avg'] of a parameter of shape", texts[4])
        self.assertIn("ValueError: loaded state dict has a different number of parameter groups", texts[5])
        self.assertEqual(found[1:], [True, ["layers.7.bias"], [], True, False])


class Gradients(Case):
    _PLAIN = """
    def plain_steps(net, batches, optimizer, after):
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            losses.append([])
            for index in range(4):
                loss = net(x.chunk(4)[index], y.chunk(4)[index])
                (loss / 4).backward()
                losses[-1].append(loss.item())
            after(net, optimizer)
        return losses
"""

    def test_clipping_by_the_norm_of_all_stages(self):
        for options in ("partitions=2", "partitions=2, ddp=True"):
            with self.subTest(options):
                norms, losses, differences, text = self.ran(4 if "ddp" in options else 2, self._PLAIN + f"""
    import copy
    begin({options})
    net, batches = Mlp(), mlp_batches(3)
    plain_net = copy.deepcopy(net)
    norms = []
    def step(net, optimizer):
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05).item())
        optimizer.step()
    expected = plain_steps(plain_net, batches, torch.optim.SGD(plain_net.parameters(), lr=0.5), step)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    train_step = stepping(model)
    losses, own = [], []
    for x, y in batches:
        optimizer.zero_grad()
        losses.append([loss.item() for loss in train_step(x, y).outputs])
        text = told(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        own.append(optimizer.clip_master_grads(0.05).item())
        optimizer.step()
    whole = dict(plain_net.named_parameters())
    result = [[norms, own], [expected, losses], of_all({{name: (parameter - whole[name]).abs().max().item() for name, parameter in model.local_named_parameters()}}), text]
""")
                self.assert_close(*norms, relative=1e-5)
                for expected, found in zip(*losses):
                    self.assert_close(expected, found, relative=1e-5)
                self.assertLess(max(differences.values()), 1e-6)
                self.assertGreater(min(norms[0]), 0.05)
                self.assertIn("optimizer.clip_master_grads(max_norm)", text)

    def test_a_scaler_takes_the_arguments_of_both_of_torchs(self):
        found = self.ran(1, """
    begin()
    made = [smp.amp.GradScaler(256.0, 4.0, 0.25, 7), smp.amp.GradScaler("cuda", 256.0, 4.0, 0.25, 7), smp.amp.GradScaler(torch.device("cuda"), 256.0, growth_interval=7, growth_factor=4.0, backoff_factor=0.25),
            smp.amp.GradScaler(init_scale=256.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7, device="cpu")]
    result = [[scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval(), scaler.is_enabled()] for scaler in made]
    result += [smp.amp.GradScaler("cuda", enabled=False).is_enabled(), smp.amp.GradScaler("cuda").get_scale(), told(lambda: smp.amp.GradScaler("abacus"))]
""")
        self.assertEqual(found[:4], [[256.0, 4.0, 0.25, 7, True]] * 4)
        self.assertEqual(found[4:6], [False, 65536.0])
        self.assertIn("abacus", found[6])

    def test_a_scaler_whose_gradients_overflow_on_one_stage_skips_the_step_on_all(self):
        for made in ("smp.amp.GradScaler(init_scale=1024.0, growth_interval=2)", "torch.amp.GradScaler('cpu', init_scale=1024.0, growth_interval=2)"):
            with self.subTest(made):
                scales, differences = self.ran(2, self._PLAIN + f"""
    import copy
    begin()
    net, batches = Mlp(), mlp_batches(5)
    plain_net = copy.deepcopy(net)
    def loss_of(model, last, x, y, factor):
        return model(x, y) + (last.bias * (factor - 1.0)).sum()  # an infinite gradient on the last stage alone
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    scaler = {made}
    @smp.step
    def train_step(x, y, factor):
        loss = loss_of(model, net.layers[7], x, y, factor.mean())
        model.backward(scaler.scale(loss))
        return loss
    scales, plain_scales = [], []
    for index, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        factor = torch.full((8,), float("inf") if index == 2 else 1.0)
        train_step(x, y, factor)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    plain_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    stepper = torch.optim.SGD(plain_net.parameters(), lr=0.5)
    for index, (x, y) in enumerate(batches):
        stepper.zero_grad()
        for part in range(4):
            factor = torch.tensor(float("inf") if index == 2 else 1.0)
            plain_scaler.scale(loss_of(plain_net, plain_net.layers[7], x.chunk(4)[part], y.chunk(4)[part], factor) / 4).backward()
        plain_scaler.step(stepper)
        plain_scaler.update()
        plain_scales.append(plain_scaler.get_scale())
    whole = dict(plain_net.named_parameters())
    of_ranks = [json.loads(text) for text in smp.state.world.gather(json.dumps(scales))]
    result = [[*of_ranks, plain_scales], of_all({{name: (parameter - whole[name]).abs().max().item() for name, parameter in model.local_named_parameters()}})]
""")
                self.assertEqual(scales[0], scales[1])
                self.assertEqual(scales[0], scales[2])
                self.assertEqual(scales[0], [1024.0, 2048.0, 1024.0, 1024.0, 2048.0])
                self.assertLess(max(differences.values()), 1e-6)


class Files(Case):
    #: (call that a rank is killed in, rank): what is loaded afterwards
    kills = {("torch.save", 1): [1.0], ("os.replace", 1): "mixture", ("files.messages.barrier", 0): [2.0]}

    def test_files_of_different_saves_are_refused_and_the_whole_one_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            def files(save):
                return self.ran(2, f"""
    begin()
    smp.save({{"value": torch.full((3,), float({save})), "rank": smp.rank()}}, {folder + "/f"!r})
    result = smp.load({folder + "/f"!r})["rank"]
""")
            self.assertEqual(files(1), 0)
            os.rename(f"{folder}/f_1", f"{folder}/kept")
            files(2)
            os.rename(f"{folder}/f_1", f"{folder}/f_1.written")
            os.rename(f"{folder}/kept", f"{folder}/f_1")
            loads = f"""
    begin(partitions=1)
    result = told(lambda: smp.load({folder + "/f"!r})["value"].tolist())
"""
            text = self.ran(1, loads)
            self.assertIn("CheckpointError: smp.load: the files", text)
            self.assertIn("are of 2 saves: f_0 of ", text)
            self.assertIn(f"is whole: its last files have not got their names; mv {folder}/f_1.written {folder}/f_1", text)
            os.rename(f"{folder}/f_1.written", f"{folder}/f_1")
            self.assertEqual(self.ran(1, loads), [2.0, 2.0, 2.0])
            os.remove(f"{folder}/f_1")
            self.assertIn("None of them is whole", self.ran(1, loads))

    _SAVES = """
    import signal
    import trireme.smp.files as files
    begin()
    def save(value):
        smp.save({"value": torch.full((1000,), float(value)), "rank": smp.rank()}, FOLDER + "/f")
    save(1)
    def killing(original, at):
        def call(*args, **kwargs):
            at[0] -= 1
            if at[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        return call
    if smp.rank() == RANK:
        CALL = killing(CALL, [TIMES])
    save(2)
"""

    def test_a_rank_that_is_killed_while_it_saves_leaves_the_old_save_or_the_new_one(self):
        for (call, rank), right in self.kills.items():
            with self.subTest(f"{call} of rank {rank}"), tempfile.TemporaryDirectory() as folder:
                script = os.path.join(folder, "saves.py")
                with open(script, "w", encoding="utf-8") as file:
                    text = PRELUDE + self._SAVES.replace("FOLDER", repr(folder)).replace("RANK", str(rank)).replace("CALL", call).replace("TIMES", "1")
                    file.write(textwrap.dedent(text))
                RankServer.run(2, [script])
                found = self.ran(2, f"""
    begin()
    def loaded():
        found = smp.load({folder + "/f"!r})
        return [found["rank"] == smp.rank(), found["value"].unique().tolist()]
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps(told(loaded)))]
""")
                self.assertEqual(found[0], found[1])
                if isinstance(found[0], str):
                    self.assertIn("mixture", right)
                    self.assertRegex(found[0], r"are of 2 saves: .* Save [0-9a-f]{8} is whole: its last files have not got their names; mv .*f_\d.written .*f_\d$")
                else:
                    self.assertEqual(found[0][0], True)
                    self.assertIn(found[0][1][0], right)

    def test_wrong_calls_are_told_by_name(self):
        with tempfile.TemporaryDirectory() as folder:
            found = self.ran(2, f"""
    begin()
    path = {folder!r}
    class Own:
        pass
    texts = [told(lambda: smp.save({{}}, 3)), told(lambda: smp.load(path + "/none")), told(lambda: smp.save({{}}, f"{{path}}/f{{smp.rank()}}")),
             told(lambda: smp.save({{}}, path + "/absent/f")), told(lambda: smp.save({{"a": lambda: 1}} if smp.rank() else {{}}, path + "/g"))]
    smp.save({{"args": Own}}, path + "/h", partial=False)
    if smp.rank() == 0:
        texts += [told(lambda: smp.load(path + "/h")), told(lambda: smp.load(path + "/h", partial=False)), told(lambda: smp.load(path + "/absent", partial=False))]
    smp.barrier()
    result = [texts, sorted(os.listdir(path))]
""")
            texts, files = found
            for text, part in zip(texts, ("smp.save: f is int; expected a path", "there is no '", "smp.save: ranks [0, 1] save as", "could not be written", "since rank 1 failed",
                                          "is a full save, which partial=False reads", "UnpicklingError", "there is no '")):
                self.assertIn(part, text)
            self.assertEqual(files, ["h"])


class Messages(Case):
    def test_process_groups_are_torchs(self):
        for ranks, backend in ((1, "gloo"), (4, "gloo"), (4, "cpu:gloo")):
            with self.subTest(ranks=ranks, backend=backend):
                found = self.ran(ranks, f"""
    import torch.distributed as dist
    if {backend!r} != "gloo":
        dist.init_process_group({backend!r})
    begin(partitions={min(ranks, 2)}, ddp=True)
    part = []
    for kind in ("mp", "pp", "rdp", "dp", "tp", "world"):
        group = getattr(smp, f"get_{{kind}}_process_group")()
        expected = list(range(smp.size())) if kind == "world" else getattr(smp, f"get_{{kind}}_group")()
        total = torch.tensor([10 ** smp.rank()])
        dist.all_reduce(total, group=group)
        part.append([dist.get_process_group_ranks(group) == expected, total.item() == sum(10 ** rank for rank in expected), dist.get_backend(group) == dist.get_backend()])
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps(part))]
    dist.barrier()
    dist.destroy_process_group()
    text = told(smp.get_dp_process_group)
    result.append(text)
""")
                self.assertEqual(found[:-1], [[[True, True, True]] * 6] * ranks)
                self.assertEqual(found[-1], "StateError: smp.get_dp_process_group(): torch.distributed was taken down; leave out destroy_process_group() until the program ends")

    def test_objects_from_rank_to_rank(self):
        found = self.ran(4, """
    begin(partitions=2, ddp=True)
    mine, numbers = smp.rank(), []
    if smp.pp_rank() == 0:
        smp.broadcast({"length": 10 + smp.dp_rank(), "names": ["a"]}, smp.PP_GROUP)
        got = None
    else:
        got = smp.recv_from(0, smp.RankType.PP_RANK)
    if smp.rank() == 3:
        smp.send(torch.arange(3), 0, smp.RankType.WORLD_RANK)
        smp.send(("second", 2.5), 0, smp.RankType.WORLD_RANK)
    if smp.rank() == 0:
        numbers = [smp.recv_from(3, smp.RankType.WORLD_RANK).tolist(), smp.recv_from(3, smp.RankType.WORLD_RANK)]
    gathered = [smp.allgather([smp.rank()] * (1 + smp.rank()), group) for group in smp.CommGroup]
    pickled = smp.allgather(range(smp.rank()), smp.WORLD, pickle=True)
    smp.barrier(smp.DP_GROUP)
    texts = [told(lambda: smp.send(1, mine, smp.RankType.WORLD_RANK)), told(lambda: smp.send(1, 2, smp.RankType.PP_RANK)), told(lambda: smp.allgather(1, "world")),
             told(lambda: smp.allgather(smp.rank, smp.WORLD)), told(lambda: smp.recv_from(0, smp.WORLD))]
    result = [[json.loads(text) for text in smp.state.world.gather(json.dumps([got, gathered]))], numbers, [len(one) for one in pickled], texts]
""")
        of_ranks, numbers, pickled, texts = found
        self.assertEqual([one[0] for one in of_ranks], [None, {"length": 10, "names": ["a"]}, None, {"length": 11, "names": ["a"]}])
        lists = [[rank] * (1 + rank) for rank in range(4)]
        every, pairs, crossed = lists, [lists[:2], lists[2:]], [lists[::2], lists[1::2]]
        for rank in range(4):  # WORLD, MP, DP, PP, TP, RDP
            self.assertEqual(of_ranks[rank][1], [every, pairs[rank // 2], crossed[rank % 2], pairs[rank // 2], [lists[rank]], crossed[rank % 2]])
        self.assertEqual(numbers, [[0, 1, 2], ["second", 2.5]])
        self.assertEqual(pickled, [0, 1, 2, 3])
        for text, part in zip(texts, ("dest=0 among WORLD_RANK is this rank itself", "dest=2 among PP_RANK: expected a number from 0 to 1", "group='world'; expected one of smp.CommGroup.WORLD",
                                      "give pickle=True on both sides", "rank_type=<CommGroup.WORLD")):
            self.assertIn(part, text)


if __name__ == "__main__":
    main()
