"""Parameters that a program keeps out of FSDP (ignored_params, ignored_modules, ignored_states): whole on each rank,
with its own gradients, as PyTorch's."""
from fsdp_programs import Case
from harness import main

_RUN = """
import torch.distributed.fsdp as theirs
import trireme.fsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
ranks.join()
if not dist.is_initialized(): dist.init_process_group("gloo")
def made():
    model = net(tied=False)
    model.layers[1].up.bias.requires_grad_(False)
    return model
def kept_of(model):
    return {*model.head.parameters(), *model.layers[1].up.parameters()}
def by_fully_shard(fsdp):
    model = made()
    kept = kept_of(model)
    for layer in model.layers: fsdp.fully_shard(layer, ignored_params=kept)
    return fsdp.fully_shard(model, ignored_params=kept)
def by_class(fsdp, by="ignored_modules"):
    model = made()
    options = {by: [model.head, model.layers[1].up] if by == "ignored_modules" else list(kept_of(model))}
    return fsdp.FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True, **options)
def run(model, optimizer_of, fsdp1=False):
    kept = kept_of(model)
    assert all(type(p) is nn.Parameter for p in kept) and all(type(p) is not nn.Parameter or fsdp1 for p in model.parameters() if p not in kept)
    optimizer = optimizer_of([{"params": [p for p in model.parameters() if p not in kept]}, {"params": list(model.head.parameters()), "lr": 0.02},
                              {"params": list(model.layers[1].up.parameters())}])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    told = []
    for step in range(5):
        loss = loss_of(model, *own(step))
        loss.backward()
        told += [loss.item(), model.head.weight.grad.norm().item()]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in kept)
    mine = {"head": model.head.weight.detach().clone(), "up": model.layers[1].up.weight.detach().clone(), "frozen": model.layers[1].up.bias.detach().clone()}
    if fsdp1:
        with theirs.FullyShardedDataParallel.summon_full_params(model): everything = {name: p.detach().clone() for name, p in model.named_parameters()}
    else:
        everything = weights(model)
    return told, mine, {name: value for name, value in everything.items() if "head" not in name and "layers.1.up" not in name}, optimizer
def over_ranks(number):
    value = torch.tensor(number)
    ranks.world().all_reduce(value, "max")
    return value.item()
def compared(wrap, optimizer_of, **options):
    one, other = (run(wrap(fsdp, **options), optimizer_of, fsdp1=wrap is by_class and fsdp is theirs) for fsdp in (theirs, trireme.fsdp))
    head = other[1]["head"].clone()
    dist.broadcast(head, 0)
    return {"told": over_ranks(max(abs(x - y) for x, y in zip(one[0], other[0], strict=True))), "mine": over_ranks(farthest(other[1], one[1])),
            "sharded": over_ranks(farthest(other[2], one[2])), "moved": over_ranks((other[1]["up"] - made().layers[1].up.weight).abs().max().item()),
            "apart": over_ranks((other[1]["head"] - head).abs().max().item())}
adam = lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
"""


class Ignored(Case):
    """Each beside PyTorch's own FSDP over Gloo, on every rank."""

    def assert_alike(self, result):
        for name, one in result.items():
            with self.subTest(name):
                self.assertLessEqual(max(one["told"], one["mine"], one["sharded"]), 1e-5)
                self.assertGreater(min(one["moved"], one["apart"]), 1e-3)  # ranks step by gradients of their own

    def test_trains_as_torchs_fully_shard(self):
        self.assert_alike(self.ran(_RUN + """
result = {"adam": compared(by_fully_shard, adam), "sgd": compared(by_fully_shard, lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)),
          "adagrad": compared(by_fully_shard, lambda groups: torch.optim.Adagrad(groups, lr=0.05))}
"""))

    def test_trains_as_torchs_fsdp1(self):
        self.assert_alike(self.ran(_RUN + """
result = {"modules": compared(by_class, adam), "states": compared(by_class, adam, by="ignored_states")}
"""))

    def test_saves_and_loads_states_of_both_kinds_and_scales_losses_of_both(self):
        result = self.ran(_RUN + """
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
model = by_fully_shard(trireme.fsdp)
_, _, _, optimizer = run(model, adam)
state, states = {name: value.clone() if type(value) is torch.Tensor else value.full_tensor() for name, value in model.state_dict().items()}, optimizer.state_dict()
again = by_fully_shard(trireme.fsdp)
other = adam([{"params": [p for p in again.parameters() if p not in kept_of(again)]}, {"params": list(again.head.parameters())}, {"params": list(again.layers[1].up.parameters())}])
again.load_state_dict(state)
other.load_state_dict(states)
for one, its in ((model, optimizer), (again, other)):
    loss_of(one, *own(7)).backward()
    its.step()
    its.zero_grad()
result = {"resumed": over_ranks(max(farthest(weights(model), weights(again)), (model.head.weight - again.head.weight).abs().max().item())),
          "states": [len(states["state"]), over_ranks(float(states["state"][len(list(model.parameters())) - 3]["step"]))]}
fresh = by_fully_shard(trireme.fsdp)
its = adam(fresh.parameters())
begun = get_optimizer_state_dict(fresh, its, options=StateDictOptions(full_state_dict=True))
result["begun"] = [float(begun["state"]["head.weight"]["exp_avg"].abs().max()), "layers.1.up.bias" in begun["state"]] if ranks.world().rank == 0 else None
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
scaler.scale(loss_of(fresh, *own(0))).backward()
if ranks.world().rank == 1: fresh.head.weight.grad.view(-1)[0] = torch.inf
before = weights(fresh)
scaler.step(its)
scaler.update()
its.zero_grad()
result["skipped"] = [over_ranks(farthest(before, weights(fresh))), over_ranks(scaler.get_scale())]
one = by_class(trireme.fsdp)
loss_of(one, *own(0)).backward()
result["clips"] = raised(lambda: one.clip_grad_norm_(0.05))
for p in kept_of(one):
    if p.grad is not None: ranks.world().all_reduce(p.grad, "mean")
whole_norm = torch.linalg.vector_norm(torch.stack([value.norm() for value in gradients(one).values()]))
result["norm"] = [abs(float(one.clip_grad_norm_(0.05)) - float(whole_norm)), float(torch.linalg.vector_norm(torch.stack([value.norm() for value in gradients(one).values()])))]
result["refused"] = {name: raised(function) for name, function in {
    "mixed": lambda: torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0), "saved": lambda: save_checkpoint(model, optimizer, folder),
    "tensor": lambda: fully_shard(net(), ignored_params={torch.zeros(1)}), "sharded": lambda: fully_shard(net(), ignored_params={model.word.weight}),
    "itself": lambda: FSDP(one.head, ignored_modules=[one.head]), "both": lambda: FSDP(net(), ignored_modules=[], ignored_states=[]),
    "wrapped": lambda: FSDP(net(), ignored_modules=[one.layers[0]]), "word": lambda: FSDP(net(), ignored_modules=[3])}.items()}
stepping = by_fully_shard(trireme.fsdp)
optimizer = torch.optim.NAdam(stepping.parameters(), lr=0.1)
loss_of(stepping, *own(0)).backward()
result["refused"]["itself steps"] = raised(optimizer.step)
""")
        self.assertEqual(result["resumed"], 0)
        self.assertEqual(result["states"][1], 6)  # tensors of state_dict() are the states themselves, as torch's
        self.assertEqual(result["begun"], [0, False])
        self.assertEqual(result["skipped"], [0, 4.0])
        self.assertIn("average these gradients", result["clips"])
        self.assertLessEqual(result["norm"][0], 1e-6)
        self.assertAlmostEqual(result["norm"][1], 0.05, 5)
        for name, words in {"mixed": "of sharded and of other parameters together", "saved": "ignored_params", "tensor": "expected parameters, got a Tensor", "sharded": "sharded already",
                            "itself": "the module itself is among them", "both": "leave ignored_modules out", "wrapped": "was wrapped already", "word": "expected modules, got a int",
                            "itself steps": "an optimizer of their own"}.items():
            with self.subTest(name):
                self.assertIn(words, str(result["refused"][name]))


if __name__ == "__main__":
    main()
