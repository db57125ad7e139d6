"""Users' programs train as plain PyTorch trains in one process: losses, every gradient, weights. And their mistakes are
refused."""
from harness import Case, RankServer, main

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import

_PRELUDE = """
import copy, pickle
import torch, trireme as deepspeed
from torch import nn
from torch.nn import functional as F
from trireme.pipe import PipelineModule
deepspeed.init_distributed()
RANK, SIZE = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.unused, self.frozen = nn.Linear(2, 2), nn.Linear(16, 16).requires_grad_(False)
    def forward(self, x):
        return self.c(torch.tanh(self.b(self.frozen(torch.relu(self.norm(self.a(x)))))))

def make(cls=Net):
    torch.manual_seed(0)
    return cls()

def batch(number):  # of all ranks
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 1, generator=generator)

def mine(tensors):
    return [tensor.chunk(SIZE)[RANK] for tensor in tensors]

def config(stage, accumulation=1, **more):
    return {"train_micro_batch_size_per_gpu": 4 // SIZE, "gradient_accumulation_steps": accumulation, "zero_optimization": {"stage": stage}, **more}

def differ(found, expected):
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None) and (one is None or one.shape == other.shape), (one, other)
        if one is not None:
            worst = max(worst, ((one - other).norm() / other.norm().clamp(min=1e-9)).item())
    return worst

def weights(net):
    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        return [parameter.detach().clone() for parameter in net.parameters()]

def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-2)

def train(engine, plain, optimizer, steps=3, first=0, scheduler=None, loss_of=lambda net, x, y: F.mse_loss(net(x), y)):
    '''The largest difference from `plain`, which takes the same steps.'''
    worst, accumulation = 0.0, engine.gradient_accumulation_steps()
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for micro in range(accumulation):
            whole = batch(step * accumulation + micro)
            loss = loss_of(engine, *mine(whole))
            engine.backward(loss)
            worst = max(worst, differ([loss.detach()], [loss_of(plain, *mine(whole)).detach()]))
            (loss_of(plain, *whole) / accumulation).backward()
            if micro + 1 < accumulation:
                engine.step()
        gradients = [deepspeed.utils.safe_get_full_grad(parameter) for parameter in engine.module.parameters()]
        worst = max(worst, differ(gradients, [parameter.grad for parameter in plain.parameters()]))
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        engine.step()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return max(worst, differ(weights(engine.module), plain.parameters()))

def refusal(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"

def layers():
    torch.manual_seed(0)
    return [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)]

def pipeline(stage, config=ADAMW, optimizer_of=lambda module: None, lr_scheduler=None):
    module = PipelineModule(layers(), num_stages=2, loss_fn=F.mse_loss)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage}, **config}
    return deepspeed.initialize(model=module, optimizer=optimizer_of(module), lr_scheduler=lr_scheduler, config=config)

def train_pipeline(engine, plain, optimizer, steps=4, first=0, scheduler=None, before=lambda step: None):
    worst = 0.0
    for step in range(first, first + steps):
        before(step)
        loss = engine.train_batch(iter([batch(2 * step), batch(2 * step + 1)]))
        optimizer.zero_grad()
        losses = [F.mse_loss(plain(x), y) / 2 for x, y in (batch(2 * step), batch(2 * step + 1))]
        sum(losses).backward()
        worst = max(worst, differ([loss.detach()], [sum(losses).detach()]))
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    whole = dict(plain.named_parameters())
    return max(worst, differ(weights(engine.module), [whole[name] for name, _ in engine.module.named_parameters()]))

result = {}
"""
_ROUNDING = 2e-5


class Programs(Case):
    def assert_equals_plain(self, text, cases):
        """`text` leaves the difference of each case in `result`, on two ranks."""
        result = self.on_ranks(2, _PRELUDE + text)
        self.assertEqual(len(result), cases)
        for name, difference in result.items():
            with self.subTest(name):
                self.assertLess(difference, _ROUNDING)

    def test_optimizers_groups_and_schedulers(self):
        self.assert_equals_plain("""
def groups(net):
    biases = [parameter for name, parameter in net.named_parameters() if name.endswith("bias")]
    others = [parameter for name, parameter in net.named_parameters() if not name.endswith("bias")]
    return [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 3e-3}]
cosine = lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
nadam = lambda net: torch.optim.NAdam(net.parameters(), lr=1e-2)
in_groups = lambda net: torch.optim.AdamW(groups(net), lr=1e-2, weight_decay=0.01)
for stage in range(4):
    for accumulation, name, given, optimizer_of, scheduler_of in (
            (1, "configured", lambda net: ADAMW, adamw, None), (2, "groups", lambda net: ADAMW | {"model_parameters": groups(net)}, in_groups, None),
            (1, "client", lambda net: {"client": nadam(net)}, nadam, None), (2, "scheduler", lambda net: ADAMW | {"lr_scheduler": cosine}, adamw, cosine)):
        net, plain = make(), make()
        options = dict(given(net))
        configured = {"optimizer": options.pop("optimizer")} if "optimizer" in options else {}
        engine, *_ = deepspeed.initialize(model=net, optimizer=options.pop("client", None), config=config(stage, accumulation, **configured), **options)
        optimizer = optimizer_of(plain)
        result[f"{name}, ZeRO {stage}"] = train(engine, plain, optimizer, scheduler=scheduler_of and scheduler_of(optimizer))
        engine.destroy()
""", 16)

    def test_values_that_a_program_changes_between_steps(self):
        self.assert_equals_plain("""
for stage in range(4):
    with deepspeed.zero.Init(enabled=stage == 3):
        net = make()
    plain = make()
    engine, optimizer, *_ = deepspeed.initialize(model=net, config=config(stage, **ADAMW))
    own = adamw(plain)
    result[f"first {stage}"] = train(engine, plain, own)
    for each in (optimizer, own):
        each.param_groups[0].update(lr=3e-3, weight_decay=0.2, betas=(0.8, 0.9))
    with deepspeed.zero.GatheredParameters(net.a.weight, modifier_rank=1):
        if RANK == 1:
            net.a.weight.data.mul_(0.5)
    deepspeed.utils.safe_set_full_fp32_param(net.c.weight, torch.full((1, 16), 0.25))
    deepspeed.utils.safe_set_full_optimizer_state(net.c.weight, torch.zeros(1, 16), "exp_avg")
    with torch.no_grad():
        plain.a.weight.mul_(0.5)
        plain.c.weight.fill_(0.25)
        own.state[plain.c.weight]["exp_avg"].zero_()
    result[f"changed {stage}"] = train(engine, plain, own, first=3)
    engine.set_train_batch_size(8)
    result[f"accumulated {stage}"] = train(engine, plain, own, first=6)
    hook = net.b.register_forward_hook(lambda *_: 1 / 0)
    assert "ZeroDivisionError" in refusal(lambda: engine(mine(batch(0))[0]))
    hook.remove()
    result[f"after an error {stage}"] = train(engine, plain, own, first=9)
    engine.destroy()
    result[f"destroyed {stage}"] = differ(net.parameters(), plain.parameters())
""", 20)

    def test_two_engines_and_one_that_is_made_again(self):
        self.assert_equals_plain("""
for stage in (0, 2, 3):
    one, other, plain_one, plain_other = make(), make(), make(), make()
    engine, *_ = deepspeed.initialize(model=one, config=config(stage, **ADAMW))
    beside, *_ = deepspeed.initialize(model=other, config=config(3 - stage, **ADAMW))
    own, own_beside = adamw(plain_one), adamw(plain_other)
    for step in range(4):
        if step == 2:  # its weights stay, its states do not
            engine.destroy()
            engine, *_ = deepspeed.initialize(model=one, config=config(1, **ADAMW))
            own = adamw(plain_one)
        x, y = mine(batch(step))
        (F.mse_loss(engine(x), y) + F.mse_loss(beside(x) / 2, y)).backward()
        own.zero_grad(), own_beside.zero_grad()
        x, y = batch(step)
        (F.mse_loss(plain_one(x), y) + F.mse_loss(plain_other(x) / 2, y)).backward()
        for net in (plain_one, plain_other):
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        engine.step(), beside.step(), own.step(), own_beside.step()
    result[stage] = differ(weights(one) + weights(other), [*plain_one.parameters(), *plain_other.parameters()])
    engine.destroy(), beside.destroy()
""", 3)

    def test_pipelines(self):
        self.assert_equals_plain("""
half = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
for stage in range(4):
    plain = nn.Sequential(*layers())
    engine, optimizer, *_ = pipeline(stage)
    own = adamw(plain)
    def change(step):
        for each in (optimizer, own):
            each.param_groups[0]["lr"] = 1e-2 / (1 + step)
        if step == 2:
            engine.set_schedule("zb-h1")
    result[f"rates and schedules {stage}"] = train_pipeline(engine, plain, own, before=change)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine, *_ = pipeline(3 - stage)
    engine.load_checkpoint(folder)
    result[f"resumed {stage}"] = train_pipeline(engine, plain, own, first=4, steps=1)
    engine.destroy()
    plain = nn.Sequential(*layers())
    engine, *_ = pipeline(stage, lr_scheduler=half)
    own = adamw(plain)
    result[f"scheduler {stage}"] = train_pipeline(engine, plain, own, scheduler=half(own))
    engine.destroy()
    plain = nn.Sequential(*layers())
    engine, *_ = pipeline(stage, config={}, optimizer_of=lambda module: torch.optim.NAdam(module.parameters(), lr=1e-2))
    result[f"client {stage}"] = train_pipeline(engine, plain, torch.optim.NAdam(plain.parameters(), lr=1e-2))
    engine.destroy()
""", 16)

    def test_sequences_that_are_cut_or_whole(self):
        self.assert_equals_plain("""
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.project, self.head = nn.Embedding(32, 16), nn.Linear(16, 48), nn.Linear(16, 32)
    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        parts = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(attended + x).flatten(0, 1), labels.flatten())
def tokens(number):
    ids = torch.randint(0, 32, (2, 10), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}
for stage, attention in ((0, "ulysses"), (1, "ring"), (2, "ulysses"), (3, "ring"), (3, "ulysses")):
    net, plain = make(Attention), make(Attention)
    engine, *_ = deepspeed.initialize(model=net, config={
        "train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2, "trireme": {"sequence_attention": attention},
        "zero_optimization": {"stage": stage}, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}})
    own, worst = torch.optim.SGD(plain.parameters(), lr=0.5), 0.0
    for step in range(3):
        whole = tokens(step)
        loss = engine(**(engine.cut(**whole) if step % 2 else whole))
        engine.backward(loss)
        own.zero_grad()
        expected = plain(**whole)
        expected.backward()
        worst = max(worst, differ([loss.detach()], [expected.detach()]), differ(map(deepspeed.utils.safe_get_full_grad, net.parameters()),
                                                                                [parameter.grad for parameter in plain.parameters()]))
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        engine.step(), own.step()
    result[f"{attention}, ZeRO {stage}"] = max(worst, differ(weights(net), plain.parameters()))
    engine.destroy()
""", 5)


class Refusals(Case):
    def test_an_engines_optimizer_is_not_copied(self):
        result = self.on_ranks(2, _PRELUDE + """
for stage in (0, 3):
    for own in (False, True):
        net = make()
        given = {"optimizer": adamw(net)} if own else {}
        engine, optimizer, *_ = deepspeed.initialize(model=net, config=config(stage, **({} if own else ADAMW)), **given)
        result[f"{stage}, {own}"] = [refusal(lambda: copy.deepcopy(optimizer)), refusal(lambda: copy.copy(optimizer)), refusal(lambda: pickle.dumps(optimizer))]
        again = pickle.loads(pickle.dumps(optimizer.state_dict()))
        optimizer.load_state_dict(again)
        assert optimizer.state_dict() == again
        engine.destroy()
""")
        for refusals in result.values():
            for refusal in refusals:
                self.assertRegex(refusal, r"StateError: an engine's optimizer cannot be pickled or copied; .* state_dict\(\), .* save_checkpoint\(\)")

    def test_a_model_without_parameters_is_named(self):
        result = self.on_ranks(2, _PRELUDE + """
for name, net in (("plain", nn.Tanh()), ("pipeline", PipelineModule([torch.tanh, torch.relu], num_stages=2, loss_fn=F.mse_loss))):
    result[name] = refusal(lambda: deepspeed.initialize(model=net, config=config(1, **ADAMW)))
net = make()
result["empty"] = refusal(lambda: deepspeed.initialize(model=net, model_parameters=(p for p in ()), config=config(1, **ADAMW)))
engine, *_ = deepspeed.initialize(model=net, config=config(1, **ADAMW))
engine.destroy()
""")
        self.assertRegex(result["plain"], "ConfigError: initialize: the model has no parameter")
        self.assertRegex(result["pipeline"], "ConfigError: initialize: the model has no parameter")
        self.assertRegex(result["empty"], "ConfigError: model_parameters holds no parameter: is it a generator")


if __name__ == "__main__":
    main()
