"""The record of a Python program's run: one key, and metrics.jsonl and report.html are there, whichever engine
trains."""
import json
import textwrap

from harness import Case, RankServer, launch, main

_PROGRAM = """
    import torch
    import deepspeed

    def steps(engine, count):
        losses = []
        for number in range(count):
            ids = torch.full((2, 5), number % 7)
            loss = engine(ids).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    def config(**more):
        return {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "trireme": {"record": f"{folder}/run"},
                "optimizer": {"type": "SGD", "params": {"lr": 0.125}}, **more}

    torch.manual_seed(3)
    model = torch.nn.Embedding(7, 4)
"""


class Record(Case):
    def lines(self, folder="run"):
        return [json.loads(line) for line in (self.folder / folder / "metrics.jsonl").read_text().splitlines()]

    def steps(self):
        return [line for line in self.lines() if "event" not in line]

    def test_a_program_that_just_ends_leaves_a_whole_record(self):
        result = self.on_ranks(2, _PROGRAM + """
    engine, *_ = deepspeed.initialize(model=model, config=config())
    losses = steps(engine, 3)
    engine.save_checkpoint(f"{folder}/saved")
    result = losses
""", as_deepspeed=True)
        steps = self.steps()
        self.assertEqual([line["loss"] for line in steps], result)
        self.assertEqual([line["step"] for line in steps], [1, 2, 3])
        self.assertEqual([line["lr"] for line in steps], [0.125] * 3)
        self.assertEqual([line["samples"] for line in steps], [4, 8, 12])
        self.assertEqual([line["tokens"] for line in steps], [20, 40, 60])  # the inputs are token ids
        events = {line["event"]: line for line in self.lines() if "event" in line}
        self.assertEqual(list(events), ["run", "checkpoint", "end"])
        self.assertEqual((events["run"]["parameters"], events["run"]["ranks"]), (28, 2))
        self.assertEqual(events["run"]["config"]["trireme"]["record"], str(self.folder / "run"))
        self.assertIn("Training report", (self.folder / "run/report.html").read_text())

    def test_tokens_are_those_of_each_step(self):
        self.on_ranks(2, _PROGRAM + """
    engine, *_ = deepspeed.initialize(model=model, config=config(gradient_accumulation_steps=2))
    for length in (100, 10, 50, 5, 8, 8):
        engine.backward(engine(torch.ones(2, length, dtype=torch.long)).square().mean())
        engine.step()
        with torch.no_grad():
            engine(torch.ones(2, 1000, dtype=torch.long))
    result = None
""", as_deepspeed=True)
        self.assertEqual([line["tokens"] for line in self.steps()], [440, 660, 724])

    def test_a_program_that_fails_says_by_what(self):
        script = self.snippet(_PROGRAM + """
    engine, *_ = deepspeed.initialize(model=model, config=config())
    steps(engine, 2)
    raise ValueError("no more data")
""")
        status, _, err = launch(1, ["-m", "trireme.as_deepspeed", script])
        self.assertNotEqual(status, 0)
        self.assertIn("no more data", err)
        self.assertEqual(self.lines()[-1]["reason"], "ValueError: no more data")
        self.assertIn("The run ended early: ValueError: no more data", (self.folder / "run/report.html").read_text())

    def test_a_schedulers_rate_is_the_one_that_the_step_was_taken_with(self):
        result = self.on_ranks(1, _PROGRAM + """
    engine, *_ = deepspeed.initialize(model=model, config=config(scheduler={"type": "WarmupLR", "params": {
        "warmup_min_lr": 0.5, "warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"}}))
    rates = []
    for _ in range(3):
        rates.append(engine.get_lr()[0])
        steps(engine, 1)
    result = rates
""", as_deepspeed=True)
        self.assertEqual([line["lr"] for line in self.steps()], result)
        self.assertEqual(len(set(result)), 2)

    def test_a_pipelines_record_has_its_loss(self):
        result = self.on_ranks(2, """
    import torch
    import deepspeed
    torch.manual_seed(3)
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    net = deepspeed.pipe.PipelineModule(layers, num_stages=2, loss_fn=torch.nn.MSELoss())
    engine, *_ = deepspeed.initialize(model=net, config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "trireme": {"record": f"{folder}/run"},
        "optimizer": {"type": "SGD", "params": {"lr": 0.125}}})
    batches = iter([(torch.full((2, 4), 0.5 + n), torch.ones(2, 1)) for n in range(4)])
    result = [engine.train_batch(batches).item() for _ in range(2)]
""", as_deepspeed=True)
        self.assertEqual([line["loss"] for line in self.steps()], result)
        self.assertEqual(self.lines()[0]["parameters"], 4 * 4 + 4 + 4 * 1 + 1)

    def test_a_pipelines_parameters_are_those_of_all_stages_tied_ones_once(self):
        self.on_ranks(2, """
    import torch
    import deepspeed
    from deepspeed.pipe import PipelineModule, TiedLayerSpec
    def head(module, x):
        return x @ module.weight.T
    layers = [TiedLayerSpec("words", torch.nn.Embedding, 7, 4), torch.nn.Linear(4, 4), TiedLayerSpec("words", torch.nn.Embedding, 7, 4, forward_fn=head)]
    net = PipelineModule(layers, num_stages=2, loss_fn=lambda out, y: torch.nn.functional.cross_entropy(out, y))
    engine, *_ = deepspeed.initialize(model=net, config={
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, "trireme": {"record": f"{folder}/run"},
        "optimizer": {"type": "SGD", "params": {"lr": 0.125}}})
    ids = torch.tensor([1, 2])
    result = engine.train_batch(iter([(ids, ids)])).item()
""", as_deepspeed=True)
        self.assertEqual(self.lines()[0]["parameters"], 7 * 4 + 4 * 4 + 4)

    def test_fsdp_and_smp_programs_have_the_record_that_the_variable_asks_for(self):
        variable = {"TRIREME_RECORD": str(self.folder / "run")}
        self.on_ranks(2, """
    import torch
    from trireme.fsdp import fully_shard
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    result = None
""", environment=variable)
        self.assertEqual([(line["step"], line["lr"]) for line in self.steps()], [(1, 0.25), (2, 0.25), (3, 0.25)])
        self.assertNotIn("samples", self.steps()[0])  # nobody has said how many there are
        self.assertEqual((self.lines()[0]["parameters"], self.lines()[-1]["event"]), (4 * 8 + 8 + 8 * 2 + 2, "end"))
        self.on_ranks(2, """
    import torch
    import trireme.smp as smp
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    @smp.step
    def train_step(x):
        loss = model(x).sum()
        model.backward(loss)
        return loss
    for _ in range(2):
        optimizer.zero_grad()
        train_step(torch.ones(4, 4))
        optimizer.step()
    result = None
""", environment=variable)
        self.assertEqual([(line["step"], line["lr"]) for line in self.steps()], [(1, 0.5), (2, 0.5)])
        self.assertNotIn("samples", self.steps()[0])
        self.assertEqual(self.lines()[0]["parameters"], 4 * 8 + 8 + 8 * 2 + 2)
        self.assertTrue((self.folder / "run/metrics.before.jsonl").exists())  # FSDP's

    def test_the_key_overrides_the_variable_and_engines_beside_each_other_have_folders_of_their_own(self):
        self.on_ranks(2, _PROGRAM + """
    named, *_ = deepspeed.initialize(model=torch.nn.Embedding(7, 4), config=config(trireme={"record": f"{folder}/named"}))
    first, *_ = deepspeed.initialize(model=model, config=config(trireme={}))
    second, *_ = deepspeed.initialize(model=torch.nn.Embedding(7, 2), config=config(trireme={}))
    for engine in (named, first, second):
        steps(engine, 1)
    result = None
""", as_deepspeed=True, environment={"TRIREME_RECORD": str(self.folder / "variable")})
        found = {folder: self.lines(folder)[0]["parameters"] for folder in ("named", "variable", "variable/2")}
        self.assertEqual(found, {"named": 28, "variable": 28, "variable/2": 14})

    def test_two_names_of_one_folder_are_told_apart_from_two_folders(self):
        result = self.on_ranks(2, _PROGRAM + """
    import os
    os.makedirs(f"{folder}/run", exist_ok=True)
    if os.environ["RANK"] == "0":
        os.symlink("run", f"{folder}/link")
    first, *_ = deepspeed.initialize(model=model, config=config())
    try:
        deepspeed.initialize(model=torch.nn.Embedding(7, 4), config=config(trireme={"record": f"{folder}/link"}))
        result = None
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    first.destroy()
    other, *_ = deepspeed.initialize(model=torch.nn.Embedding(7, 4), config=config(trireme={"record": f"{folder}/link/../link"}))
    steps(other, 1)
""", as_deepspeed=True)
        self.assertIn("where another engine of this process writes its record", result)
        self.assertEqual(len(self.steps()), 1)

    def test_a_folder_that_is_removed_meanwhile_is_warned_of_when_the_program_ends(self):
        program = textwrap.dedent(_PROGRAM + """
    import shutil
    engine, *_ = deepspeed.initialize(model=model, config=config())
    steps(engine, 2)
    if deepspeed.comm.get_rank() == 0:
        shutil.rmtree(f"{folder}/run")
    steps(engine, 2)
""")
        path = self.write("removed.py", f"folder = {str(self.folder)!r}\n{program}")
        status, _, err = RankServer.run(2, [path], as_deepspeed=True)
        self.assertEqual(status, 0, err)
        self.assertEqual(err.count("`trireme.record`: the record lacks what could not be written, and training goes on"), 1, err)

    def test_a_folder_that_cannot_be_written_is_refused_by_name(self):
        result = self.on_ranks(2, _PROGRAM + """
    open(f"{folder}/run", "a").close()
    try:
        deepspeed.initialize(model=model, config=config())
        result = None
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
""", as_deepspeed=True)
        self.assertIn("`trireme.record` is", result)
        self.assertTrue(result.startswith("IoError"), result)
        self.assertIn("name a folder that rank 0 can write", result)


if __name__ == "__main__":
    main()
