"""FSDP programs as users write them: each trains as one process of plain PyTorch does on the whole batch, or is refused
by name."""
from fsdp_programs import Case
from harness import main

TRIES = """
import contextlib, copy
from torch.utils.checkpoint import checkpoint
class Plain:
    ours = False
    def shard(self, module): return module
    def own(self, value): return value
    def mean(self, value): return value.item()
class Ours:
    ours = True
    def shard(self, module): return fully_shard(module)
    def own(self, value): return value.chunk(ranks.world().size)[ranks.world().rank]
    def mean(self, value): return mean(value)
class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16)]), nn.Linear(16, 4)
    def forward(self, x):
        for layer in self.layers: x = self.layer(layer, x)
        return self.head(x)
    def layer(self, layer, x): return torch.tanh(layer(x))
def mlp(on, kind=MLP):
    torch.manual_seed(0)
    model = kind()
    for layer in model.layers: on.shard(layer)
    return on.shard(model)
def samples(on, step):
    g = torch.Generator().manual_seed(100 + step)
    return on.own(torch.randn(8, 8, generator=g)), on.own(torch.randn(8, 4, generator=g))
def error_of(model, x, y): return F.mse_loss(model(x), y)
def nothing(model, step): return None
def steps(on, model, optimizer, count=4, before=nothing, after=nothing, loss_of=error_of):
    told = []
    for step in range(count):
        before(model, step)
        loss = loss_of(model, *samples(on, step))
        loss.backward()
        after(model, step)
        told.append((on.mean(loss), gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    return told, {name: value.clone() for name, value in weights(model).items()}
def adamw(model): return torch.optim.AdamW(model.parameters(), lr=0.01)
def sgd(model, **more): return torch.optim.SGD(model.parameters(), lr=0.1, **more)
def far(program):
    (expected, values), (found, others) = program(Plain()), program(Ours())
    assert len(expected) == len(found) > 0
    return max([abs(one[0] - other[0]) for one, other in zip(expected, found)] + [farthest(one[1], other[1]) for one, other in zip(expected, found)] +
               [farthest(values, others)])
"""


class Users(Case):
    """Each in two ranks."""

    def tried(self, text, limit=1e-5):
        """`text` makes `programs`, {name: function}, and `refused`, {name: function}; returns the errors of those."""
        result = self.ran(TRIES + "programs, refused = {}, {}\n" + text + """
result = {"far": {name: far(program) for name, program in programs.items()}, "refused": {name: raised(lambda: one(Ours())) for name, one in refused.items()}}
""")
        for name, one in result["far"].items():
            with self.subTest(name):
                self.assertLessEqual(one, limit)
        return result["refused"]

    def test_steps_by_any_optimizer_of_elements(self):
        self.tried("""
O = torch.optim
for name, make in {"amsgrad": lambda p: O.Adam(p, lr=.01, amsgrad=True), "nesterov": lambda p: O.SGD(p, lr=.1, momentum=.9, nesterov=True),
                   "adagrad": lambda p: O.Adagrad(p, lr=.1, lr_decay=.1, initial_accumulator_value=.2), "rmsprop": lambda p: O.RMSprop(p, lr=.01, centered=True, momentum=.5),
                   "maximize": lambda p: O.Adam(p, lr=.01, maximize=True), "one by one": lambda p: O.AdamW(p, lr=.01, foreach=False),
                   "fused": lambda p: O.AdamW(p, lr=.01, fused=True), "tensor": lambda p: O.AdamW(p, lr=torch.tensor(.01)), "nadam": lambda p: O.NAdam(p, lr=.01),
                   "radam": lambda p: O.RAdam(p, lr=.01), "adadelta": O.Adadelta, "asgd": lambda p: O.ASGD(p, lr=.1), "rprop": O.Rprop,
                   "groups": lambda p: O.AdamW([{"params": [q for q in p if q.dim() > 1], "weight_decay": .3}, {"params": [q for q in p if q.dim() == 1], "lr": .03}], lr=.01)}.items():
    def program(on, make=make):
        model = mlp(on)
        return steps(on, model, make(list(model.parameters())))
    programs[name] = program
""")

    def test_changes_gradients_in_place(self):
        self.tried("""
def each(change):
    def program(on):
        model = mlp(on)
        return steps(on, model, sgd(model), after=lambda model, step: [change(p) for p in model.parameters()])
    return program
programs |= {"mul_": each(lambda p: p.grad.mul_(.5)), "data": each(lambda p: p.grad.data.div_(3)), "nan_to_num_": each(lambda p: torch.nan_to_num_(p.grad)),
             "center": each(lambda p: p.grad.add_(p.grad.mean(), alpha=-1)), "norm": each(lambda p: p.grad.div_(p.grad.norm() + 1e-6)),
             "copy_": each(lambda p: p.grad.copy_(p.grad.clamp(-.01, .01))), "assign": each(lambda p: setattr(p, "grad", p.grad * .5)),
             "clip values": each(lambda p: nn.utils.clip_grad_value_(p, .01)), "clip each": each(lambda p: nn.utils.clip_grad_norm_(p, .01))}
""")

    def test_writes_weights_and_loads_them_between_steps(self):
        self.tried("""
def before(change, make=adamw):
    def program(on):
        model = mlp(on)
        return steps(on, model, make(model), before=torch.no_grad()(lambda model, step: change(model, step, on)))
    return program
def keep(model, step, on, kept={}):
    if step == 1: kept[on.ours] = copy.deepcopy(model.state_dict())
    if step == 3: model.load_state_dict(kept[on.ours])
def write_row(model, step, on):
    model.head.weight[0] = 0.5
    model.head.weight.data[1:2, 2:4].zero_()
    model.layers[0].weight.t().mul_(0.7)
programs |= {"decay": before(lambda model, step, on: [p.mul_(.9) for p in model.parameters()]), "rows": before(write_row), "best": before(keep),
             "fill": before(lambda model, step, on: model.head.weight.copy_(torch.full((4, 16), .1 * step))),
             "init": before(lambda model, step, on: (torch.manual_seed(step), model.head.reset_parameters())),
             "evaluation": before(lambda model, step, on: model.eval()(samples(on, 77)[0]) is model.train())}
def by_hand(on):
    model, told = mlp(on), []
    for step in range(4):
        loss = error_of(model, *samples(on, step))
        loss.backward()
        found = gradients(model)
        told.append((on.mean(loss), found))
        with torch.no_grad():
            for name, p in model.named_parameters(): p -= 0.1 * found[name]
        for p in model.parameters(): p.grad = None
    return told, weights(model)
programs["by hand"] = by_hand
""")

    def test_has_losses_and_models_of_other_forms(self):
        self.tried("""
def of(loss_of=error_of, kind=MLP, make=adamw):
    def program(on):
        model = mlp(on, kind)
        return steps(on, model, make(model), loss_of=loss_of)
    return program
def penalty(model, x, y):
    x = x.clone().requires_grad_()
    out = model(x)
    slope, = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, y) + slope.pow(2).mean()
class Checkpointed(MLP):
    def layer(self, layer, x): return torch.tanh(checkpoint(layer, x, use_reentrant=False))
class Unused(MLP):
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(3, 3)
class Experts(MLP):
    def __init__(self):
        super().__init__()
        self.extra = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    def forward(self, x):
        y = super().forward(x)
        return self.extra[ranks.world().rank](y) if len(x) == 4 else torch.cat([self.extra[i](part) for i, part in enumerate(y.chunk(2))])
programs |= {"L2": of(lambda model, x, y: error_of(model, x, y) + .1 * sum(p.pow(2).sum() for p in model.parameters()), make=sgd), "gradient penalty": of(penalty),
             "twice": of(lambda model, x, y: error_of(model, x, y) + (model(x * 2) - model(x)).pow(2).mean()), "checkpoint": of(kind=Checkpointed),
             "unused": of(kind=Unused, make=lambda model: sgd(model, weight_decay=.1, momentum=.9)), "experts": of(kind=Experts),
             "outside": of(lambda model, x, y: F.mse_loss(F.linear(model.layers[1](model.layers[0](x)), model.head.weight, model.head.bias), y))}
""")

    def test_computes_under_the_programs_autocast(self):
        self.tried("""
def halves(on, disables=False):  # each rank rounds its own gradients
    model, told = mlp(on), []
    optimizer, dtypes = sgd(model), set()
    for step in range(4):
        losses, parts = [], 1 if on.ours else 2
        for part in range(parts):
            x, y = (value.chunk(parts)[part] for value in samples(on, step))
            with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False) if disables else contextlib.nullcontext():
                out = model(x)
                losses.append(F.mse_loss(out.float(), y) / parts)
            dtypes.add(out.dtype)
            losses[-1].backward()
        told.append((on.mean(sum(losses)), gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    assert dtypes == {torch.float32 if disables else torch.bfloat16}, dtypes
    return told, weights(model)
programs |= {"bf16": halves, "off inside": lambda on: halves(on, True)}
""")

    def test_refuses_gradients_that_are_this_ranks_own(self):
        refused = self.tried("""
def by_grad(on):
    model = mlp(on)
    torch.autograd.grad(error_of(model, *samples(on, 0)), model.parameters())
def hooked(on): mlp(on).head.weight.register_hook(lambda g: g.clamp(-.01, .01))
def hooked_early(on):
    model = MLP()
    model.head.bias.register_hook(lambda g: g.clamp(-.01, .01))
    on.shard(model)(samples(on, 0)[0])
def renormalised(on):
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4, max_norm=1.0), torch.nn.Linear(4, 2))
    on.shard(model)(torch.tensor([1, 2]))
refused |= {"grad": by_grad, "hook": hooked, "early": hooked_early, "rows": renormalised}
""")
        self.assertRegex(refused["grad"], r"^UnsupportedError: torch.autograd.grad\(\) by a sharded parameter of shape \(16, 8\): .*parameter.grad$")
        self.assertRegex(refused["rows"], r"^UnsupportedError: fully_shard: '0' has max_norm=1.0: .*renormalise after optimizer.step\(\)$")
        self.assertRegex(refused["hook"], r"^UnsupportedError: register_hook\(\) of the parameter of shape \(4, 16\): .*after backward\(\)$")
        self.assertRegex(refused["early"], r"^UnsupportedError: register_hook\(\) of the parameter 'head.bias': .*after backward\(\)$")

    def test_refuses_other_groups_and_gradients_that_have_gone(self):
        refused = self.tried("""
def regroup(change):
    def program(on):
        model = mlp(on)
        optimizer = torch.optim.SGD([{"params": list(model.layers.parameters())}, {"params": list(model.head.parameters())}], lr=0.1)
        steps(on, model, optimizer, count=2)
        change(optimizer)
        steps(on, model, optimizer, count=1)
    return program
def kept(on):
    model = mlp(on)
    error_of(model, *samples(on, 0)).backward()
    copied, expected = model.head.weight.grad.clone(), model.head.weight.grad.full_tensor()
    model.zero_grad()
    assert torch.equal(copied.full_tensor(), expected)
def loaded_apart(on):
    model = mlp(on)
    model(samples(on, 0)[0])
    model.load_state_dict({name: torch.full(value.shape, float(ranks.world().rank if name == "head.bias" else 1)) for name, value in model.state_dict().items()})
refused |= {"apart": loaded_apart}
refused |= {"cleared": regroup(lambda optimizer: optimizer.state.clear()), "replaced": regroup(lambda optimizer: setattr(optimizer, "state", {})),
            "read": regroup(lambda optimizer: optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"])}
refused |= {"fewer": regroup(lambda optimizer: optimizer.param_groups[1]["params"].pop()), "group": regroup(lambda optimizer: optimizer.param_groups.pop()), "kept": kept}
""")
        self.assertRegex(refused["apart"], r"^StateError: load_state_dict\(\): 'head.bias' has other values on another rank, .*give every rank the same$")
        self.assertRegex(refused["cleared"], r"^UnsupportedError: optimizer.state: states are the library's shards, and a change here would change nothing; give")
        self.assertRegex(refused["replaced"], r"^UnsupportedError: SGD.step\(\): optimizer.state was replaced, and the library's states were not; leave it")
        self.assertRegex(refused["read"], r"^UnsupportedError: optimizer.state\[…\]: states are the library's shards; take them from optimizer.state_dict\(\)$")
        self.assertRegex(refused["fewer"], r"^UnsupportedError: optimizer.step\(\): param_groups\[1\]\['params'\] are others than at the first step; set the group's lr to 0")
        self.assertRegex(refused["group"], r"^UnsupportedError: optimizer.step\(\): 2 param_groups at the first step are 1 now")
        self.assertIsNone(refused["kept"])


if __name__ == "__main__":
    main()
