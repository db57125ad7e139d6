"""Uses that initialize() makes of its arguments, and refusals before anything has changed."""
import os

from harness import Case, RankServer, main

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import

_START = """
    import torch, trireme as deepspeed
    from torch import nn

    def model():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    CONFIG = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    SGD = {**CONFIG, "gradient_clipping": 0, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}

    def refusal(**arguments):
        try:
            deepspeed.initialize(**arguments)
        except deepspeed.errors.Error as error:
            return f"{type(error).__name__}: {error}"
        return "not refused"
"""


class Initialize(Case):
    """Parameter groups, callables, refusals."""

    def test_a_parameter_has_its_place_at_an_address_that_another_one_has_left(self):
        result = self.on_ranks(1, _START + """
    from trireme import parameters
    left = nn.Parameter(torch.ones(3))
    parameters.number(None, "", left)
    address = left.untyped_storage()._cdata
    left.data = torch.zeros(3)  # as at the end of an engine
    others = [nn.Parameter(torch.ones(3)) for _ in range(100)]
    taken = next(p for p in others if p.untyped_storage()._cdata == address)
    result = [parameters.is_numbered(taken)]
    parameters.number(None, "", taken)
    del left
    result.append(parameters.numbered(taken.detach()) is taken)
""")
        self.assertEqual(result, [False, True])

    def test_groups_keep_their_hyperparameters_whoever_makes_the_optimizer(self):
        result = self.on_ranks(2, _START + """
    def rates(net, **arguments):
        before = [p.detach().clone() for p in net.parameters()]
        groups = [{"params": [net[0].weight], "lr": 0.3}, {"params": [net[0].bias], "lr": 0.2}, {"params": list(net[2].parameters())}]
        engine, optimizer, *_ = deepspeed.initialize(model=net, model_parameters=groups, **arguments)
        engine.backward(engine(torch.ones(2, 4)).sum())
        gradients = [deepspeed.utils.safe_get_full_grad(p) for p in net.parameters()]
        engine.step()
        steps = [((b - p.detach()).abs().sum() / g.abs().sum()).item() for b, p, g in zip(before, net.parameters(), gradients)]
        return steps, [group["lr"] for group in optimizer.param_groups]

    result = [rates(model(), config=SGD), rates(model(), config={**CONFIG, "gradient_clipping": 0},
                                                optimizer=lambda groups: torch.optim.SGD(groups, lr=0.01))]
""")
        for steps, rates in result:
            self.assertEqual(rates, [0.3, 0.2, 0.01])
            self.assert_close(steps, [0.3, 0.2, 0.01, 0.01], 1e-4)

    def test_what_cannot_be_meant_is_refused_and_leaves_the_model_alone(self):
        result = self.on_ranks(1, _START + """
    net, other = model(), model()
    used_up = iter(net.parameters())
    list(used_up)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD(other.parameters(), lr=1.0), 0.1)
    result = {"foreign": refusal(model=net, model_parameters=other.parameters(), config=SGD),
              "used up": refusal(model=net, model_parameters=used_up, config=SGD),
              "scheduler": refusal(model=net, lr_scheduler=scheduler, config=SGD),
              "stage": refusal(model=net, model_parameters=net[0].parameters(), config={**SGD, "zero_optimization": {"stage": 4}})}
    trainable = [p.requires_grad for p in net.parameters()]
    engine, *_ = deepspeed.initialize(model=net, config=SGD)
    try:
        engine.save_checkpoint(folder, client_state={"settings": object()})
    except deepspeed.errors.ConfigError as error:
        result["client_state"] = str(error)
    result = [result, trainable, os.path.exists(os.path.join(folder, "latest"))]
""")
        texts, trainable, saved = result
        self.assertIn("is no parameter of the model", texts["foreign"])
        self.assertIn("a generator that was used up", texts["used up"])
        self.assertIn("this ExponentialLR steers another optimizer", texts["scheduler"])
        self.assertIn("zero_optimization.stage", texts["stage"])
        self.assertIn("client_state['settings'] (a builtins.object) could not be read back", texts["client_state"])
        self.assertEqual(trainable, [True] * 4)
        self.assertFalse(saved)

    def test_a_model_that_another_system_has_sharded_is_refused_by_name(self):
        result = self.on_ranks(1, _START + """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    deepspeed.init_distributed()
    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    result = refusal(model=net, config=SGD)
""")
        self.assertIn("UnsupportedError: initialize: parameter '0.weight' is a DTensor", result)
        self.assertIn("leave it out, ZeRO stage 3 shards parameters itself", result)

    def test_a_scheduler_that_cannot_be_made_leaves_the_model_alone(self):
        result = self.on_ranks(0, _START + """
    def left(lr_scheduler, optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1), config=CONFIG):
        net = model()
        net(torch.ones(2, 4)).sum().backward()
        try:
            deepspeed.initialize(model=net, optimizer=optimizer(net), lr_scheduler=lr_scheduler, config={**config, "bf16": {"enabled": True}})
        except (TypeError, deepspeed.errors.ConfigError) as error:
            return [type(error).__name__, str(net[0].weight.dtype), net[0].weight.grad is not None]

    wrong = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, stepsize=3)
    result = [left(wrong), left(wrong, lambda net: None, SGD), left(42)]
""")
        untouched = ["torch.float32", True]
        self.assertEqual(result, [["TypeError", *untouched], ["TypeError", *untouched], ["ConfigError", *untouched]])

    def test_every_refusal_names_what_was_given_and_the_fix(self):
        path = self.write("broken.json", '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 7}}')
        listed = self.write("list.json", "[1, 2]")
        latin = self.folder / "latin.json"
        latin.write_bytes('{"a": "é"}'.encode("latin-1"))
        pipe = self.folder / "pipe.json"
        os.mkfifo(pipe)
        result = self.on_ranks(0, _START + f"""
    net = model()
    deep, circle = {{}}, {{**CONFIG}}
    for _ in range(100_000):
        deep = {{"a": deep}}
    circle["a"] = [circle, circle]
    result = dict(
        deep=refusal(model=net, config=deep), circle=refusal(model=net, config=circle), pipe=refusal(model=net, config={str(pipe)!r}),
        key=refusal(model=net, config={{**CONFIG, "k" * 1_000_000: 1}}), keys=refusal(model=net, config={{str(i): i for i in range(200_001)}}),
        list=refusal(model=[net], config=CONFIG), kind=refusal(model=nn.Linear, config=CONFIG),
        data=refusal(model=net, training_data=5, config=CONFIG), empty=refusal(model=net, training_data=[], config=CONFIG),
        nan=refusal(model=net, config={{**CONFIG, "gradient_clipping": float("nan")}}), twice=refusal(model=net, config=CONFIG, config_params=CONFIG),
        group=refusal(model=net, model_parameters=[{{"lr": 1}}], config=SGD), auto=refusal(model=net, config={{**CONFIG, "gradient_clipping": "auto"}}),
        file=refusal(model=net, config={str(path)!r}), missing=refusal(model=net, config="nowhere.json"),
        json=refusal(model=net, config={str(listed)!r}), lbfgs=refusal(model=net, config=CONFIG, optimizer=torch.optim.LBFGS(net.parameters())),
        adafactor=refusal(model=net, config=CONFIG, optimizer=torch.optim.Adafactor(net.parameters())),
        nothing=refusal(model=net, config=CONFIG, optimizer=lambda p: None), section=refusal(model=net, config={{**CONFIG, "optimizer": "AdamW"}}),
        params=refusal(model=net, config={{**CONFIG, "optimizer": {{"type": "AdamW", "params": [1]}}}}), number=refusal(model=net, config=5),
        latin=refusal(model=net, config={str(latin)!r}), folder=refusal(model=net, config=folder), text=refusal(model=net, config='{{"a": 1}}'),
        tensor=refusal(model=net, config={{**CONFIG, "optimizer": {{"type": "Adam", "params": {{"lr": torch.tensor(1.0)}}}}}}))
""")
        for name, text in {"list": "a torch.nn.Module; put several", "kind": "make one, Linear(…)", "data": "training_data is a int",
                           "empty": "training_data is empty", "nan": "config['gradient_clipping'] is NaN; give it a number",
                           "twice": "two names of one argument", "group": "parameter group 0 has no \"params\", only ['lr']",
                           "auto": "config: `gradient_clipping` is \"auto\"", "file": f"{path}:1: `zero_optimization.stage` is 7",
                           "missing": "Received: 'nowhere.json'; there is no such file", "json": "expected an object, {…}, found [1, 2]",
                           "nothing": "the callable gave None", "section": "config: `optimizer` is \"AdamW\"",
                           "params": "config: `optimizer.params` is [1]", "number": "Received: 5", "latin": f"{latin}: not UTF-8",
                           "deep": "config: dicts and lists inside of each other, nested deeper than 100", "circle": "or inside of themselves",
                           "pipe": f"{pipe}: this is a pipe, expected a file", "key": "a key of 1000000 bytes", "keys": "more than 200000 values",
                           "folder": "; this is a folder", "text": "; pass json.loads()",
                           "tensor": "config['optimizer']['params']['lr'] is a torch.Tensor", "lbfgs": "LBFGS calls back for the loss", "adafactor": "rows and columns"}.items():
            self.assertIn(text, result[name], name)

    def test_released_memory_is_not_shared_memory(self):
        self.assertEqual(self.on_ranks(2, _START + """
    with deepspeed.zero.Init():
        other = nn.Linear(64, 64)
    told = [other.weight.is_shared()]
    model = nn.Linear(64, 64)
    engine, *_ = deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "trireme": {"gather": "copy"}})
    told += [model.weight.is_shared(), model.weight.untyped_storage().is_shared(), torch.empty(2).is_shared(), torch.empty(2).share_memory_().is_shared()]
    result = told
"""), [False, False, False, False, True])

    def test_engines_say_what_comes_too_late(self):
        result = self.on_ranks(1, _START + """
    import copy, logging
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    deepspeed.utils.logger.addHandler(handler)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=plateau, config=CONFIG)
    def refused(call):
        try:
            call()
        except deepspeed.errors.Error as error:
            return str(error)
    def train(**arguments):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step(**arguments)
    texts = [refused(train)]
    engine.step(lr_kwargs={"metrics": 1.0})
    for _ in range(2):
        train(lr_kwargs={"metrics": 2.0})
    texts.append(refused(lambda: copy.deepcopy(engine)))
    told.clear()
    net[0].weight = net[0].weight
    net.append(nn.Linear(1, 1))
    net[0].scale = nn.Parameter(torch.ones(1))
    late = list(told)
    engine.destroy()
    engine.destroy()
    net.append(nn.Linear(1, 1))
    result = [texts, engine.global_steps if not engine.is_spent else 3, optimizer.param_groups[0]["lr"], late, len(told)]
""")
        texts, steps, rate, late, count = result
        self.assertIn('engine.step(lr_kwargs={"metrics": …})', texts[0])
        self.assertIn("cannot be pickled or copied", texts[1])
        self.assertEqual([steps, rate], [3, 0.25])
        self.assertEqual([text.partition(" after")[0] for text in late],
                         [f"{owner} got the parameter '{name}'" for owner, name in
                          (("Sequential", "3.weight"), ("Sequential", "3.bias"), ("Linear", "scale"))])
        self.assertEqual(count, 3)

    def test_a_scheduler_of_the_program_takes_the_place_of_the_configurations(self):
        result = self.on_ranks(1, _START + """
    net = model()
    section = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}
    engine, optimizer, _, scheduler = deepspeed.initialize(model=net, config={**SGD, **section},
                                                           lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5))
    rates = []
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        rates.append([engine.get_lr()[0], optimizer.param_groups[0]["lr"]])
    def refused(call):
        try:
            call()
        except deepspeed.errors.Error as error:
            return str(error)
    texts = [refused(lambda: engine.set_lr("x"))]
    optimizer.param_groups[0]["lr"] = "y"
    texts.append(refused(engine.step))
    engine.destroy()
    texts.append(refused(engine.step))
    result = [type(scheduler).__name__, rates, texts]
""")
        self.assertEqual(result[:2], ["StepLR", [[0.005, 0.005], [0.0025, 0.0025], [0.00125, 0.00125]]])
        for text, found in zip(("set_lr: 'x' is no learning rate", "param_groups[0]['lr'] is 'y'", "step: the engine was destroyed"), result[2]):
            self.assertIn(text, found)

    def test_makes_an_optimizer_of_torch_that_the_configuration_names(self):
        result = self.on_ranks(2, _START + """
    def trained(**arguments):
        net = model()
        engine, *_ = deepspeed.initialize(model=net, **arguments)
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
        return [p.detach().flatten().tolist() for p in net.parameters()]

    def section(kind, **params):
        return {**CONFIG, "optimizer": {"type": kind, "params": params}}

    kinds = {"RMSprop": {"lr": 0.1, "alpha": 0.9}, "NAdam": {"lr": 0.1}, "Adamax": {"lr": 0.1}, "Adadelta": {"lr": 0.1}, "RAdam": {"lr": 0.1},
             "ASGD": {"lr": 0.1}, "Rprop": {"lr": 0.1}}
    result = {kind: [trained(config=section(kind, **params)),
                     trained(config=CONFIG, optimizer=lambda groups: getattr(torch.optim, kind)(groups, **params))]
              for kind, params in kinds.items()}
    result["refused"] = [refusal(model=model(), config=section(kind, **params)) for kind, params in
                         (("LBFGS", {}), ("RMSprop", {"rho": 1}), ("OneBitAdam", {}))]
""")
        refused = result.pop("refused")
        for kind, (by_name, by_object) in result.items():
            self.assertEqual(by_name, by_object, kind)
        self.assertIn("LBFGS calls back for the loss", refused[0])
        self.assertTrue(refused[1].startswith("ConfigError: config: `optimizer.params` is {'rho': 1}, and torch.optim.RMSprop says TypeError"), refused[1])
        self.assertIn("`optimizer.type` = \"OneBitAdam\" is not there yet", refused[2])

    def test_takes_configurations_of_accelerate(self):
        result = self.on_ranks(2, _START + """
    deepspeed.init_distributed()
    path = folder + "/fsdp.yaml"
    if deepspeed.comm.get_rank() == 0:
        with open(path, "w") as file:
            file.write("distributed_type: FSDP\\nmixed_precision: bf16\\nfsdp_config:\\n  fsdp_version: 2\\n  fsdp_reshard_after_forward: false\\n")
    deepspeed.comm.barrier()
    plugin = {"fsdp_version": 2, "reshard_after_forward": False, "mixed_precision_policy": "bf16"}
    result = []
    for config in (path, plugin):
        engine = deepspeed.initialize(model=model(), config=config, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.01))[0]
        result.append([engine.zero_optimization_stage(), engine.bfloat16_enabled(), engine.gradient_clipping()])
        engine.destroy()
    result.append(refusal(model=model(), config={"sharding_strategy": "HYBRID_SHARD"}))
""")
        self.assertEqual(result[:2], [[2, True, 0.0]] * 2)
        self.assertEqual(result[2], "UnsupportedError: config: `sharding_strategy` = \"HYBRID_SHARD\" is not there yet; use FULL_SHARD or SHARD_GRAD_OP, or DeepSpeed's "
                         "keys with `zero_optimization.mics_shard_size`, the ranks of a machine")

    def test_every_mistake_of_a_file_is_told_by_its_line_and_the_name_that_it_has_there(self):
        accelerates = self.write("ds.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 5\n  gradient_accumulation_steps: one\n")
        autos = self.write("ds.json", '{"train_micro_batch_size_per_gpu": "auto",\n"gradient_clipping": "auto",\n"zero_optimization": {"stgae": 3}}')
        result = self.on_ranks(2, _START + f"""
    result = [refusal(model=model(), config=path) for path in ({str(accelerates)!r}, {str(autos)!r})]
""")
        self.assertEqual(result[0].splitlines(), [
            f"ConfigError: {accelerates}:3: `deepspeed_config.zero_stage` is 5; expected an integer from 0 to 3",
            f"{accelerates}:4: `deepspeed_config.gradient_accumulation_steps` is \"one\"; expected an integer from 1 to 2147483647"])
        self.assertEqual(result[1].splitlines(), [
            f"ConfigError: {autos}: `train_micro_batch_size_per_gpu`, `gradient_clipping` are \"auto\", which transformers or Accelerate fill in "
            "before initialize(); without them give them values, or leave them out",
            f"{autos}:3: unknown key `zero_optimization.stgae`. Did you mean `stage`?"])

    def test_configurations_that_differ_by_rank_are_named_on_every_rank(self):
        result = self.on_ranks(2, _START + """
    rank = deepspeed.comm.world().rank
    lr = refusal(model=model(), config={**SGD, "optimizer": {"type": "SGD", "params": {"lr": 0.01 + rank}}})
    kind = refusal(model=model(), config={**SGD, "optimizer": {"type": ("SGD", "Lamb")[rank], "params": {"lr": 0.01}}})
    net = model()
    net[2] = nn.Linear(8, 1 + rank)
    wide = refusal(model=net, config=SGD)
    more = refusal(model=nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + rank)]), config=SGD)
    result = [lr, kind, wide, more]
""")
        self.assertIn("differ in `optimizer.params.lr` (here 0.01)", result[0])
        self.assertRegex(result[1], "^ConfigError: initialize: the ranks' configurations .*`optimizer.type` \\(here 'SGD'\\)")
        self.assertIn("models differ, first in `parameter '2.weight' [1, 8] fp32` on rank 0 and `parameter '2.weight' [2, 8] fp32` on rank 1", result[2])
        self.assertIn("models differ, first in `nothing more` on rank 0 and `parameter '", result[3])


if __name__ == "__main__":
    main()
