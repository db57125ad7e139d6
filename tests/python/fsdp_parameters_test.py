"""Parameters of FSDP programs: their fp32 values wherever a program reads or writes them, with the answers of a
DTensor; and their gradients, states and elements of a rank."""
from fsdp_programs import Case
from harness import main

HAND = """
import copy, dataclasses, io
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
def made(frozen=False, steps=1, make=lambda p: torch.optim.SGD(p, lr=1e-9), **options):  # the weights hardly move
    model = net(tied=False)
    model.word.requires_grad_(not frozen)
    optimizer = make([p for p in sharded(model, **options).parameters() if p.requires_grad])
    for step in range(steps):
        loss_of(model, *own(step)).backward()
        optimizer.step(); optimizer.zero_grad()
    return model, optimizer
def far(one, other):
    one = one.full_tensor() if hasattr(one, "full_tensor") else torch.as_tensor(one)
    other = torch.as_tensor(other)
    assert one.shape == other.shape and one.dtype == other.dtype, (one.shape, other.shape, one.dtype, other.dtype)
    return float((one.detach().double() - other.detach().double()).abs().max()) if one.numel() else 0.0
def loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)
"""


class Parameters(Case):
    """In two ranks."""

    near = 1e-6

    def ran(self, text, ranks=2, **options):
        return super().ran(HAND + text, ranks, **options)

    def test_read_as_fp32_values_where_modules_compute_in_bf16(self):
        self.assert_all_near(self.ran("""
reads = {
    "to": lambda p: p.to(torch.float32), "float": lambda p: p.float(), "double": lambda p: p.double().float(), "detach": lambda p: p.detach().cpu(), "data": lambda p: p.data.clone(),
    "vector": lambda p: nn.utils.parameters_to_vector([p, p])[:p.numel()].view(p.shape), "view": lambda p: p.view(-1).reshape(p.shape), "row": lambda p: torch.stack([row for row in p]),
    "list": lambda p: torch.tensor(p.tolist()), "item": lambda p: torch.tensor([one.item() for one in p.detach().flatten()]).view(p.shape), "cat": lambda p: torch.cat([p[:1], p[1:]]),
    "foreach": lambda p: torch._foreach_mul([p], 1.0)[0], "copied": lambda p: torch.zeros(p.shape).copy_(p), "new": lambda p: torch.zeros_like(p) + p, "deepcopy": copy.deepcopy,
    "deepcopy of data": lambda p: copy.deepcopy(p.data), "saved": loaded, "saved data": lambda p: loaded(p.data), "transposed": lambda p: p.T.T, "tensor": lambda p: torch.tensor(p.tolist(), dtype=p.dtype),
    "split": lambda p: torch.cat(p.split(1)), "where": lambda p: torch.where(p > 9, 0.0, p), "einsum": lambda p: torch.einsum("i...->i...", p), "local": lambda p: p.redistribute(placements=[Replicate()]).to_local(),
    "graph": lambda p: torch.enable_grad()(lambda: p * 1.0)()}
numbers = {"norm": lambda p: p.norm(), "foreach norm": lambda p: torch._foreach_norm([p])[0], "max": lambda p: p.abs().max(), "sum": lambda p: p.double().sum().float()}
result, exact = {}, dict(net(tied=False).named_parameters())
for frozen in (False, True):
    model, _ = made(frozen, mp_policy=BF16)
    for name in ("word.weight", "layers.1.up.bias"):
        p = model.get_parameter(name)
        with torch.no_grad():
            result |= {f"{how} {name} {frozen}": far(read(p), exact[name]) for how, read in reads.items()}
            result |= {f"{how} {name} {frozen}": far(read(p), read(exact[name])) for how, read in numbers.items()}
        assert p.dtype == p.data.dtype == torch.empty_like(p).dtype == torch.float32 and p.element_size() == 4 and isinstance(p, nn.Parameter) and p.is_leaf
    for how, state in {"state": model.state_dict(), "kept": model.state_dict(keep_vars=True)}.items():
        result[f"{how} {frozen}"] = max(far(value, exact[name]) for name, value in state.items())
    assert not any(value.requires_grad for value in model.state_dict().values())
    result[f"saved state {frozen}"] = max(far(value, exact[name]) for name, value in loaded(model.state_dict()).items())
dtypes = []
handle = model.layers[0].up.register_forward_hook(lambda module, inputs, output: dtypes.append((module.weight.dtype, output.dtype)))
loss_of(model, *own(0)).backward()
assert dtypes == [(torch.bfloat16, torch.bfloat16)] and model.layers[0].up.weight.dtype == torch.float32  # modules compute with what is rounded
"""))

    def test_and_gradients_meet_dtensors_of_the_program(self):
        found = self.ran("""
result, told = {}, {}
for how, options in {"fp32": {}, "bf16": {"mp_policy": BF16}}.items():
    model, _ = made(**options)
    loss_of(model, *own(1)).backward()
    p = model.layers[1].up.weight
    start, gradient, noise = p.full_tensor(), p.grad.full_tensor(), torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    theirs = lambda: distribute_tensor(noise.clone(), p.device_mesh, p.placements)
    cases = {  # (what the program computes of its DTensor, the same of plain tensors)
        "lerp_": (lambda d: d.lerp_(p, 0.1), lambda n: n.lerp_(start, 0.1)), "detach": (lambda d: d.mul_(0.9).add_(p.detach(), alpha=0.1), lambda n: n * 0.9 + start * 0.1),
        "data": (lambda d: d.copy_(p.data), lambda n: start), "state": (lambda d: d.add_(model.state_dict()["layers.1.up.weight"]), lambda n: n + start),
        "foreach": (lambda d: torch._foreach_lerp_([d], [p], 0.25), lambda n: n.lerp_(start, 0.25)), "out": (lambda d: torch.add(p, d, out=d), lambda n: start + n),
        "gradient": (lambda d: d.add_(p.grad), lambda n: n + gradient), "computed": (lambda d: d.add_(p.detach() * 2), lambda n: n + start * 2)}
    with torch.no_grad():
        for name, (ours, plain) in cases.items():
            made_of = theirs(); given = ours(made_of)
            assert given in (None, made_of) or given[0] is made_of if isinstance(given, (list, tuple)) else given is None or given is made_of, (name, given)
            result[f"{name} {how}"] = far(made_of, plain(noise.clone()))
        for name, value in {"minus": (p - theirs(), start - noise), "times": (theirs() * p, noise * start), "sum": ((p - theirs()).square().sum(), (start - noise).square().sum())}.items():
            assert type(value[0]) is DTensor
            result[f"{name} {how}"] = far(*value)
        result[f"times gradient {how}"] = far(p.grad * theirs(), gradient * noise)
        p.grad.add_(theirs(), alpha=0.1)
        result[f"into gradient {how}"] = far(p.grad, gradient + noise * 0.1)
        p.add_(theirs(), alpha=0.1); p.data.mul_(theirs())
        result[f"into parameter {how}"] = far(p, (start + noise * 0.1) * noise)
    model.zero_grad()
    (loss_of(model, *own(1)) * 0 + (p - theirs()).square().sum().full_tensor()).backward()
    result[f"penalty {how}"] = far(p.grad, 2 * (p.full_tensor() - noise).detach()) / (1e4 if how == "bf16" else 1)  # in the dtype of modules
    told[how] = str(raised(lambda: theirs().add_(torch.full(p.shape, float(ranks.world().rank)))))
result = [result, told]
""")
        self.assert_all_near(found[0], 1e-5)
        for told in found[1].values():
            self.assertIn("add_() with a DTensor", told)

    def test_on_meta_tell_where_a_state_dict_of_dtensors_goes(self):
        self.assert_all_near(self.ran("""
result = {}
for how, options in {"fp32": {}, "bf16": {"mp_policy": BF16}}.items():
    model, optimizer = made(make=lambda p: torch.optim.AdamW(p, lr=0.01), **options)
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    with torch.device("meta"): again = Net(tied=False)
    forms = sharded(again, **options).state_dict()
    assert set(forms) == set(whole) and all(one.is_meta and one.shape == whole[name].shape for name, one in forms.items())
    assert "on the device" in str(raised(lambda: forms["head.weight"].full_tensor()))
    state = {name: nn.Parameter(distribute_tensor(value, forms[name].device_mesh, forms[name].placements)) for name, value in whole.items()}
    again.load_state_dict(state, strict=True, assign=True)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) if one is again else optimizer for one in (model, again)]
    result[f"loaded {how}"] = farthest(weights(again), whole)
    result[f"loss {how}"] = abs(float(loss_of(again, *own(1)) - loss_of(model, *own(1))))
    result[f"layer {how}"] = far(again.layers[0].state_dict()["up.weight"], whole["layers.0.up.weight"])
"""))

    def test_keep_what_is_written_where_modules_compute_in_bf16(self):
        self.assert_all_near(self.ran("""
def parts(p):
    p[0] = 0.3
    p.view(-1)[-2:].mul_(1 + 1e-4)
    p.data.T[:1].add_(1e-4) if p.dim() > 1 else p.data.add_(1e-4)
writes = {"fill_": lambda p: p.fill_(0.3), "zeros": lambda p: nn.init.zeros_(p), "constant": lambda p: nn.init.constant_(p, 0.3), "parts": parts, "foreach": lambda p: torch._foreach_mul_([p], 1 + 1e-4),
          "out": lambda p: torch.mul(p, 1 + 1e-4, out=p), "copy bf16": lambda p: p.copy_((p * 1.5).bfloat16()), "data": lambda p: p.data.mul_(1 + 1e-4), "detached": lambda p: p.detach().add_(1e-4),
          "assigned": lambda p: setattr(p, "data", p.data * (1 + 1e-4)), "square_": lambda p: p.square_(), "itself": lambda p: [p.copy_(p), p.data.copy_(p.detach()), p.add_(p), p[:1].copy_(p[-1:])], "clamp": lambda p: p.data.clamp_(-.01, .01),
          "vector": lambda p: nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([p]) + 1e-4, [p])}
result = {}
for frozen in (False, True):
    for how, write in writes.items():
        model, optimizer = made(frozen, mp_policy=BF16)
        expected = net(tied=False)
        for name in ("word.weight", "layers.1.up.bias"):
            for one in (model, expected):
                with torch.no_grad(): write(one.get_parameter(name))
            wanted = expected.get_parameter(name)
            result[f"{how} {name} {frozen}"] = max(far(model.get_parameter(name), wanted), far(model.state_dict()[name], wanted))
        if how in ("foreach", "parts"):
            loss = loss_of(model, *own(1))
            result[f"{how} computes {frozen}"] = float(abs(loss - loss_of(expected, *own(1)))) / 1e4  # in bf16
            loss.backward(); optimizer.step(); optimizer.zero_grad()
            result[f"{how} stays {frozen}"] = max(far(model.get_parameter(name), expected.get_parameter(name)) for name in ("word.weight", "layers.1.up.bias"))
    model, _ = made(frozen, mp_policy=BF16)
    torch.manual_seed(ranks.world().rank)
    with torch.no_grad(): model.word.weight.data.normal_()
    seen = model.word.weight.full_tensor()
    torch.manual_seed(0)
    result[f"noise {frozen}"] = far(seen, torch.empty(13, 8).normal_())
    state = model.state_dict()
    with torch.no_grad():
        for value in state.values(): value.mul_(2)
        result[f"state written {frozen}"] = max(far(p, dict(net(tied=False).named_parameters())[name] * 2) for name, p in model.named_parameters() if name != "word.weight")
        for value in state.values(): value.copy_(torch.full(value.shape, 0.3))
    result[f"state is live {frozen}"] = max(far(model.state_dict()[name], torch.full(value.shape, 0.3)) + far(value, torch.full(value.shape, 0.3)) for name, value in state.items())
    model.load_state_dict(model.state_dict())
    model.load_state_dict(model.state_dict(keep_vars=True))
    result[f"own state {frozen}"] = max(far(value, torch.full(value.shape, 0.3)) for value in model.state_dict().values())
    model.load_state_dict(net(tied=False).bfloat16().state_dict())
    result[f"bf16 {frozen}"] = max(far(value, net(tied=False).state_dict()[name].bfloat16().float()) for name, value in model.state_dict().items())
    refused = raised(lambda: model.word.weight.data.add_(torch.full((13, 8), float(ranks.world().rank))))
    assert "has other values on another rank" in str(refused), refused
"""))

    def test_have_a_graph_and_answer_as_dtensors(self):
        result = self.ran("""
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
def penalty(w): return (w.t() @ w - torch.eye(8)).pow(2).sum() + w.abs().sum()
whole = lambda value: value.full_tensor() if hasattr(value, "full_tensor") else value
reads = {"full_tensor": lambda p: p.full_tensor(), "itself": lambda p: p * 1, "view": lambda p: p.view(-1).view(p.shape)}
plain = net(tied=False)
(0.1 * penalty(plain.layers[0].up.weight)).backward()
result = {}
for name, options in {"fp32": {}, "kept": {"reshard_after_forward": False}, "bf16": {"mp_policy": BF16}}.items():
    for how, read in reads.items():
        def gradient(scale):
            model, _ = made(steps=0, **options)
            for step in range(2): (loss_of(model, *own(step)) + scale * penalty(read(model.layers[0].up.weight))).backward()
            return model.layers[0].up.weight.grad.full_tensor()
        found = (gradient(0.1) - gradient(0.0)) / 2
        result[f"{name} {how}"] = far(found, plain.layers[0].up.weight.grad) / (2e4 if name == "bf16" else 10)  # summed with the task's in the modules' dtype
for name, options in {"fp32": {}, "bf16": {"mp_policy": BF16}}.items():
    model, _ = made(**options)
    loss_of(model, *own(0)).backward()
    p = model.head.weight
    for value in (p, p.grad, model.state_dict()["head.weight"]):
        assert value.placements == (Shard(0),) and value.device_mesh.size() == 2, value.placements
        made_of = value.redistribute(placements=[Replicate()])
        assert type(made_of) is DTensor and type(made_of.to_local()) is torch.Tensor
        result[f"{name} redistribute {type(value).__name__}"] = far(made_of, value.full_tensor()) + far(value.redistribute(), value.full_tensor())
        assert value.redistribute().placements == value.placements
    refused = raised(lambda: DTensor.from_local(p.to_local(), p.device_mesh, p.placements))
    assert "take redistribute()" in str(refused), refused
    want = {key: value + 1 for key, value in net(tied=False).state_dict().items()}
    for how, load in {"load": lambda state: model.load_state_dict(state), "assign": lambda state: model.load_state_dict(state, assign=True), "set": lambda state: set_model_state_dict(model, state),
                      "copy_": lambda state: [model.get_parameter(key).data.copy_(value.full_tensor()) if key == "head.weight" else torch.no_grad()(model.get_parameter(key).copy_)(value) for key, value in state.items()]}.items():
        want = {key: value + 1 for key, value in want.items()}
        load({key: distribute_tensor(value, model.get_parameter(key).device_mesh, model.get_parameter(key).placements) for key, value in want.items()})
        result[f"{name} {how}"] = max(far(value, want[key]) for key, value in model.state_dict().items())
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    result[f"{name} full"] = max(far(value, want[key]) for key, value in full.items()) if full else 0.0
""")
        self.assert_all_near(result)

    def test_lend_a_rank_its_elements(self):
        self.assert_all_near(self.ran("""
result = {}
for name, options in {"fp32": {}, "kept": {"reshard_after_forward": False}, "bf16": {"mp_policy": BF16}}.items():
    for frozen in (False, True):
        model, optimizer = made(frozen, make=lambda p: torch.optim.SGD(p, lr=0.1), **options)
        begun = {key: whole_.full_tensor().detach() for key, whole_ in model.named_parameters()}
        lent = {key: p.to_local() for key, p in model.named_parameters()}
        with torch.no_grad():
            for value in lent.values():
                if value.numel(): value.mul_(0.5)  # not on every rank
        result[f"{name} full {frozen}"] = max(far(p, begun[key] * .5) for key, p in model.named_parameters())
        with torch.no_grad():
            for value in lent.values(): value[:1] = 7.0
            assert all(bool((p == 7).any()) for p in model.parameters())  # a read by an operator
            for value in lent.values(): value[:1] = 0.25
            for p in model.parameters(): p.to_local().zero_()
        result[f"{name} computes {frozen}"] = float(loss_of(model, *own(0)).sub(torch.tensor(13.0).log()).abs()) / (1e5 if name == "bf16" else 10)
        for key, value in model.state_dict().items(): assert not value.full_tensor().any(), key
        with torch.no_grad():
            for key, p in model.named_parameters(): p.copy_(begun[key])
        counts = torch.tensor([sum(int(value.numel()) for value in lent.values())])
        ranks.world().all_reduce(counts)
        assert counts.item() == sum(p.numel() for p in model.parameters())
        squares = sum((value.double().square().sum() for value in lent.values()), torch.zeros((), dtype=torch.float64)).reshape(1)
        ranks.world().all_reduce(squares)
        result[f"{name} live {frozen}"] = float(abs(squares - sum(value.double().square().sum() for value in begun.values()))) / 10
        loss_of(model, *own(0)).backward()
        expected = {key: begun[key] - (.1 * p.grad.full_tensor() if p.requires_grad else 0) for key, p in model.named_parameters()}
        optimizer.step(); optimizer.zero_grad()
        assert all(p.to_local() is lent[key] for key, p in model.named_parameters())
        result[f"{name} stepped {frozen}"] = max(far(p, expected[key]) for key, p in model.named_parameters())
        loss_of(model, *own(1)).backward()
        expected = {key: p.detach().clone() - (.1 * p.grad.full_tensor() if p.requires_grad else 0) for key, p in model.named_parameters()}
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad: p.to_local().sub_(p.grad.to_local(), alpha=.1)
                p.grad = None
        result[f"{name} by hand {frozen}"] = max(far(p, expected[key]) for key, p in model.named_parameters())
"""))

    def test_are_a_checkpoints_after_a_load_whatever_was_written_into_lent_elements(self):
        self.assert_all_near(self.ran("""
model, optimizer = made(frozen=True)
save_checkpoint(model, optimizer, folder)
saved = {key: p.full_tensor().detach() for key, p in model.named_parameters()}
with torch.no_grad():
    for p in model.parameters(): p.to_local().zero_()  # and no use of the model after it
assert load_checkpoint(model, optimizer, folder)
result = {key: far(p, saved[key]) for key, p in model.named_parameters()}
"""), 0)

    def test_have_states_and_hooks_of_steps(self):
        result = self.ran("""
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
told, result = [], {}
handles = [register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: told.append("before")), register_optimizer_step_post_hook(lambda optimizer, args, kwargs: told.append("after"))]
for name, options in {"fp32": {}, "bf16": {"mp_policy": BF16}}.items():
    model, optimizer = made(steps=0, make=lambda p: torch.optim.AdamW(p, lr=.01), **options)
    assert not optimizer.state and len(optimizer.state) == 0
    own_handles = [optimizer.register_step_pre_hook(lambda *_: told.append("own before")), optimizer.register_step_post_hook(lambda *_: told.append("own after"))]
    told.clear()
    for step in range(2):
        loss_of(model, *own(step)).backward()
        optimizer.step(); optimizer.zero_grad()
    assert told == ["before", "own before", "own after", "after"] * 2, told
    state, p = optimizer.state, model.head.weight
    saved = optimizer.state_dict()["state"]
    assert len(state) == len(list(model.parameters())) == len(list(state.items())) == len(list(state.values())) == len(dict(state)) and bool(state) and p in state and isinstance(state.get(p), dict)
    for index, one in enumerate(model.parameters()):
        assert set(state[one]) == {"step", "exp_avg", "exp_avg_sq"} and state[one]["step"].item() == 2
        result[f"{name} {index}"] = max(far(state[one][key], value) for key, value in saved[index].items())
    state[p]["exp_avg"].zero_()
    torch._foreach_mul_([state[one]["exp_avg_sq"] for one in state], 0.5)
    index = [one is p for one in model.parameters()].index(True)
    for one in state.values():
        for key, value in one.items(): one[key] = value.to("cpu")
    state[p]["step"] = torch.tensor(7.0)
    now = optimizer.state_dict()["state"][index]
    assert now["step"].item() == 7
    result[f"{name} written"] = far(now["exp_avg"], torch.zeros(p.shape)) + far(now["exp_avg_sq"], saved[index]["exp_avg_sq"] * .5)
    for change in (state.clear, lambda: state.pop(p), lambda: state[p].update(exp_avg=0), lambda: state.__setitem__(p, {}), lambda: state[p].__setitem__("more", p)):
        assert "states are the library's shards" in str(raised(change))
places = [(one.device_mesh, one.placements) for one in model.parameters()]
given = {index: {key: distribute_tensor(value * .5, *places[index]) if value.dim() else value for key, value in one.items()} for index, one in saved.items()}
optimizer.load_state_dict({**optimizer.state_dict(), "state": given})
result["of dtensors"] = max(far(value, saved[index][key] * .5) for index, one in optimizer.state_dict()["state"].items() for key, value in one.items() if value.dim())
told.clear()
def hooked(parameters):
    optimizer = torch.optim.RMSprop(parameters, lr=.01, momentum=.9)
    optimizer.register_step_pre_hook(lambda *_: told.append("own"))
    return optimizer
model, optimizer = made(make=hooked)
assert told == ["before", "own", "after"], told
saved, p = optimizer.state_dict()["state"], model.head.weight
result["steps itself"] = max(far(optimizer.state[p][key], value) for index, p in enumerate(model.parameters()) for key, value in saved[index].items())
assert len(optimizer.state) == len(saved) and "give optimizer.load_state_dict() other" in str(raised(lambda: optimizer.state[p]["square_avg"].zero_()))
assert not made()[1].state  # SGD without momentum has none
for handle in handles: handle.remove()
""")
        self.assert_all_near(result)

    def test_casts_what_methods_and_dataclasses_hold(self):
        self.ran("""
@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    inner: dict
    name: str = "b"
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
    def forward(self, batch): return Batch(self.lin(batch.x) + batch.inner["more"][0], {})
    def features(self, x, scale=None): return self.lin(x) * (1 if scale is None else scale)
for policy, dtype in ((BF16, torch.bfloat16), (MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32), torch.float32)):
    model = fully_shard(Model(), mp_policy=policy)
    register_fsdp_forward_method(model, "features")
    optimizer = torch.optim.SGD(model.parameters(), lr=.1)
    given = Batch(torch.randn(2, 4), {"more": [torch.ones(4)]})
    found = model(given)
    assert found.x.dtype == dtype and given.x.dtype == torch.float32, found
    before = model.lin.weight.full_tensor().detach().clone()
    out = model.features(torch.randn(2, 4), scale=torch.full((), 2.0))
    assert out.dtype == dtype
    (out.float().sum() + found.x.float().sum()).backward()
    optimizer.step(); optimizer.zero_grad()
    assert float((model.lin.weight.full_tensor() - before).abs().max()) > 0
result = {}
""")

    def test_answer_one_rank_alone_and_fsdp1s_by_rank(self):
        result = self.ran("""
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
model, optimizer = made()
for step in range(2):
    loss_of(model, *own(step)).backward()
    if ranks.world().rank == 0:
        assert all(p.grad is not None and p.grad.dtype == torch.float32 and p.grad.shape == p.shape for p in model.parameters())
        if step: assert sum(float(p.grad.to_local().norm()) for p in model.parameters()) > 0
    optimizer.step()
    optimizer.zero_grad()
    if ranks.world().rank == 0: assert all(p.grad is None for p in model.parameters())
dist.barrier()
plain = net(tied=False)
loss_of(plain, *batch(0)).backward()
model = FSDP(net(tied=False), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=.01)
loss_of(model, *own(0)).backward()
def joined(value):
    value = value.reshape(1).clone()
    dist.all_reduce(value)
    return value[0]
gradients, expected = [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]
norm = torch.nn.utils.get_total_norm(expected)
result = {"norm": far(joined(sum(g.detach().norm() ** 2 for g in gradients)).sqrt(), norm), "squares": far(joined(sum((g ** 2).sum() for g in gradients)).sqrt(), norm),
          "foreach": far(joined(sum(n ** 2 for n in torch._foreach_norm(gradients))).sqrt(), norm), "count": abs(int(joined(torch.tensor(sum(g.numel() for g in gradients)))) - sum(g.numel() for g in expected)),
          "clip": far(model.clip_grad_norm_(1e9), norm)}
optimizer.step(); optimizer.zero_grad()
sharded_, full = FSDP.sharded_optim_state_dict(model, optimizer), FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
result["sharded states"] = max(far(value, full["state"][key][name]) for key, one in sharded_["state"].items() for name, value in one.items())
flat = FSDP.flatten_sharded_optim_state_dict(sharded_, model, optimizer)
optimizer.load_state_dict(flat)
by_id = FSDP.rekey_optim_state_dict(full, torch.distributed.fsdp.fully_sharded_data_parallel.OptimStateKeyType.PARAM_ID, model, optim=optimizer)
assert set(by_id["state"]) == set(range(len(full["state"])))
by_name = FSDP.rekey_optim_state_dict(by_id, torch.distributed.fsdp.fully_sharded_data_parallel.OptimStateKeyType.PARAM_NAME, model, optim=optimizer)
assert set(by_name["state"]) == set(full["state"])
# As torch.distributed.checkpoint.optimizer.load_sharded_optimizer_state_dict() gives them
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
halves = {key: {name: _create_chunk_sharded_tensor(value * .5, dist.get_rank(), 2, 2, dist.group.WORLD) if value.dim() else value for name, value in one.items()} for key, one in full["state"].items()}
optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, {**full, "state": halves}))
now = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
result["states of ShardedTensors"] = max(far(value, full["state"][key][name] * .5) for key, one in now.items() for name, value in one.items() if value.dim())
""")
        self.assert_all_near(result)

    def test_are_trained_under_a_profiler_from_the_first_step_on(self):
        self.ran("""
for make in (lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), torch.autograd.profiler.profile):
    with make() as profile: made()
    assert any("addmm" in event.key for event in profile.key_averages())
    with make() as outer:
        model, optimizer = made()
        del model, optimizer
    made()
result = {}
""")


if __name__ == "__main__":
    main()
