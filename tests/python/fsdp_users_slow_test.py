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
        self.assertRegex(refused["cleared"], r"^UnsupportedError: optimizer.state: states are the library's shards, and this would change nothing; write into")
        self.assertRegex(refused["replaced"], r"^UnsupportedError: SGD.step\(\): optimizer.state was replaced, and the library's states were not; leave it")
        self.assertRegex(refused["read"], r"^KeyError: 'momentum_buffer'$")
        self.assertRegex(refused["fewer"], r"^UnsupportedError: optimizer.step\(\): param_groups\[1\]\['params'\] are others than at the first step; set the group's lr to 0")
        self.assertRegex(refused["group"], r"^UnsupportedError: optimizer.step\(\): 2 param_groups at the first step are 1 now")
        self.assertIsNone(refused["kept"])

    def test_trains_several_models_in_turns(self):
        self.tried("""
def two(on): return mlp(on), mlp(on, Wide)
class Wide(MLP):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 1)
def both(one, other): return {**one, **{name + "'": value for name, value in other.items()}}
def gan(on, penalised=False):
    told, (generator, judge) = [], two(on)
    make, look = torch.optim.Adam(generator.parameters(), lr=.01, betas=(.5, .999)), torch.optim.RMSprop(judge.parameters(), lr=.01)
    judged = lambda value: judge(torch.cat([value, value], 1))
    for step in range(3):
        x, y = samples(on, step)
        look.zero_grad()
        fake = generator(x)
        real = F.softplus(-judged(y)).mean()
        if penalised:
            y = y.clone().requires_grad_()
            slope, = torch.autograd.grad(judged(y).sum(), y, create_graph=True)
            real = real + slope.pow(2).sum(1).mean()
        real.backward()
        F.softplus(judged(fake.detach())).mean().backward()
        found = gradients(judge)
        look.step()
        with torch.no_grad(): [p.clamp_(-.4, .4) for p in judge.parameters()]
        make.zero_grad()
        judge.requires_grad_(False)
        loss = F.softplus(-judged(fake if not penalised else generator(x))).mean()
        loss.backward()
        judge.requires_grad_(True)
        told.append((on.mean(loss), both(found, gradients(generator))))
        make.step()
    return told, both(weights(generator), weights(judge))
def contrastive(on):
    one, other = two(on)
    optimizers, told = [adamw(one), sgd(other)], []
    for step in range(3):
        x, y = samples(on, step)
        loss = 1 - F.cosine_similarity(one(x), other(torch.cat([y, y], 1)).expand(-1, 4)).mean()
        loss.backward()
        told.append((on.mean(loss), both(gradients(one), gradients(other))))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return told, both(weights(one), weights(other))
def teacher(on):
    student, average = mlp(on), mlp(on).requires_grad_(False)
    def loss_of(model, x, y):
        with torch.no_grad(): wanted = average(x)
        return error_of(model, x, y) + F.kl_div(F.log_softmax(model(x) / 2, -1), F.softmax(wanted / 2, -1), reduction="batchmean")
    def after(model, step):
        with torch.no_grad(): [a.mul_(.9).add_(p, alpha=.1) for a, p in zip(average.parameters(), model.parameters())]
    told, values = steps(on, student, adamw(student), before=lambda model, step: step and after(model, step), loss_of=loss_of)
    return told, both(values, weights(average))
programs |= {"gan": gan, "penalty of the slope": lambda on: gan(on, True), "contrastive": contrastive, "teacher": teacher}
""")

    def test_follows_recipes_that_go_between_backward_and_step(self):
        self.tried("""
def idle(model, step, kept, on): return None
def by(change, make=sgd, kind=MLP, before=idle):
    def program(on):
        model, kept = mlp(on, kind), {}
        return steps(on, model, make(model), after=lambda model, step: change(model, step, kept, on), before=lambda model, step: before(model, step, kept, on))
    return program
@torch.no_grad()
def climb(model, scale):
    for p in model.parameters(): p.add_(p.grad * scale)
def sam(model, step, kept, on):
    norm = torch.norm(torch.stack([p.grad.norm() for p in model.parameters()]))
    old = [p.detach().clone() for p in model.parameters()]
    climb(model, .05 / float(norm))
    model.zero_grad()
    error_of(model, *samples(on, step)).backward()
    with torch.no_grad(): [p.copy_(value) for p, value in zip(model.parameters(), old)]
def surgery(model, step, kept, on):
    first = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    x, y = samples(on, step)
    F.l1_loss(model(x), y).backward()
    for name, p in model.named_parameters():
        along = (p.grad * first[name]).sum()
        if along < 0: p.grad.sub_(first[name] * (along / first[name].square().sum()))
        p.grad.add_(first[name])
@torch.no_grad()
def swap(model, step, kept, on):
    now = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters(): p.copy_(kept.setdefault(name, p.detach().clone()).lerp_(p.detach(), .3))
    model.eval()(samples(on, 70)[0])
    model.train()
    for name, p in model.named_parameters(): p.copy_(now[name])
@torch.no_grad()
def look_ahead(model, step, kept, on):
    for name, p in model.named_parameters():
        slow = kept.setdefault(name, p.detach().clone())
        if step == 2: p.copy_(slow.add_(p - slow, alpha=.5))
def momentum(model, step, kept, on):
    with torch.no_grad():
        for p in model.parameters():
            kept[p] = kept[p].mul_(.9).add_(p.grad) if p in kept else p.grad.clone()
            p.add_(kept[p], alpha=-.05)
    for p in model.parameters(): p.grad.zero_()
class Chosen(MLP):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    def forward(self, x):
        x = super().forward(x)
        score, place = self.gate(x).softmax(-1).max(-1)
        out = x
        for index, expert in enumerate(self.experts):
            rows = (place == index).nonzero().flatten()
            if len(rows): out = out.index_add(0, rows, expert(x[rows]) * score[rows, None])
        return out
class Normed(MLP):
    def __init__(self):
        super().__init__()
        self.head = nn.utils.parametrizations.weight_norm(self.head)
        self.layers[0] = nn.utils.parametrizations.spectral_norm(self.layers[0])
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.LSTM(8, 16, batch_first=True), nn.GRU(16, 16, batch_first=True)]), nn.Linear(16, 4)
    def forward(self, x):
        x = x.unsqueeze(1).expand(-1, 3, -1)
        for layer in self.layers: x, _ = layer(x)
        return self.head(x[:, -1])
programs |= {"sharpness": by(sam), "surgery": by(surgery, adamw), "average in its place": by(idle, adamw, before=swap), "look ahead": by(idle, adamw, before=look_ahead), "momentum": by(momentum),
             "experts by row": by(idle, adamw, Chosen), "parametrizations": by(idle, kind=Normed), "recurrent": by(idle, adamw, Recurrent),
             "compiled": lambda on: steps(on, model := mlp(on), adamw(model), loss_of=lambda _, x, y, whole=torch.compile(model, backend="aot_eager"): F.mse_loss(whole(x), y))}
""")

    def test_writes_fp32_values_where_modules_compute_in_bf16_as_torchs_fully_shard(self):
        refused = self.tried("""
import torch.distributed.fsdp as theirs
import trireme.fsdp
def run(fsdp):
    model, policy = mlp(Plain()), fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in [*model.layers, model]: fsdp.fully_shard(layer, mp_policy=policy)
    optimizer, told = adamw(model), []
    for step in range(5):
        x, y = samples(Ours(), step)
        loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p *= 1 - 5e-4  # less than a digit of bf16
                p.grad.add_(p, alpha=.3)
        told.append((mean(loss), gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
        model.head.requires_grad_(False)
        with torch.no_grad():
            for p in model.parameters(): p.add_(1e-5).sub_(p, alpha=1e-4).clamp_(-.3, .3)
        told.append((0, {name: value.clone() for name, value in weights(model).items()}))
        model.head.requires_grad_(True)
    return told, weights(model)
programs["decay"] = lambda on: run(trireme.fsdp if on.ours else theirs)
def apart(on):
    model = mlp(Plain())
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = adamw(model)
    model(samples(on, 0)[0])
    with torch.no_grad(): model.head.bias.add_(1e-6 * ranks.world().rank)
def written(on):
    model = mlp(Plain())
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = adamw(model)
    model(samples(on, 0)[0])
    value = model.head.weight.full_tensor() + 1e-6
    with torch.no_grad(): model.head.weight.copy_(value)
    assert torch.equal(model.head.weight.full_tensor(), value)
refused |= {"apart": apart, "written": written}
""")
        self.assertRegex(refused["apart"], "^StateError: a write to 'head.bias': a tensor of shape .4,. has other values on another rank")
        self.assertIsNone(refused["written"])

    def test_has_one_dtype_of_a_gradient_on_all_ranks(self):
        refused = self.tried("""
def dtypes(on):
    model = fully_shard(mlp(Plain()).bfloat16())
    x, y = (value.bfloat16() for value in samples(on, 0))
    error_of(model, x, y).backward()
    wrong, owned = torch.zeros(1), torch.ones(1)
    for p in model.parameters():
        found = {one.dtype for one in (p.grad, p.grad * 2, p.grad.full_tensor(), p.grad.sum(), p.grad.abs().max(), p.grad.min(), p.grad.mean())}
        wrong += found != {torch.bfloat16}
        owned *= p.grad.to_local().numel() > 0
    for value in (wrong, owned): ranks.world().all_reduce(value, "sum")
    assert (wrong.item(), owned.item()) == (0, 0), (wrong, owned)  # each rank has none of some parameters
refused["dtypes"] = dtypes
""")
        self.assertIsNone(refused["dtypes"])

    def test_loads_by_assign_also_over_the_device_meta(self):
        refused = self.tried("""
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
def begun(on, load):
    torch.manual_seed(3)
    state = MLP().state_dict()
    with torch.device("meta"): model = mlp(on)
    if on.ours: load(model, state)
    else: model.load_state_dict(state, assign=True)
    return steps(on, model, adamw(model))
def broadcast(model, state):
    set_model_state_dict(model, state if ranks.world().rank == 0 else {}, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
def later(on):
    model = mlp(on)
    optimizer = sgd(model)
    told, _ = steps(on, model, optimizer, count=2)
    model.load_state_dict({name: torch.full(value.shape, .1) for name, value in model.state_dict().items()}, assign=on.ours)  # plain PyTorch's would leave the optimizer
    more, values = steps(on, model, optimizer, count=2)
    return told + more, values
def narrower(on):
    model = mlp(on)
    model.load_state_dict({name: value.detach().bfloat16() for name, value in weights(model).items()}, assign=True)
ranks.join()
programs |= {"assigned": lambda on: begun(on, lambda model, state: model.load_state_dict(state, assign=True)), "broadcast": lambda on: begun(on, broadcast), "later": later}
refused["narrower"] = narrower
""")
        self.assertRegex(refused["narrower"], r"^UnsupportedError: load_state_dict\(assign=True\): 'layers.0.weight' is in torch.bfloat16, and the model's in torch.float32, which stays")


if __name__ == "__main__":
    main()
