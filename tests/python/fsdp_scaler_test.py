"""torch's scalers of losses under FSDP1 and FSDP2: scales, skipped steps and weights of PyTorch's own FSDP with
them."""
from fsdp_programs import Case
from harness import main

_RUN = """
import math, warnings
import torch.distributed.fsdp as theirs
import trireme.fsdp
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
ranks.join()
if not dist.is_initialized(): dist.init_process_group("gloo")
def by_fully_shard(fsdp, **options):
    model, policy = net(), fsdp.MixedPrecisionPolicy(**options)
    for layer in model.layers: fsdp.fully_shard(layer, mp_policy=policy)
    return fsdp.fully_shard(model, mp_policy=policy)
def by_class(fsdp, **options):
    precision = MixedPrecision(**options) if options else None
    return fsdp.FullyShardedDataParallel(net(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True, mixed_precision=precision)
def run(fsdp, wrap, make_scaler, unscales=True, fused=False, **options):
    model = wrap(fsdp, **options)
    clip = getattr(model, "clip_grad_norm_", None) or (lambda norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused or None)
    scaler, told, before = make_scaler(), [], None
    for step in range(6):
        tokens, labels = own(step)
        loss = F.cross_entropy(model(tokens).float().flatten(0, 1), labels.flatten())
        scaler.scale(loss).backward()
        if step == 2 and ranks.world().rank == 1:  # one rank's elements of one parameter
            local = next(one for one in ((p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad) for p in model.parameters() if p.grad is not None) if one.numel())
            local.view(-1)[:1] = math.inf
        elif step == 2:
            [p.grad for p in model.parameters()]
        if unscales:
            scaler.unscale_(optimizer)
            norm = clip(0.05)
            told += [float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)] if step != 2 else []
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        told += [mean(loss), scaler.get_scale()]
    if wrap is by_class and fsdp is theirs:
        with theirs.FullyShardedDataParallel.summon_full_params(model):
            return told, {name: p.detach().clone() for name, p in model.named_parameters()}, scaler.state_dict()
    names = [name for name, _ in model.named_parameters()]
    return told, {name: value for name, value in weights(model).items() if name in names}, scaler.state_dict()
def compared(wrap, make_scaler, **options):
    (one, expected, state), (other, found, own_state) = (run(fsdp, wrap, make_scaler, **options) for fsdp in (theirs, trireme.fsdp))
    far = max(abs(x - y) for x, y in zip(one, other, strict=True))
    gone = torch.tensor(farthest(found, expected))
    ranks.world().all_reduce(gone, "max")
    return {"told": far, "weights": gone.item(), "states": state == own_state, "told by rank 0": other}
scaled = {"init_scale": 2.0 ** 10, "growth_interval": 3}
"""


class Scaled(Case):
    """Each beside PyTorch's own FSDP over Gloo."""

    def assert_alike(self, result):
        for name, one in result.items():
            with self.subTest(name):
                self.assertLessEqual(max(one["told"], one["weights"]), 1e-5)
                self.assertTrue(one["states"])

    def test_skips_on_every_rank_and_steps_as_torchs_fully_shard(self):
        result = self.ran(_RUN + """
make = lambda: torch.amp.GradScaler("cpu", **scaled)
result = {"clipped": compared(by_fully_shard, make), "by step() alone": compared(by_fully_shard, make, unscales=False),
          "fp16": compared(by_fully_shard, make, param_dtype=torch.float16, reduce_dtype=torch.float32)}
(told, found, _), (same, expected, _) = run(trireme.fsdp, by_fully_shard, make, fused=True), run(trireme.fsdp, by_fully_shard, make)
result["fused"] = {"told": max(abs(x - y) for x, y in zip(told, same)), "weights": farthest(found, expected), "states": True}
""")
        self.assert_alike(result)
        # the third step was skipped
        self.assertEqual(result["by step() alone"]["told by rank 0"][1::2], [1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0])

    def test_serves_fsdp1_with_the_sharded_scaler(self):
        result = self.ran(_RUN + """
make = lambda: ShardedGradScaler("cpu", **scaled)
result = {"clipped": compared(by_class, make), "by step() alone": compared(by_class, make, unscales=False),
          "fp16": compared(by_class, make, param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.float16)}
""")
        self.assert_alike(result)

    def test_does_nothing_where_it_is_disabled(self):
        result = self.ran(_RUN + """
warnings.simplefilter("ignore")
def trained(make_scaler):
    model = sharded(net())
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.01), make_scaler()
    for step in range(3):
        scaler.scale(loss_of(model, *own(step))).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return weights(model), scaler.get_scale(), scaler.state_dict()
plain, _, _ = trained(lambda: torch.amp.GradScaler("cpu", enabled=False))
model = sharded(net())
told = train(model, torch.optim.AdamW(model.parameters(), lr=0.01), own, mean, clip=0.05, steps=3)
result = {"off": farthest(plain, weights(model))}
for name, make in {"cuda": lambda: torch.amp.GradScaler(enabled=torch.cuda.is_available()), "old": lambda: torch.cuda.amp.GradScaler(enabled=False),
                   "sharded": lambda: ShardedGradScaler(enabled=False)}.items():
    found, scale, state = trained(make)
    result[name] = [farthest(found, plain), scale, state]
""")
        self.assertEqual(result.pop("off"), 0)
        for name, one in result.items():
            with self.subTest(name):
                self.assertEqual(one, [0, 1.0, {}])


if __name__ == "__main__":
    main()
