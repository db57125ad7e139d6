"""Habits of programs written for DeepSpeed: parameters, modules, optimizers and errors."""
from harness import RankServer, main
from small_model import Case

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import

_SGD = """
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0}
def losses_of(engine, steps=3):
    return [round(loss, 6) for loss in train(engine, steps)]
"""


class Parameters(Case):
    """Masters, states and gradients of single parameters."""

    def test_of_a_frozen_parameter_are_none_at_every_stage_so_that_a_loop_over_all_needs_no_condition(self):
        result = self.ran(2, """
from trireme.utils import *
result = []
for stage in range(4):
    net = model()
    for parameter in net[:3].parameters(): parameter.requires_grad_(False)
    engine = deepspeed.initialize(model=net, config=config(stage, optimizer={"type": "Adam", "params": {"lr": 0.1}}))[0]
    x, y = batch(engine.global_rank)
    engine.backward(torch.nn.functional.mse_loss(engine(x), y))
    safe_update_full_grad_vectorized(list(net.parameters()), lambda gradient, parameter: gradient * 2)
    there = [[value is not None for value in (safe_get_full_grad(p), safe_get_full_fp32_param(p), safe_get_full_optimizer_state(p, "exp_avg"),
                                              safe_get_local_grad(p), safe_get_local_fp32_param(p),
                                              safe_get_local_optimizer_state(p, "exp_avg"))] for _, p in net.named_parameters()]
    result.append(there + [raised(lambda: safe_set_full_fp32_param(net[0].bias, torch.zeros(32)))[0]])
    engine.destroy()
""")
        self.assertEqual(result, [[[False] * 6] * 4 + [[True] * 6] * 2 + ["StateError"]] * 4)

    def test_inside_no_sync_have_this_ranks_sum_of_gradients(self):
        result = self.ran(2, """
from trireme.utils import safe_get_full_grad
result = []
for stage in range(4):
    net = torch.nn.Linear(2, 1, bias=False)
    engine = deepspeed.initialize(model=net, config=config(stage, gradient_accumulation_steps=4,
                                                           optimizer={"type": "SGD", "params": {"lr": 1.0}}))[0]
    seen = []
    with engine.no_sync():
        for micro in range(2):
            engine.backward(engine(torch.tensor([[4.0, 8.0 + 4 * engine.global_rank]])).sum())
            seen += safe_get_full_grad(net.weight).flatten().tolist()
    engine.backward(engine(torch.tensor([[4.0, 0.0]])).sum())
    result.append(seen + safe_get_full_grad(net.weight).flatten().tolist())
    engine.destroy()
""")
        # Each micro-batch counts 1/4. Rank 0's sums, then the mean over both ranks.
        self.assertEqual(result, [[1, 2, 2, 4, 3, 5]] * 4)


class Modules(Case):
    """Leaf modules, and modules that have an engine already."""

    def test_of_the_configurations_leaf_section_are_told_by_z3_leaf_module(self):
        result = self.ran(1, _SGD + """
from trireme.utils import get_z3_leaf_modules, z3_leaf_module
result = []
for stage in (0, 3):
    net = torch.nn.ModuleDict({"expert": torch.nn.Sequential(torch.nn.Linear(8, 8)), "head": torch.nn.Linear(8, 1), "gate": torch.nn.Tanh()})
    section = {"stage": stage, "leaf_module": {"classes": ["Tanh"], "names": ["expert"]}}
    engine = deepspeed.initialize(model=net, config={**config(), **SGD, "zero_optimization": section})[0]
    result.append([z3_leaf_module(net["expert"]), z3_leaf_module(net["gate"]), z3_leaf_module(net["head"]), len(get_z3_leaf_modules(net))])
    engine.destroy()
""")
        self.assertEqual(result, [[True, True, False, 2]] * 2)

    def test_get_a_second_engine_without_destroy_that_goes_on_with_their_weights(self):
        result = self.ran(2, _SGD + """
result = []
for stage, gather in ((0, "auto"), (1, "auto"), (2, "auto"), (3, "shared"), (3, "copy")):
    expected, net = model(), model()
    alone(expected, torch.optim.SGD(expected.parameters(), lr=0.1), 2)
    alone(expected, torch.optim.SGD(expected.parameters(), lr=0.1), 3)
    options = {**config(stage, trireme={"gather": gather}), **SGD, "gradient_clipping": 1.0}
    first = deepspeed.initialize(model=net, config=options)[0]
    train(first, 2)
    refused = raised(lambda: deepspeed.initialize(model=net, config={**options, "train_batch_size": 3}))[0]
    going_on = first(torch.zeros(1, 8)).isfinite().all().item()
    second = deepspeed.initialize(model=net, config=options)[0]
    train(second, 3)
    with deepspeed.zero.GatheredParameters(net):
        difference = (flat(net) - flat(expected)).abs().max().item()
    result.append([refused, going_on, raised(first.step)[0], difference < 1e-6])
    second.destroy()
""")
        self.assertEqual(result, [["BatchSizeError", True, "StateError", True]] * 5)

    def test_that_an_engine_froze_can_be_trained_by_the_next_one_and_stay_frozen_where_it_is_refused(self):
        result = self.ran(2, _SGD + """
result = {}
net = model()
first = deepspeed.initialize(model=net, model_parameters=net[4].parameters(), config=config(2, **SGD))[0]
trainable = lambda: [p.requires_grad for p in net.parameters()]
result["first"] = trainable()
result["refused"] = [raised(lambda: deepspeed.initialize(model=net, config=config(7, **SGD)))[0], trainable()]
second = deepspeed.initialize(model=net, model_parameters=net[2:].parameters(), config=config(2, **SGD))[0]
result["second"] = trainable()
train(second, 1)
second.destroy()
result["after"] = trainable()
""")
        self.assertEqual(result["first"], [False] * 4 + [True] * 2)
        self.assertEqual(result["refused"], ["ConfigError", result["first"]])
        self.assertEqual(result["second"], [False] * 2 + [True] * 4)
        self.assertEqual(result["after"], [True] * 6)

    def test_that_a_larger_engine_trains_with_others_stay_with_it(self):
        result = self.ran(1, _SGD + """
net = model()
engine = deepspeed.initialize(model=net, config=config(2, **SGD))[0]
refusal = raised(lambda: deepspeed.initialize(model=net[:3], config=config(2, **SGD)))
losses = losses_of(engine, 4)
result = [refusal[0], "is managed by another engine already" in refusal[-1], losses[0] != losses[3]]
""")
        self.assertEqual(result, ["ConfigError", True, True])


class Optimizers(Case):
    """Optimizers of a program's own."""

    def test_keep_states_of_shape_1_in_checkpoints(self):
        result = self.ran(2, """
class Averaged(torch.optim.Optimizer):
    def __init__(self, params, lr): super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=torch.zeros(1), weight=torch.zeros(1), mean=torch.zeros_like(p))
                state["step"] += 1
                state["weight"].mul_(0.5).add_(1.0)
                assert state["step"].shape == state["weight"].shape == (1,)
                state["mean"].mul_(0.5).add_(p.grad)
                p.sub_(state["mean"] / state["weight"] / state["step"], alpha=group["lr"])
result = []
for stage in (0, 1, 3):
    def engine_of():
        net = model()
        return deepspeed.initialize(model=net, optimizer=Averaged(net.parameters(), lr=0.1), config=config(stage))[0]
    engine = engine_of()
    losses = train(engine, 3)
    engine.save_checkpoint(f"{folder}/{stage}")
    losses += train(engine, 3, first=3)
    again = engine_of()
    again.load_checkpoint(f"{folder}/{stage}")
    result.append([train(again, 3, first=3) == losses[3:], losses[5] != losses[4]])
""")
        self.assertEqual(result, [[True, True]] * 3)


class Errors(Case):
    """The built-in classes that DeepSpeed raises in the same places."""

    def test_are_of_the_built_in_classes_that_deepspeed_raises(self):
        result = self.ran(2, _SGD + """
from trireme.utils import safe_get_full_grad
zero = lambda **options: {**config(), **SGD, "zero_optimization": options}
def tags():
    engine = deepspeed.initialize(model=model(), config=config(1, checkpoint={"tag_validation": "Fail"}, **SGD))[0]
    engine.save_checkpoint(folder, tag=f"of rank {engine.global_rank}")
def too_early():
    engine = deepspeed.initialize(model=model(), config=config(1, **SGD))[0]
    safe_get_full_grad(engine.module[0].weight)
wrong = {
    "tags": tags,
    "tag_validation": lambda: deepspeed.initialize(model=model(), config=config(checkpoint={"tag_validation": "Maybe"}, **SGD)),
    "allgather_bucket_size": lambda: deepspeed.initialize(model=model(), config=zero(stage=1, allgather_bucket_size=101)),
    "both precisions": lambda: deepspeed.initialize(model=model(), config=config(fp16={"enabled": True}, bf16={"enabled": True}, **SGD)),
    "optimizer": lambda: deepspeed.initialize(model=model(), config=config(optimizer={"type": "Nothing"})),
    "unknown key": lambda: deepspeed.initialize(model=model(), config=zero(stage=1, nonsense=1)),
    "no checkpoint": lambda: deepspeed.initialize(model=model(), config=config(**SGD))[0].load_checkpoint(folder, tag="none"),
    "gradient": too_early,
    "external": lambda: deepspeed.zero.register_external_parameter(model(), torch.ones(1)),
}
result = {name: raised(call) for name, call in wrong.items()}
""")
        expected = {"tags": "AssertionError", "tag_validation": "ConfigError", "allgather_bucket_size": "AssertionError",
                    "both precisions": "AssertionError", "optimizer": "AssertionError", "unknown key": "ValueError",
                    "no checkpoint": "AssertionError", "gradient": "ValueError", "external": "RuntimeError"}
        for name, kind in expected.items():
            self.assertIn(kind, result[name], name)


if __name__ == "__main__":
    main()
