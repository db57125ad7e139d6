"""Gradients and weights that FSDP programs change by hand: the outcome of plain PyTorch on the whole batch, or refused
by name on every rank."""
from fsdp_programs import Case
from harness import main

HAND = """
import contextlib, math
def pair(change=lambda model: None, **options):
    plain, ours = net(), net()
    change(plain); change(ours)
    return plain, sharded(ours, **options)
def backward(plain, ours, step=0):
    loss_of(plain, *batch(step)).backward()
    loss_of(ours, *own(step)).backward()
def far(one, other):
    one = one.full_tensor() if hasattr(one, "full_tensor") else torch.as_tensor(one)
    other = torch.as_tensor(other)
    assert one.shape == other.shape and one.dtype == other.dtype, (one.shape, other.shape, one.dtype, other.dtype)
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
"""


class OfWholes(Case):
    """In two ranks, unless a test says another number."""

    near = 1e-5

    def ran(self, text, ranks=2, **options):
        return super().ran(HAND + text, ranks, **options)


class Noise(OfWholes):
    """Random numbers that a program puts into gradients and weights."""

    def check(self, *cases):
        """Cases are (ranks, arguments of fully_shard())."""
        for ranks, options in cases:
            with self.subTest(f"{ranks} {options}"):
                result = self.ran(f"""
options = {options}
""" + """
noises = {
    "randn": lambda p: p.grad.add_(torch.randn_like(p.grad)), "rand": lambda p: p.grad.mul_(torch.rand_like(p.grad)), "normal_": lambda p: p.grad.normal_(0, .1),
    "uniform_": lambda p: p.grad.uniform_(-1, 1), "weights": lambda p: p.normal_(0, .1), "init": lambda p: nn.init.uniform_(p), "trunc": lambda p: nn.init.trunc_normal_(p, std=.02)}
result = {}
for name, noise in noises.items():
    plain, ours = pair(**options)
    backward(plain, ours)
    with torch.no_grad():
        for seed, model in ((7, plain), (7 + ranks.world().rank, ours)):
            torch.manual_seed(seed)
            for p in model.parameters(): noise(p)
    for model in plain, ours: torch.optim.SGD(model.parameters(), lr=.1).step()
    result[name] = farthest(weights(ours), weights(plain))
    assert farthest(weights(ours), weights(net())) > 1e-3
""", ranks=ranks)
                self.assert_all_near(result)


class SomeNoise(Noise):
    """fsdp_slow_test.py has a mesh, and parameters that stay."""

    def test_draws_random_numbers_of_the_whole_as_rank_0_does(self):
        self.check((2, "{}"))


class Gradients(OfWholes):
    def test_reads_and_writes_data_in_fp32_where_modules_compute_in_bf16(self):
        result = self.ran("""
from trireme.fsdp import MixedPrecisionPolicy
model = sharded(net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
optimizer = torch.optim.SGD(model.parameters(), lr=.1)
loss_of(model, *own(0)).backward()
optimizer.step(); optimizer.zero_grad()
wholes = lambda: {name: p.full_tensor() for name, p in model.named_parameters()}
begun = wholes()
averages = [p.data.clone() for p in model.parameters()]
result = {"read": max(far(one, other) for one, other in zip(averages, begun.values()))}
for p in model.parameters(): p.data.mul_(1 - 1e-4)
result["mul"] = max(far(one, begun[name] * (1 - 1e-4)) for name, one in wholes().items())
for average, p in zip(averages, model.parameters()): average.mul_(.9).add_(p.detach(), alpha=.1)
result["average"] = max(far(average, .9 * one + .1 * one * (1 - 1e-4)) for average, one in zip(averages, begun.values()))
kept = [p.data.clone() for p in model.parameters()]
for p in model.parameters(): p.data += 1e-3
for p, one in zip(model.parameters(), kept): p.data.copy_(one)
result["put back"] = max(far(one, other) for one, other in zip(kept, wholes().values()))
result["norm"] = max(abs(float(p.data.norm()) - float(one.norm())) for p, one in zip(model.parameters(), kept))
loss = loss_of(model, *own(1))
loss.backward()
optimizer.step(); optimizer.zero_grad()
result["trains"] = 0.0 if loss.isfinite() and max(far(one, other) for one, other in zip(kept, wholes().values())) > 0 else 1.0
begun = wholes()
with torch.no_grad(): torch._foreach_mul_(list(model.parameters()), 1 - 1e-4)
torch._foreach_mul_([p.data for p in model.parameters()], 2)
result["lists"] = max(far(one, begun[name] * (1 - 1e-4) * 2) for name, one in wholes().items())
torch.add(kept[0], 1, out=next(model.parameters()).data)
result["out"] = far(next(model.parameters()).full_tensor(), kept[0] + 1)
model.head.weight.data[0].zero_()
model.head.weight.data.view(-1)[-3:] = 7.0
view = model.head.weight.full_tensor()
result["views"] = float(view[0].abs().max() + (view.view(-1)[-3:] - 7).abs().max()) + float(view[1:-1].abs().min() == 0)
refused = {"random": raised(lambda: model.head.weight.data.add_(torch.full(model.head.weight.shape, float(ranks.world().rank))))}
result = [result, refused]
""")
        self.assert_all_near(result[0], 2e-7)
        for name, words in {"random": "other values on another rank"}.items():
            with self.subTest(name):
                self.assertIn(words, str(result[1][name]))

    def test_steps_by_hand_as_plain_pytorch(self):
        result = self.ran("""
steps = {
    "isub": lambda model: [p.sub_(.1 * p.grad) for p in model.parameters()], "alpha": lambda model: [p.add_(p.grad, alpha=-.1) for p in model.parameters()],
    "data": lambda model: [p.data.add_(p.grad.data, alpha=-.1) for p in model.parameters()], "sign": lambda model: [p.add_(p.grad.sign(), alpha=-.01) for p in model.parameters()],
    "foreach": lambda model: torch._foreach_add_(list(model.parameters()), [p.grad for p in model.parameters()], alpha=-.1),
    "copy": lambda model: [p.copy_(p - .1 * p.grad) for p in model.parameters()], "lerp": lambda model: [p.lerp_(p.grad, .01) for p in model.parameters()],
    "addcdiv": lambda model: [p.addcdiv_(p.grad, p.grad.abs().sqrt() + .1, value=-.01) for p in model.parameters()]}
def operator(model):
    for p in model.parameters(): p -= .1 * p.grad
def momentum(model):
    for p in model.parameters():
        if not hasattr(p, "kept"): p.kept = torch.zeros_like(p)
        p.kept.mul_(.9).add_(p.grad)
        p -= .1 * p.kept
steps |= {"-=": operator, "momentum": momentum}
def go(model, step, data):
    for number in range(3):
        loss_of(model, *data(number)).backward()
        with torch.no_grad(): step(model)
        for p in model.parameters(): p.grad = None
    return weights(model)
result = {}
for name, step in steps.items():
    for options in {}, {"reshard_after_forward": False}:
        plain, ours = pair(**options)
        result[f"{name} {options}"] = farthest(go(ours, step, own), go(plain, step, whole))
        assert farthest(weights(ours), weights(net())) > 1e-3
low, policy = net(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
ours = sharded(low, mp_policy=policy)
optimizer = torch.optim.SGD(ours.parameters(), lr=.1)
loss_of(ours, *own(0)).backward()
before, found = weights(ours), gradients(ours)
with torch.no_grad(): steps["alpha"](ours)
result["fp32 beside bf16"] = farthest(weights(ours), {name: value - .1 * found["word.weight" if name == "head.weight" else name] for name, value in before.items()})
""")
        self.assert_all_near(result)

    def test_has_operators_by_element_and_numbers_of_all(self):
        result = self.ran("""
plain, ours = pair()
backward(plain, ours)
operators = {
    "sign": lambda g, p: g.sign(), "where": lambda g, p: torch.where(g.abs() > .01, g, torch.zeros_like(g)), "where number": lambda g, p: torch.where(g > 0, g, 0.5),
    "lerp": lambda g, p: g.lerp(g * 2, .3), "maximum": lambda g, p: torch.maximum(g, g * 2), "minimum": lambda g, p: torch.minimum(g, -g), "addcmul": lambda g, p: g.addcmul(g, g, value=2),
    "addcdiv": lambda g, p: g.addcdiv(g, g.abs() + 1), "times p": lambda g, p: g * p.detach(), "p times": lambda g, p: p.detach() * g, "plus p": lambda g, p: g + .1 * p.detach(),
    "p minus": lambda g, p: p.detach() - .1 * g, "row": lambda g, p: g * torch.arange(float(g.shape[-1])), "finite": lambda g, p: g.isfinite().all(), "largest": lambda g, p: g.abs().max(), "mean": lambda g, p: g.mean(),
    "std": lambda g, p: g.std(), "var": lambda g, p: g.var(unbiased=False), "amax": lambda g, p: g.amax(), "zeros": lambda g, p: (g == 0).sum(), "counted": lambda g, p: torch.count_nonzero(g),
    "dot": lambda g, p: (g * p.detach()).sum(), "mask": lambda g, p: g.masked_fill(g > 0, 2.0), "foreach mul": lambda g, p: torch._foreach_mul([g], 3.0)[0],
    "foreach norm": lambda g, p: torch._foreach_norm([g])[0], "foreach add": lambda g, p: torch._foreach_add([g], [g], alpha=2)[0], "foreach sqrt": lambda g, p: torch._foreach_sqrt([g.abs()])[0]}
result = {f"{name} {shown}": far(operator(ours.get_parameter(shown).grad, ours.get_parameter(shown)), operator(plain.get_parameter(shown).grad, plain.get_parameter(shown)))
          for name, operator in operators.items() for shown in ("word.weight", "layers.1.norm.bias")}
changes = {
    "sign_": lambda g, p: g.sign_(), "lerp_": lambda g, p: g.lerp_(g * 2, .5), "addcmul_": lambda g, p: g.addcmul_(g, g), "addcdiv_": lambda g, p: g.addcdiv_(g, g.abs() + 1, value=.1),
    "clamp_": lambda g, p: g.clamp_(-.001, .001), "nan_to_num_": lambda g, p: g.nan_to_num_(), "decay": lambda g, p: g.add_(p, alpha=.1), "scaled": lambda g, p: g.add_(.1 * p), "mul_ p": lambda g, p: g.mul_(p),
    "foreach_": lambda g, p: torch._foreach_mul_([g], .5), "foreach addcdiv_": lambda g, p: torch._foreach_addcdiv_([g], [g], [g.abs() + 1], [.1]),
    "foreach maximum_": lambda g, p: torch._foreach_maximum_([g], 0.0), "masked": lambda g, p: g.masked_fill_(g > 0, 0.0)}
def iadd(g, p): g += .01 * p
for name, change in {**changes, "+=": iadd}.items():
    plain, ours = pair()
    backward(plain, ours)
    with torch.no_grad():
        for model in plain, ours:
            for p in model.parameters(): change(p.grad, p)
    result[name] = max(far(p.grad, q.grad) for p, q in zip(ours.parameters(), plain.parameters()))
    for model in plain, ours: torch.optim.SGD(model.parameters(), lr=.1).step()
    result[name + ", stepped"] = farthest(weights(ours), weights(plain))
""")
        self.assert_all_near(result)

    def test_names_what_the_program_called(self):
        result = self.ran("""
from torch.func import functional_call
def trained(change=lambda model: None):
    model = net(); change(model); sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=.1)
    loss_of(model, *own(0)).backward(); optimizer.step(); optimizer.zero_grad()
    return model, optimizer
result, early, zeros = {}, sharded(net()), {name: torch.zeros(p.shape) for name, p in net().named_parameters()}
result["functional"] = raised(lambda: functional_call(early, zeros, (own(0)[0],)))
loss_of(early, *own(0))  # nothing has changed
result["zeros"] = float(functional_call(early, zeros, (own(0)[0],)).abs().max())
model, optimizer = trained()
optimizer.param_groups[0]["maximize"] = True
loss_of(model, *own(0)).backward()
result["maximize"] = raised(optimizer.step)
model, optimizer = trained(lambda model: model.layers[0].requires_grad_(False))
model.layers[0].requires_grad_(True)
loss_of(model, *own(0)).backward()
result["unfrozen"] = raised(optimizer.step)
inside = FSDP(net())
loss_of(inside, *own(0))
def summon():
    with FSDP.summon_full_params(inside, writeback=False), torch.no_grad(): inside.head.weight.mul_(2)
result["summon"] = raised(summon)
model, optimizer = trained()
vector = nn.utils.parameters_to_vector(model.parameters()) * 2
for one in model, sharded(net()):
    nn.utils.vector_to_parameters(vector, one.parameters())
    loss_of(one, *own(0)).backward()
    result.setdefault("vector", []).append(farthest(weights(one), weights(model)))
loss_of(model, *own(0)).backward()
gradient = model.word.weight.grad
result["tolist"], result["numpy"] = raised(gradient.tolist), raised(gradient.numpy)
""")
        self.assertEqual(result["zeros"], 0)
        self.assertEqual(result["vector"], [0, 0])
        for name, words in {
                "functional": "StateError: fully_shard: 'word.weight' is a plain tensor of shape (13, 8) where a parameter was, as inside of torch.func.functional_call()",
                "maximize": "param_groups[0]['maximize'] is True now, and was False at the first step, which chose the library's update by it; set it before the first step",
                "unfrozen": "optimizer.step(): 'layers.0.norm.weight' was frozen when the model was first used, and requires gradients now",
                "summon": "StateError: summon_full_params(writeback=False): parameter 'word.weight' was written inside, which would leave each rank its own values; set writeback=True",
                "tolist": "take gradient.full_tensor().numpy()", "numpy": "of a gradient of shape (13, 8)"}.items():
            with self.subTest(name):
                self.assertIn(words, str(result[name]))

    def test_refuses_what_ranks_write_differently(self):
        for ranks, options in ((2, "{}"), (4, "{'mesh': torch.distributed.device_mesh.init_device_mesh('cpu', (2, 2))}"), (2, "{'reshard_after_forward': False}")):
            result = self.ran(f"""
options = {options}
""" + """
import json
def step(model, optimizer): optimizer.step()
changes = {
    "noise": lambda p: p.add_(torch.rand(p.shape)), "copy": lambda p: p.copy_(torch.full(p.shape, float(ranks.world().rank))), "data": lambda p: p.data.normal_(), "row": lambda p: p[:1].add_(ranks.world().rank + 1),
    "mean": lambda p: p.lerp_(torch.rand(p.shape), .5), "gradient": lambda p: p.grad.add_(torch.rand(p.shape)), "one rank": lambda p: p.mul_(2) if ranks.world().rank else None}
ends = {"step": lambda model, optimizer: optimizer.step(), "zero_grad": lambda model, optimizer: optimizer.zero_grad(), "own": lambda model, optimizer: model.layers[1].up.weight.to_local(),
        "saved": lambda model, optimizer: save_checkpoint(model, optimizer, folder)}
mine = {}
for name, change in changes.items():
    for end, call in ends.items():
        model = sharded(net(), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=.1)
        loss_of(model, *own(0)).backward()
        torch.manual_seed(ranks.world().rank)
        def run():
            with torch.no_grad(): change(model.layers[1].up.weight)
            call(model, optimizer)
        mine[f"{name}, {end}"] = raised(run)
result = [json.loads(text) for text in ranks.world().gather(json.dumps(mine))]
""", ranks=ranks)
            for rank, one in enumerate(result):
                for name, error in one.items():
                    with self.subTest(f"{options}: {name} on rank {rank}"):
                        if name.startswith("gradient"):
                            self.assertRegex(error or "", r"^StateError: aten.add_.Tensor beside the gradient of 'layers.1.up.weight': a tensor of shape \(16, 8\) has other values")
                        else:
                            self.assertRegex(error or "", r"^StateError: [\w ]+: the program has written into parameter 'layers.1.up.weight' in place, and another rank has other values")


if __name__ == "__main__":
    main()
