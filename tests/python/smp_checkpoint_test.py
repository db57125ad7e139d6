"""smp.save_checkpoint() and smp.resume_from_checkpoint()."""
import json
import os
import tempfile
import textwrap

from harness import RankServer, main
from smp_programs import PRELUDE, Case

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import

# A program that trains two steps, saves, and trains two more; and one that resumes, and trains those.
_TRAINS = """
    begin(OPTIONS)
    net, batches = Mlp(), mlp_batches(4)
    def make():
        trained.model = smp.DistributedModel(net)
        return trained.model, smp.DistributedOptimizer(torch.optim.AdamW(trained.model.parameters(), lr=0.01))
    model, optimizer = make()
    train_step = stepping(model)
    def train(batches):
        found = []
        for x, y in batches:
            optimizer.zero_grad()
            losses = [loss.item() for loss in train_step(x, y).outputs]
            found.append([losses, gradients(model)])
            optimizer.step()
        return found
"""
_SAVES = _TRAINS + """
    train(batches[:2])
    content = {"epoch": 2, "numbers": [1.5, None], "tensor": torch.arange(3)}
    for partial in (True, False):
        smp.save_checkpoint(FOLDER, "second", partial=partial, model=model, optimizer=optimizer, user_content=content)
    result = [train(batches[2:]), weights(model)]
"""
_RESUMES = _TRAINS + """
    with torch.no_grad():
        [parameter.zero_() for parameter in net.parameters()]
    if WHEN == "after the first step":
        train([(x + 1, y) for x, y in batches[:1]])
    content = smp.resume_from_checkpoint(FOLDER, PLACE)
    assert content["epoch"] == 2 and content["numbers"] == [1.5, None] and content["tensor"].tolist() == [0, 1, 2], content
    result = [train(batches[2:]), weights(model)]
"""
_PLAIN = """
    begin(partitions=1)
    net, batches = Mlp(), mlp_batches(4)
    net.load_state_dict(torch.load(FOLDER + "/second"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    optimizer.load_state_dict(torch.load(FOLDER + "/optimizer_second"))
    found = []
    for x, y in batches[2:]:
        optimizer.zero_grad()
        losses = []
        for index in range(4):
            loss = net(x.chunk(4)[index], y.chunk(4)[index])
            (loss / 4).backward()
            losses.append(loss.item())
        found.append([losses, dict(sorted((name, bits(parameter.grad)) for name, parameter in net.named_parameters()))])
        optimizer.step()
    result = [found, {name: bits(tensor) for name, tensor in sorted(net.state_dict().items())}]
"""


def filled(text, **values):
    for name, value in {"OPTIONS": "", **values}.items():
        text = text.replace(name, value if name in ("OPTIONS", "PLACE") else repr(value))
    return text


class Checkpoints(Case):
    #: (number of ranks, arguments, when)
    resumes = ((1, "", "before"), (2, "'second', partial=False", "after the first step"), (3, "tag='second'", "before"))

    def setUp(self):
        super().setUp()
        self.place = str(self.folder / "saved")

    def resumed(self, ranks, place, when="before", options=""):
        return self.ran(ranks, filled(_RESUMES, FOLDER=self.place, PLACE=place, WHEN=when, OPTIONS=options))

    def test_two_stages_go_on_bit_by_bit_on_any_number_and_in_plain_pytorch(self):
        self.skip_where_mkl_rounds_otherwise()
        expected = self.ran(2, filled(_SAVES, FOLDER=self.place))
        self.assertEqual(sorted(os.listdir(self.place)), ["newest", "optimizer_second", "second", "second_partial", "user_content_second"])
        self.assertEqual(sorted(os.listdir(self.place + "/second_partial")),
                         ["model_0_0.pt", "model_1_0.pt", "optimizer_0_0.pt", "optimizer_1_0.pt", "partition.json", "user_content.pt"])
        with open(self.place + "/second_partial/partition.json", encoding="utf-8") as file:
            manifest = json.load(file)
        self.assertEqual([manifest["pipeline_parallel_degree"], sorted(set(manifest["stages"].values())), len(manifest["stages"])], [2, [0, 1], 8])
        with open(self.place + "/newest", encoding="utf-8") as file:
            self.assertEqual(file.read(), "second")
        self.assertEqual(self.ran(1, filled(_PLAIN, FOLDER=self.place)), expected)
        for ranks, place, when in self.resumes:
            with self.subTest(ranks=ranks, place=place, when=when):
                self.assertEqual(self.resumed(ranks, place, when), expected)

    def test_copies_of_a_model_and_layers_that_ranks_share(self):
        expected = self.ran(4, filled(_SAVES, FOLDER=self.place, OPTIONS="partitions=2, ddp=True"))
        self.assertEqual(len(os.listdir(self.place + "/second_partial")), 6)
        for place in ("", "partial=False"):
            self.assertEqual(self.resumed(4, place, options="partitions=2, ddp=True"), expected)
        found = self.ran(2, f"""
    begin(partitions=1, tensor_parallel_degree=2, ddp=True, prescaled_batch=True, optimize="speed")
    with smp.tensor_parallelism():
        net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    @smp.step
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss
    def step(batch):
        optimizer.zero_grad()
        losses = [loss.item() for loss in train_step(*batch).outputs]
        optimizer.step()
        return losses
    torch.manual_seed(7)
    batches = mlp_batches(2)
    step(batches[0])
    smp.save_checkpoint({self.place!r}, "cut", model=model, optimizer=optimizer)
    expected = step(batches[1])
    smp.resume_from_checkpoint({self.place!r}, "cut")
    found = step(batches[1])
    whole = model.state_dict()
    merged = smp.get_full_state_dict_from_sharded_data_parallel_checkpoint({self.place!r}, "cut")
    result = [found, expected, sorted(os.listdir({self.place!r} + "/cut_partial")), sorted(merged) == sorted(whole), [merged[name].shape == whole[name].shape for name in whole]]
""")
        self.assertEqual(found[0], found[1])
        self.assertEqual(found[2], ["model_0_0.pt", "model_0_1.pt", "optimizer_0_0.pt", "optimizer_0_1.pt", "partition.json", "user_content.pt"])
        self.assertTrue(found[3] and all(found[4]), found)

    def test_the_whole_of_a_partial_checkpoint_needs_no_ranks(self):
        self.ran(2, filled(_SAVES, FOLDER=self.place))
        found = self.ran(0, f"""
    whole = torch.load({self.place + "/second"!r})
    same = smp.get_full_state_dict_from_sharded_data_parallel_checkpoint({self.place!r}, "second")
    half = smp.get_full_state_dict_from_sharded_data_parallel_checkpoint({self.place!r}, "second", torch.bfloat16)
    result = [sorted(same) == sorted(whole), [torch.equal(same[name], whole[name]) for name in whole], [torch.equal(half[name], whole[name].bfloat16()) for name in whole],
              told(lambda: smp.get_full_state_dict_from_sharded_data_parallel_checkpoint({self.place!r}, "second", torch.int64))]
""")
        self.assertTrue(found[0] and all(found[1]) and all(found[2]), found)
        self.assertIn("dtype=torch.int64; expected a floating-point one", found[3])

    def test_older_partial_checkpoints_are_removed(self):
        found = self.ran(2, _BEGINS.replace("FOLDER", repr(self.place)) + """
    kept = []
    for value, tag in enumerate(("a", "b", "c", "b", "d")):
        save(value, tag, num_kept_partial_checkpoints=2)
        kept.append(sorted(os.listdir(FOLDER)))
    smp.save_checkpoint(FOLDER, "d", partial=False, model=model)
    result = [kept, told(lambda: loaded("b")), told(lambda: loaded()), told(lambda: loaded("c"))]
""".replace("FOLDER", repr(self.place)))
        self.assertEqual(found[0], [[f"{tag}_partial" for tag in tags] + ["newest"] for tags in ("a", "ab", "bc", "bc", "bd")])
        self.assertEqual(found[1:3], [3, 4])
        self.assertIn("there is no partial checkpoint '", found[3])
        self.assertIn("there are partial ones of the tags b, d", found[3])

    def test_a_full_state_dict_of_another_program_is_translated(self):
        found = self.ran(2, """
    begin()
    net = Mlp()
    torch.manual_seed(9)
    other = Mlp()
    os.makedirs(FOLDER, exist_ok=True)
    if smp.rank() == 0:
        torch.save({"old." + name: value for name, value in other.state_dict().items()}, FOLDER + "/weights.bin")
    smp.barrier()
    model = smp.DistributedModel(net)
    refused = told(lambda: smp.resume_from_checkpoint(FOLDER, "weights.bin", partial=False))
    same = bits(net.layers[0].weight)
    content = smp.resume_from_checkpoint(FOLDER, "weights.bin", partial=False, translate_function=lambda found: {name.removeprefix("old."): value for name, value in found.items()})
    stepping(model)(*mlp_batches()[0])
    result = [refused, content, weights(model), {name: bits(value) for name, value in sorted(other.state_dict().items())}]
""".replace("FOLDER", repr(self.place)))
        self.assertTrue(found[0].startswith("StateError: load_state_dict(): it lacks 'layers.0.weight'"), found[0])
        self.assertIsNone(found[1])
        self.assertEqual(found[2], found[3])


# A model whose one parameter tells which save it is of.
_BEGINS = """
    import signal
    import trireme.smp.checkpoints as checkpoints
    begin()
    net = Mlp()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
    train_step = stepping(model)
    torch.manual_seed(1)
    train_step(*mlp_batches()[0])
    optimizer.step()
    optimizer.zero_grad()
    def save(value, tag, **options):
        with torch.no_grad():
            [parameter.fill_(value) for parameter in model.local_parameters()]
        smp.save_checkpoint(FOLDER, tag, model=model, optimizer=optimizer, user_content={"value": value}, **options)
    def loaded(tag=None, **options):
        content = smp.resume_from_checkpoint(FOLDER, tag, **options)
        values = {value for text in smp.state.world.gather(json.dumps([parameter.unique().tolist() for parameter in model.local_parameters()]))
                  for values in json.loads(text) for value in values}
        assert values == {content["value"]}, (values, content)
        return content["value"]
"""


class Killed(Case):
    #: (call that a rank is killed in, which one of its calls, rank): what is loaded afterwards
    partial_kills = {("os.rename", 2, 0): [1]}
    full_kills = {("os.replace", 3, 0): [2]}

    _KILLED = _BEGINS + """
    save(1, "a", partial=PARTIAL)
    def killing(original, at):
        def call(*args, **kwargs):
            at[0] -= 1
            if at[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        return call
    import shutil
    from trireme.smp import files
    if smp.rank() == RANK:
        CALL = killing(CALL, [TIMES])
    save(2, "a", partial=PARTIAL)
"""

    def _check(self, kills, partial):
        for (call, times, rank), right in kills.items():
            with self.subTest(f"{call} {times} of rank {rank}"), tempfile.TemporaryDirectory() as folder:
                fill = lambda text: text.replace("FOLDER", repr(folder)).replace("RANK", str(rank)).replace("CALL", call).replace("TIMES", str(times)).replace("PARTIAL", str(partial))
                script = os.path.join(folder, "saves.py")
                with open(script, "w", encoding="utf-8") as file:
                    file.write(textwrap.dedent(PRELUDE + fill(self._KILLED)))
                self.assertNotEqual(RankServer.run(2, [script])[0], 0)
                found = self.ran(2, fill(_BEGINS + """
    result = [told(lambda: loaded("a", partial=PARTIAL)), told(lambda: loaded(partial=PARTIAL))]
    save(3, "a", partial=PARTIAL)
    result += [told(lambda: loaded("a", partial=PARTIAL)), sorted(os.listdir(FOLDER))]
"""))
                self.assertIn(found[0], right)
                self.assertEqual(found[1], found[0])
                self.assertEqual(found[2:], [3, sorted(["newest", "saves.py", *(["a_partial"] if partial else ["a", "optimizer_a", "user_content_a"])])])

    def test_a_partial_save_leaves_the_old_one_or_the_new_one(self):
        self._check(self.partial_kills, True)

    def test_a_full_save_leaves_the_old_one_or_the_new_one(self):
        self._check(self.full_kills, False)


class Refused(Case):
    def test_what_cannot_be_loaded_is_told_on_every_rank_and_nothing_changes(self):
        place = str(self.folder / "saved")
        found = self.ran(2, (_BEGINS + """
    import shutil
    save(1, "a"); save(1, "b"); save(1, "f", partial=False)
    os.makedirs(FOLDER + "/empty_partial", exist_ok=True)
    def at_once(function):
        if smp.rank() == 0:
            function()
        smp.barrier()
    with torch.no_grad():
        [parameter.fill_(7) for parameter in model.local_parameters()]
    before = weights(model)
    def mixed():
        shutil.copy(FOLDER + "/b_partial/model_1_0.pt", FOLDER + "/a_partial/model_1_0.pt")
        os.remove(FOLDER + "/b_partial/optimizer_0_0.pt")
        with open(FOLDER + "/broken", "wb") as file:
            file.write(open(FOLDER + "/f", "rb").read()[:500])
        shutil.copy(FOLDER + "/f", FOLDER + "/g")
    at_once(mixed)
    def fails(call):
        return [json.loads(text) for text in smp.state.world.gather(json.dumps(told(call)))]
    resume = lambda *args, **options: smp.resume_from_checkpoint(FOLDER, *args, **options)
    result = [fails(lambda: resume("none")), fails(lambda: resume("empty")), fails(lambda: resume("f")), fails(lambda: resume("a", partial=False)), fails(lambda: resume("a")),
              fails(lambda: resume("b")), fails(lambda: resume("broken", partial=False)), fails(lambda: resume("g", partial=False)), fails(lambda: resume("../a")),
              fails(lambda: resume(f"a{smp.rank()}")), fails(lambda: smp.resume_from_checkpoint(3)), fails(lambda: smp.resume_from_checkpoint(FOLDER + "/absent")),
              fails(lambda: resume("f", partial=False, translate_function=3))]
    result.append(weights(model) == before)
""").replace("FOLDER", repr(place)))
        parts = ["there is no partial checkpoint '", "has no partition.json of smp.save_checkpoint()", "f' is a full checkpoint, which partial=False loads",
                 "a_partial' is a partial one, which partial=True loads", "model_1_0.pt' is of another save than partition.json", "optimizer_0_0.pt' is missing",
                 "is damaged", "are of 1 saves, none of which is whole", "tag='../a'; expected a text without '/'", "every rank of [0, 1] makes the same call", "path=3; expected the path",
                 "newest', which names the last save, cannot be read", "translate_function=3; expected a function"]
        for texts, part in zip(found[:-1], parts, strict=True):
            for text in texts:
                self.assertIn(part, text)
                self.assertRegex(text, r"^(CheckpointError|ConfigError|StateError): smp.resume_from_checkpoint")
        self.assertTrue(found[-1])

    def test_what_cannot_be_saved_is_told_on_every_rank_and_the_save_before_stands(self):
        place = str(self.folder / "saved")
        found = self.ran(2, (_BEGINS + """
    import resource
    class Own:
        pass
    def fails(call):
        return [json.loads(text) for text in smp.state.world.gather(json.dumps(told(call)))]
    save(1, "a")
    saved = lambda *args, **options: smp.save_checkpoint(*args, **{"model": model, **options})
    if smp.rank() == 0:
        open(FOLDER + "/file", "w").close()
    smp.barrier()
    texts = [fails(lambda: saved(FOLDER, "b", user_content={"args": Own()})), fails(lambda: saved(FOLDER + "/file", "b")), fails(lambda: saved(FOLDER, "b/c")), fails(lambda: saved(FOLDER, "newest")),
             fails(lambda: saved(FOLDER, "b", model=net)), fails(lambda: saved(FOLDER, "b", optimizer=3)), fails(lambda: saved(FOLDER, "b", num_kept_partial_checkpoints=0)),
             fails(lambda: saved(FOLDER, f"b{smp.rank()}")), fails(lambda: saved(FOLDER, "a_partial", partial=False))]
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if smp.rank() == 1:  # as of a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    texts.append(fails(lambda: saved(FOLDER, "a")))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if smp.rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    texts += [fails(lambda: saved(FOLDER, "a")), fails(lambda: saved(FOLDER, "a", partial=False))]
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    result = [texts, loaded("a"), sorted(os.listdir(FOLDER))]
""").replace("FOLDER", repr(place)))
        parts = ["user_content has objects of other classes", "File exists", "tag='b/c'; expected", "tag='newest'; expected", "model=Mlp; give the smp.DistributedModel",
                 "optimizer=int; give", "num_kept_partial_checkpoints=0; expected a whole number of 1 or more", "every rank of [0, 1] makes the same call",
                 "a_partial' is a folder; give another tag", "could not be written", "could not be written", "could not be written"]
        for texts, part in zip(found[0], parts, strict=True):
            for text in texts:
                self.assertIn(part, text)
                self.assertRegex(text, r"^(IoError|ConfigError|CheckpointError|UnsupportedError|StateError): smp.save_checkpoint")
        self.assertEqual(found[1:], [1, ["a_partial", "file", "newest"]])


if __name__ == "__main__":
    main()
