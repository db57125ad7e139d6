"""A program's own optimizers and schedulers: trained as in plain PyTorch, or refused by name before anything has
changed."""
import pathlib

from harness import RankServer, main
from small_model import Case

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import

_START = f"""
import sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
from zoo import optimizers as own
told = []
import logging
handler = logging.Handler()
handler.emit = lambda record: told.append(record.getMessage())
deepspeed.utils.logger.addHandler(handler)
def plain(make, steps=6, schedule=None):
    net = model()
    optimizer = make(net)
    return alone(net, optimizer, steps, schedule and schedule(optimizer)), optimizer
def started(make, stage=3, net=None, schedule=None, **more):
    net = net or model()
    optimizer = make(net)
    return deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=schedule and schedule(optimizer), config=config(stage, **more))[0]
def weights(engine):
    with deepspeed.zero.GatheredParameters(engine.module):
        return flat(engine.module)
def distance(engine, expected):
    return (weights(engine) - expected).abs().max().item()
def wrong(make, steps=6, stage=3, schedule=None):
    expected = plain(make, steps, schedule)[0]
    engine = started(make, stage, schedule=schedule)
    train(engine, steps)
    found = distance(engine, expected)
    engine.destroy()
    return found
def refusal(**arguments):
    net = arguments.pop("model", None) or model()
    before = flat(net)
    text = raised(lambda: deepspeed.initialize(model=net, **arguments))
    return text and text[-1], torch.equal(before, flat(net)) and all(p.dtype == torch.float32 for p in net.parameters())
"""


class OwnOptimizers(Case):
    """Each compared with plain PyTorch on the whole batch."""

    def told(self, ranks, text):
        """The result of a program that begins with what stands above."""
        return self.ran(ranks, _START + text)

    def test_a_scheduler_section_leaves_the_options_of_an_optimizer_that_steps_itself_alone(self):
        result = self.told(2, """
warmup = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.05, "warmup_num_steps": 3, "warmup_type": "linear"}}
makers = {"Adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.05, amsgrad=True, betas=(0.5, 0.7), eps=1e-3, weight_decay=0.1),
          "RMSprop": lambda net: torch.optim.RMSprop(net.parameters(), lr=0.05, momentum=0.9, eps=1e-3, weight_decay=0.1)}
result = {}
for name, make in makers.items():
    engine = started(make, scheduler=warmup)
    train(engine, 6)
    net = model()
    optimizer = make(net)
    expected = alone(net, optimizer, 6, deepspeed.runtime.lr_schedules.WarmupLR(optimizer, **warmup["params"]))
    ours, theirs = ({key: value for key, value in o.param_groups[0].items() if key != "params"} for o in (engine.optimizer, optimizer))
    result[name] = [distance(engine, expected), ours == theirs, (flat(model()) - expected).abs().max().item()]
""")
        for name, (difference, same, way) in result.items():
            self.assertLess(difference, 1e-5, name)
            self.assertTrue(same, name)
            self.assertGreater(way, 1e-2)

    def test_optimizers_that_wrap_others_or_keep_what_they_need_elsewhere_train(self):
        result = self.told(2, """
sgd = lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
makers = {"Lookahead": lambda net: own.Lookahead(sgd(net)),
          "Lookahead of RMSprop": lambda net: own.Lookahead(torch.optim.RMSprop(net.parameters(), lr=0.01, eps=1e-3)),
          "EarlyLookahead": lambda net: own.EarlyLookahead(sgd(net)),
          "ScheduleFree": lambda net: own.ScheduleFree(net.parameters()),
          "Counting": lambda net: own.Counting(net.parameters()),
          "ThreeBetas": lambda net: own.ThreeBetas(net.parameters())}
def marked(net):
    for p in net[0].parameters(): p.is_fast = True
    return own.Marked(net.parameters())
makers["Marked"] = marked
result = {name: [wrong(make, stage=stage) for stage in (0, 1, 3)] for name, make in makers.items()}
result["Normed"] = [wrong(lambda net: own.Normed(net.parameters()), stage=0)]
result["Distance"] = [wrong(lambda net: own.Distance(net.parameters()), stage=0)]
""")
        for name, differences in result.items():
            for difference in differences:
                self.assertLess(difference, 1e-5, f"{name}: {differences}")

    def test_what_param_groups_and_attributes_count_is_seen_and_saved(self):
        program = """
def trained(make, steps, first=0):
    engine = started(make, stage=STAGE)
    if first:
        train(engine, 1)  # what stands there is overwritten
        engine.load_checkpoint(f"{folder}/{name}")
    train(engine, steps - first, first)
    return engine
makers = {"ScheduleFree": lambda net: own.ScheduleFree(net.parameters()), "Counting": lambda net: own.Counting(net.parameters()),
          "Lookahead": lambda net: own.Lookahead(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), every=4),
          "EarlyLookahead": lambda net: own.EarlyLookahead(torch.optim.NAdam(net.parameters(), lr=0.01, eps=1e-3), every=3)}
if STAGE == 0:
    makers["Distance"] = lambda net: own.Distance(net.parameters())
result = {}
for name, make in makers.items():
    expected, optimizer = plain(make, 7)
"""
        for ranks, then, stage in ((2, 1, 3), (1, 2, 3), (1, 1, 0)):
            with self.subTest(ranks=ranks, then=then, stage=stage):
                self.told(ranks, f"STAGE = {stage}" + program + """
    engine = trained(make, 3)
    engine.save_checkpoint(f"{folder}/{name}")
    train(engine, 4, first=3)  # the save has changed nothing
    assert distance(engine, expected) < 1e-5, name
    engine.destroy()
""")
                result = self.told(then, f"STAGE = {stage}" + program + """
    engine = trained(make, 7, first=3)
    group, other = engine.optimizer.param_groups[0], optimizer.param_groups[0]
    same = all(abs(group[key] - other[key]) < 1e-5 for key in ("k", "weight_sum", "d", "counter") if key in group)
    result[name] = [distance(engine, expected), same, [getattr(o, "t", 0) for o in (engine.client_optimizer, optimizer)]]
    engine.destroy()
""")
                for name, (difference, same, counts) in result.items():
                    self.assertLess(difference, 1e-5, name)
                    self.assertTrue(same, name)
                    self.assertEqual(counts[0], counts[1], name)

    def test_schedule_free_optimizers_move_the_weights_for_an_evaluation_and_back(self):
        result = self.told(2, """
make = lambda net: own.ScheduleFree(net.parameters())
net = model()
optimizer = make(net)
alone(net, optimizer, 3)
optimizer.eval(); averaged = flat(net); optimizer.train()
engine = started(make, stage=2)
train(engine, 3)
engine.optimizer.eval()
result = [distance(engine, averaged), (averaged - flat(net)).abs().max().item(), engine.optimizer.param_groups[0]["train_mode"], engine.global_steps]
engine.client_optimizer.train()  # the program's own object does the same
result += [distance(engine, flat(net)), engine.optimizer.param_groups[0]["train_mode"]]
""")
        self.assertLess(result[0], 1e-5)
        self.assertGreater(result[1], 1e-3)
        self.assertEqual(result[2:4], [False, 3])
        self.assertLess(result[4], 1e-5)
        self.assertTrue(result[5])

    def test_options_that_differ_by_group_or_are_written_later_count(self):
        result = self.told(2, """
def halves(net):
    parameters = list(net.parameters())
    return parameters[:3], parameters[3:]
def nesterov(net):
    first, second = halves(net)
    return torch.optim.SGD([{"params": first}, {"params": second, "nesterov": True}, ], lr=0.1, momentum=0.9)
def unsteady(net):
    first, second = halves(net)
    return torch.optim.SGD([{"params": first, "nesterov": True, "momentum": 0.9}, {"params": second}], lr=0.1)
def decoupled(net):
    first, second = halves(net)
    return torch.optim.Adam([{"params": first}, {"params": second, "decoupled_weight_decay": True}], lr=0.01, weight_decay=0.5, eps=1e-3)
def all_decoupled(net):
    return torch.optim.Adam([{"params": net.parameters(), "decoupled_weight_decay": True}], lr=0.01, weight_decay=0.5, eps=1e-3)
result = {"wrong": [wrong(make) for make in (nesterov, unsteady, decoupled, all_decoupled)], "later": []}
for key, value, make in (("nesterov", True, lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)),
                         ("maximize", True, lambda net: torch.optim.RMSprop(net.parameters(), lr=0.01, eps=1e-3))):
    net = model()
    optimizer = make(net)
    alone(net, optimizer, 2)
    optimizer.param_groups[0][key] = value
    for step in (2, 3):
        optimizer.zero_grad()
        x, y = batch(step)
        torch.nn.functional.mse_loss(net(x), y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    engine = started(make)
    train(engine, 2)
    engine.optimizer.param_groups[0][key] = value
    train(engine, 2, first=2)
    result["later"].append(distance(engine, flat(net)))
engine = started(lambda net: torch.optim.Adam(net.parameters(), lr=0.01))
train(engine, 1)
before = weights(engine)
for key, value in (("maximize", True), ("amsgrad", True), ("decoupled_weight_decay", True)):
    engine.optimizer.param_groups[0][key] = value
    result[key] = raised(lambda: train(engine, 1))
    engine.optimizer.param_groups[0][key] = False
result["same"] = torch.equal(before, weights(engine))
train(engine, 1)
""")
        for difference in result["wrong"] + result["later"]:
            self.assertLess(difference, 1e-5, result)
        for key in ("maximize", "amsgrad", "decoupled_weight_decay"):
            self.assertEqual(result[key][0], "ConfigError")
            self.assertIn(f"param_groups[0]['{key}'] is True now, and was False at initialize()", result[key][-1])
        self.assertTrue(result["same"])

    def test_what_cannot_be_stepped_on_parts_is_refused_by_name_before_the_model_changes(self):
        result = self.told(2, """
sgd = lambda net: torch.optim.SGD(net.parameters(), lr=0.1)
makers = {"Normed": lambda net: own.Normed(net.parameters()), "Distance": lambda net: own.Distance(net.parameters()),
          "ByDims": lambda net: own.ByDims(net.parameters()), "Indirect": lambda net: own.Indirect(net.parameters()),
          "Listed": lambda net: own.Listed(sgd(net)), "Wanting": lambda net: own.Wanting(net.parameters()), "Idle": lambda net: own.Idle(net.parameters())}
result = {}
for name, make in makers.items():
    net = model()
    result[name] = refusal(model=net, optimizer=make(net), config=config(2, bf16={"enabled": True}))
torch.manual_seed(3)
first = torch.rand(1).item()
torch.manual_seed(3)
net = model()
torch.manual_seed(3)
started(lambda net: own.Counting(net.parameters()), net=net)
result["random"] = [first, torch.rand(1).item()]
""")
        same_numbers = result.pop("random")
        for name, text in {"Normed": "looks at more than one element at a time; at stage 0", "Distance": "with the parameters divided over ranks",
                           "ByDims": "on flat tensors its steps differ", "Indirect": "its attribute `held` (HeldElsewhere) holds parameters",
                           "Listed": "in `slow_weights`, which belongs to no parameter", "Wanting": "AssertionError: Wanting needs a closure",
                           "Idle": "left the parameters of its param_groups as they were"}.items():
            found, unchanged = result[name]
            self.assertIn(f"optimizer: {name} cannot step itself here", found)
            self.assertIn(text, found)
            self.assertTrue(unchanged, name)
        self.assertEqual(same_numbers[0], same_numbers[1])

    def test_a_frozen_group_and_a_scheduler_made_before_initialize_go_together(self):
        result = self.told(2, """
def make(kind):
    def of(net):
        net[0].requires_grad_(False)
        groups = [{"params": list(net[0].parameters()), "lr": 0.5}, {"params": list(net[2].parameters()), "lr": 0.2}, {"params": list(net[4].parameters())}]
        return kind(groups, lr=0.1)
    return of
halved = lambda optimizer: torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.5)
result = []
for kind in (torch.optim.SGD, own.Counting):
    result.append(wrong(make(kind), steps=4, schedule=halved))
    engine = started(make(kind), schedule=halved)
    train(engine, 1)
    result.append([engine.get_lr(), [group["lr"] for group in engine.optimizer.param_groups], len(engine.get_mom())])
    told.clear()
    engine.module[0].requires_grad_(True)
    engine.get_lr(); engine.get_lr()
    result.append(told[:])
    engine.destroy()
""")
        for difference, numbers, told in (result[:3], result[3:]):
            self.assertLess(difference, 1e-5)
            self.assertEqual(numbers, [[0.25, 0.1, 0.05], [0.25, 0.1, 0.05], 3])
            self.assertEqual(len(told), 1)
            self.assertIn("2 parameters of the optimizer that were frozen at initialize() require gradients now", told[0])

    def test_momentum_groups_and_betas_that_come_late_are_named_before_the_step(self):
        result = self.told(1, """
engine = started(lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
train(engine, 1)
before = weights(engine)
engine.optimizer.param_groups[0]["momentum"] = 0.9
result = [raised(lambda: train(engine, 1))]
engine.optimizer.param_groups[0]["momentum"] = 0
group = {"params": [torch.nn.Parameter(torch.ones(2))]}
result.append(raised(lambda: engine.optimizer.add_param_group(dict(group))))
engine.client_optimizer.add_param_group(dict(group))
result.append(raised(lambda: train(engine, 1)))
engine.client_optimizer.param_groups.pop()
result.append(torch.equal(before, weights(engine)))
train(engine, 1)
engine = started(lambda net: torch.optim.Adam(net.parameters(), lr=0.1))
engine.optimizer.param_groups[0]["betas"] = (0.9, 0.9, 0.9)
result.append(raised(lambda: train(engine, 1)))
""")
        self.assertEqual([found[0] for found in result if not isinstance(found, bool)], ["ConfigError"] * 4)
        self.assertIn("began with momentum=0", result[0][-1])
        for found in result[1:3]:
            self.assertIn("optimizer.add_param_group: ", found[-1])
        self.assertTrue(result[3])
        self.assertIn("param_groups[0]['betas'] is (0.9, 0.9, 0.9); expected two numbers", result[4][-1])

    def test_a_tensor_as_learning_rate_stays_the_same_tensor(self):
        result = self.told(2, """
halved = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2, "warmup_num_steps": 3, "warmup_type": "linear"}}
kinds = {"SGD": lambda net, lr: torch.optim.SGD(net.parameters(), lr=lr, fused=False, foreach=False),
         "RMSprop": lambda net, lr: torch.optim.RMSprop(net.parameters(), lr=lr, eps=1e-2, foreach=False)}
result = {}
for name, make in kinds.items():
    for way in ("torch", "section"):
        rate = torch.tensor(0.1)
        engine = started(lambda net: make(net, rate), schedule=halved if way == "torch" else None, **({"scheduler": warmup} if way == "section" else {}))
        train(engine, 3)
        net = model()
        optimizer = make(net, 0.1)
        schedule = halved(optimizer) if way == "torch" else deepspeed.runtime.lr_schedules.WarmupLR(optimizer, **warmup["params"])
        expected = alone(net, optimizer, 3, schedule)
        result[f"{name} {way}"] = [engine.optimizer.param_groups[0]["lr"] is rate, rate.item() - optimizer.param_groups[0]["lr"], distance(engine, expected)]
        engine.set_lr(0.5)
        result[f"{name} {way}"].append(rate.item() == 0.5 == engine.get_lr()[0])
        engine.destroy()
rate = torch.tensor(0.1)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate, foreach=False)
deepspeed.runtime.lr_schedules.WarmupLR(optimizer, warmup_max_lr=0.25, warmup_num_steps=2).step(3)
result["alone"] = [optimizer.param_groups[0]["lr"] is rate, rate.item() - 0.25, 0.0, True]
""")
        for name, (same, rate, difference, settable) in result.items():
            self.assertTrue(same and settable, name)
            self.assertLess(abs(rate), 1e-7, name)
            self.assertLess(difference, 1e-5, name)

    def test_results_pass_isinstance_as_in_deepspeed(self):
        result = self.told(1, """
from trireme.runtime import lr_schedules, ZeROOptimizer, DeepSpeedOptimizer
from trireme.zero import DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3
kinds = {"SGD": torch.optim.SGD, "Counting": own.Counting, "ZeRO": ZeROOptimizer, "DeepSpeed": DeepSpeedOptimizer,
         "12": DeepSpeedZeroOptimizer, "3": DeepSpeedZeroOptimizer_Stage3, "torch": torch.optim.Optimizer}
def names(optimizer):
    return sorted(name for name, kind in kinds.items() if isinstance(optimizer, kind))
sgd, counting = (lambda net: torch.optim.SGD(net.parameters(), lr=0.1)), (lambda net: own.Counting(net.parameters()))
result = {stage: names(started(sgd, stage).optimizer) for stage in (0, 1, 2, 3)}
result["own"] = names(started(counting, 0).optimizer)
result["bf16"] = names(started(sgd, 0, bf16={"enabled": True}).optimizer)
engine = started(sgd, 0, fp16={"enabled": True, "loss_scale": 8})
result["fp16"] = names(engine.optimizer)
result["scaler"] = [engine.optimizer.needs_scaler(), started(sgd, 0, fp16={"enabled": True}).optimizer.needs_scaler(),
                    started(sgd, 2, torch_autocast={"enabled": True, "dtype": "float16"}).optimizer.needs_scaler(),
                    started(sgd, 2, bf16={"enabled": True}).optimizer.needs_scaler()]
result["lookahead"] = started(lambda net: own.Lookahead(sgd(net), every=7), 0).optimizer.every
sections = {"WarmupLR": {"warmup_num_steps": 2}, "WarmupDecayLR": {"total_num_steps": 4}, "WarmupCosineLR": {"total_num_steps": 4},
            "LRRangeTest": {}, "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2, "cycle_second_step_size": 0,
                                            "cycle_min_mom": 0.5, "cycle_max_mom": 0.75}}
for name, params in sections.items():
    engine = started(lambda net: torch.optim.Adam(net.parameters(), lr=0.1), 1, scheduler={"type": name, "params": params})
    train(engine, 1)
    result[name] = [isinstance(engine.lr_scheduler, getattr(lr_schedules, name)), engine.lr_scheduler.last_batch_iteration,
                    engine.lr_scheduler.get_lr() == engine.get_lr() == [engine.optimizer.param_groups[0]["lr"]]]
result["mom"] = [engine.lr_scheduler.get_mom(), engine.optimizer.param_groups[0]["betas"], engine.get_mom()]
optimizer = torch.optim.Adam([{"params": [torch.nn.Parameter(torch.ones(1))]}, {"params": [torch.nn.Parameter(torch.ones(1))]}], lr=1.0)
cycle = lr_schedules.OneCycle(optimizer, [0.0, 0.1], [0.2, 0.5], cycle_first_step_size=2, cycle_second_step_size=0, cycle_min_mom=[0.5, 0.6], cycle_max_mom=0.8)
cycle.step()
result["lists"] = [cycle.get_lr(), cycle.get_mom(), [group["betas"] for group in optimizer.param_groups]]
engine = started(counting, 1, scheduler={"type": "OneCycle", "params": {**sections["OneCycle"]}})
train(engine, 1)
result["own momentum"] = [engine.get_lr()[0], engine.get_type(), engine.get_mom()]
engine = started(lambda net: own.ThreeBetas(net.parameters()), 1, scheduler={"type": "OneCycle", "params": {**sections["OneCycle"]}})
train(engine, 1)
result["three"] = [engine.optimizer.param_groups[0]["betas"], engine.get_mom()]
""")
        self.assertEqual(result["0"], ["SGD", "torch"])
        for stage in ("1", "2"):
            self.assertEqual(result[stage], ["12", "DeepSpeed", "ZeRO", "torch"])
        self.assertEqual(result["3"], ["3", "DeepSpeed", "ZeRO", "torch"])
        self.assertEqual([result["own"], result["bf16"], result["fp16"]], [["Counting", "torch"], ["DeepSpeed", "ZeRO", "torch"], ["DeepSpeed", "torch"]])
        self.assertEqual(result["scaler"], [False, True, True, False])
        self.assertEqual(result["lookahead"], 7)
        for name in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "LRRangeTest", "OneCycle"):
            self.assertEqual(result[name], [True, 0, True], name)
        self.assertEqual(result["mom"], [[[0.625, 0.99]], [0.625, 0.99], [[0.625, 0.99]]])
        rates, momenta, betas = result["lists"]
        self.assert_close(rates, [0.1, 0.3])
        self.assertEqual([pair[1] for pair in momenta], [0.99, 0.99])
        self.assert_close([pair[0] for pair in momenta], [0.65, 0.7])
        self.assertEqual(betas, momenta)
        self.assert_close([result["own momentum"][0]], [0.055])
        self.assertEqual(result["own momentum"][1:], [["Counting"], [[0, 0]]])
        self.assertEqual(result["three"], [[0.625, 0.99, 0.7], [[0.625, 0.99, 0.7]]])

    def test_schedulers_of_torch_are_known_by_name(self):
        result = self.told(2, """
adam = {"type": "Adam", "params": {"lr": 0.1}}
section = lambda kind, **params: {"type": kind, "params": params}
def rates(**more):
    engine = deepspeed.initialize(model=model(), config=config(2, **more))[0]
    found = []
    for step in range(3):
        train(engine, 1, step)
        found.append(engine.get_lr()[0])
    kind = type(engine.lr_scheduler).__name__
    engine.save_checkpoint(folder, tag=kind)
    again = deepspeed.initialize(model=model(), config=config(2, **more))[0]
    again.load_checkpoint(folder, tag=kind)
    train(engine, 1); train(again, 1)
    return [kind, engine.scheduler_name(), found, engine.get_lr() == again.get_lr() and engine.get_mom() == again.get_mom()]
result = [rates(optimizer=adam, scheduler=section("StepLR", step_size=1, gamma=0.5)),
          rates(optimizer=adam, scheduler=section("OneCycleLR", max_lr=0.4, total_steps=8)),
          refusal(config=config(2, optimizer=adam, scheduler=section("StepLR", steps=1))),
          refusal(config=config(2, optimizer=adam, scheduler=section("LambdaLR", lr_lambda=0.5))),
          refusal(config=config(2, optimizer=adam, scheduler=section("StepsLR", step_size=1)))]
""")
        self.assertEqual(result[0], ["StepLR", "StepLR", [0.05, 0.025, 0.0125], True])
        self.assertEqual(result[1][:2] + result[1][3:], ["OneCycleLR", "OneCycleLR", True])
        for (text, unchanged), expected in zip(result[2:], ("torch.optim.lr_scheduler.StepLR says TypeError", "LambdaLR says TypeError", "`scheduler.type`")):
            self.assertIn(expected, text)
            self.assertTrue(unchanged)

    def test_clipping_as_in_plain_pytorch_is_told_once_with_the_fix(self):
        result = self.told(1, """
from torch.nn.utils import clip_grad_norm_
net = model()
x, y = batch(0)
torch.nn.functional.mse_loss(net(x), y).backward()
clip_grad_norm_(net.parameters(), 1.0)
result = [len(told)]
engine = started(lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
told.clear()
engine.backward(engine(x).sum())
result += [clip_grad_norm_(engine.parameters(), 1.0).item(), torch.nn.utils.clip_grad_norm_(engine.module[0].weight, 1.0).item(), told[:]]
""")
        self.assertEqual(result[:3], [0, 0, 0])
        self.assertEqual(len(result[3]), 1)
        self.assertIn('it returns 0 and clips nothing. Set "gradient_clipping"', result[3][0])


if __name__ == "__main__":
    main()
