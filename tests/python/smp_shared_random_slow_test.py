"""Random programs over stages whose layers ranks share: losses, gradients and weights of plain PyTorch to rounding."""
import os

from harness import RankServer, main
from smp_programs import Case

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import
_SEED, _COUNT = int(os.environ.get("TRIREME_SMP_SEED", "1")), int(os.environ.get("TRIREME_SMP_PROGRAMS", "40"))
_REFUSED = "which is not there yet over stages"

# A program by a seed: steps over a pool of activations [samples, WIDTH], layers that are cut by columns, by rows, or
# whole, on random stages.
_PROGRAMS = """
    import copy, gc, random
    from trireme.smp.nn import cuts

    WIDTH = 8
    kinds = {}
    smp.init({"partitions": STAGES, "microbatches": MICRO_BATCHES, "tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True, "optimize": "speed",
              "auto_partition": False, "default_partition": 0, "pipeline": PIPELINE})
    cuts.section_of = lambda module, degree: {"autotp_size": degree, "partition_config": {"use_default_specs": False, "layer_specs": [
        {"patterns": [name.replace(".", "[.]") + "[.]weight$"], "partition_type": kind, "partition_dim": int(kind == "row")} for name, kind in kinds.items()]}}

    class Random(nn.Module):
        def __init__(self, seed):
            super().__init__()
            draw = random.Random(seed)
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(draw.randint(3, 6))])
            self.norm = nn.LayerNorm(WIDTH)
            self.register_buffer("kept", torch.zeros(WIDTH))
            self.steps = [(draw.choice(self._KINDS), draw.randrange(len(self.layers)), draw.random(), draw.random()) for _ in range(draw.randint(5, 12))]
        _KINDS = ("layer", "layer", "layer", "layer", "functional", "add", "mul", "cat", "item", "mask", "write", "buffer", "norm", "detach", "view", "copy", "hook", "index", "softmax",
                  "slice", "region")
        def forward(self, x):
            pool = [x]
            for kind, which, one, other in self.steps:
                a, b, layer = pool[-1 - int(one * min(3, len(pool)))], pool[int(other * len(pool))], self.layers[which]
                if kind == "layer": y = torch.tanh(layer(a))
                elif kind == "functional": y = F.linear(a, layer.weight.t() * 0.5 + self.layers[0].weight, layer.bias)
                elif kind == "add": y = a + 0.5 * b
                elif kind == "mul": y = a * torch.sigmoid(b)
                elif kind == "cat": y = torch.cat([a[:, :4], b[:, 4:]], 1)
                elif kind == "item": y = a * 1.5 if a.mean().item() > float(b.detach().mean()) + 1e-3 else a * 0.5
                elif kind == "mask": y = torch.where(a > b, a, b * 0.5)
                elif kind == "write":
                    y = a * 1.0
                    y.mul_(0.9).add_(b)
                elif kind == "buffer":
                    with torch.no_grad():
                        self.kept.mul_(0.5).add_(a.detach().mean(0))
                    y = a - self.kept
                elif kind == "norm": y = self.norm(a)
                elif kind == "detach": y = a + b.detach()
                elif kind == "view": y = a.view(-1, 2, 4).transpose(1, 2).reshape(-1, WIDTH)
                elif kind == "copy": y = torch.tanh(a.view(-1, 2, 4).transpose(1, 2)).contiguous().view(-1, WIDTH)
                elif kind == "hook":
                    y = a * 1.1
                    if y.requires_grad: y.register_hook(lambda gradient: gradient * 0.7)
                elif kind == "softmax": y = torch.softmax(a, -1) * a.size(-1)
                elif kind == "slice": y = a[:, 2:6].repeat(1, 2)
                elif kind == "region": y = torch.utils.checkpoint.checkpoint(lambda t, u, layer=layer: torch.tanh(layer(t)) + u, a, b, use_reentrant=False)
                else:
                    rows = (a.detach()[:, 0] > 0).nonzero()[:, 0]
                    y = b.index_add(0, rows, layer(a[rows]))
                pool.append(y)
            return sum(tensor.square().mean() for tensor in pool[-3:]) + self.layers[0](pool[-1]).mean()

    def furthest(found, expected):
        if found is None or expected is None:
            return max(one.abs().max().item() for one in (found, expected, torch.zeros(1)) if one is not None)
        return (found - expected).abs().max().item() / max(0.5, expected.abs().max().item())

    def program(seed):
        '''The greatest distance from plain PyTorch, or the text of a refusal.'''
        torch.manual_seed(seed)
        net, draw = Random(seed), random.Random(seed + 1)
        alone = copy.deepcopy(net)
        for module in (*net.layers, net.norm):
            smp.set_partition(module, draw.randrange(smp.pp_size()))
        chosen = [draw.choice(("column", "row", "column", None)) for _ in net.layers]
        kinds.clear()
        kinds.update({f"layers.{number}": kind for number, kind in enumerate(chosen) if kind} or {"layers.0": "column"})
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        plain, train_step, apart = torch.optim.SGD(alone.parameters(), lr=0.05), stepping(model), 0
        for _ in range(2):
            batch = torch.randn(8, WIDTH)
            optimizer.zero_grad()
            plain.zero_grad()
            losses = train_step(batch)
            for loss, part in zip(losses.outputs, batch.chunk(MICRO_BATCHES)):
                expected = alone(part)
                (expected / MICRO_BATCHES).backward()
                apart = max(apart, furthest(loss, expected.detach()))
            for name, parameter in model.local_named_parameters():
                apart = max(apart, furthest(gradient_of(parameter), alone.get_parameter(name).grad))
            optimizer.step()
            plain.step()
        return max(apart, *(furthest(tensor, alone.state_dict()[name]) for name, tensor in model.state_dict().items()))
"""


class RandomPrograms(Case):
    def test_programs_are_those_of_plain_pytorch(self):
        found = {}
        for number, (stages, pipeline) in enumerate((stages, pipeline) for stages in (2, 3) for pipeline in ("interleaved", "simple", "sequential")):
            seeds = range(_SEED * 10000 + number * _COUNT, _SEED * 10000 + (number + 1) * _COUNT)
            text = _PROGRAMS.replace("STAGES", str(stages)).replace("PIPELINE", repr(pipeline)) + f"""
    result = []
    for seed in range({seeds.start}, {seeds.stop}):
        apart = told(lambda: program(seed))
        gc.collect()
        result.append(max((json.loads(one) for one in smp.state.world.gather(json.dumps(apart))), key=lambda one: (isinstance(one, str), one if isinstance(one, float) else 0)))
"""
            for seed, apart in zip(seeds, self.ran(2 * stages, text, timeout_s=1200), strict=True):
                with self.subTest(seed, stages=stages, pipeline=pipeline):
                    found[seed] = apart
                    if isinstance(apart, str):
                        self.assertIn(_REFUSED, apart)
                    else:
                        self.assertLessEqual(apart, 1e-4)
        print(f"{len(found)} programs, {sum(isinstance(apart, str) for apart in found.values())} refused, "
              f"{sum(isinstance(apart, float) and apart > 1e-5 for apart in found.values())} further than 1e-5")


if __name__ == "__main__":
    main()
