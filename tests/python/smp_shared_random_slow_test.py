"""Random programs over stages whose layers ranks share: losses, gradients and weights of plain PyTorch to rounding."""
import os

from harness import RankServer, main
from smp_programs import Case
from smp_random import PROGRAMS

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import
_SEED, _COUNT = int(os.environ.get("TRIREME_SMP_SEED", "1")), int(os.environ.get("TRIREME_SMP_PROGRAMS", "40"))
_REFUSED = "which is not there yet over stages"

# Layers are cut by columns, by rows, or whole, on random stages.
_PROGRAMS = PROGRAMS + """
    import copy
    from trireme.smp.nn import cuts

    WIDTH = 8
    kinds = {}
    smp.init({"partitions": STAGES, "microbatches": MICRO_BATCHES, "tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True, "optimize": "speed",
              "auto_partition": False, "default_partition": 0, "pipeline": PIPELINE})
    cuts.section_of = lambda module, degree: {"autotp_size": degree, "partition_config": {"use_default_specs": False, "layer_specs": [
        {"patterns": [name.replace(".", "[.]") + "[.]weight$"], "partition_type": kind, "partition_dim": int(kind == "row")} for name, kind in kinds.items()]}}

    class Shared(Random):
        _NORM = nn.LayerNorm
        _KINDS = ("layer", "layer", "layer", "layer", "functional", "add", "mul", "cat", "compare", "mask", "write all", "buffer", "norm", "detach", "view", "copy", "hook", "index",
                  "softmax", "slice", "region")

    def furthest(found, expected):
        if found is None or expected is None:
            return max(one.abs().max().item() for one in (found, expected, torch.zeros(1)) if one is not None)
        return (found - expected).abs().max().item() / max(0.5, expected.abs().max().item())

    def program(seed):
        '''The greatest distance from plain PyTorch, or the text of a refusal.'''
        torch.manual_seed(seed)
        net, draw = Shared(seed), random.Random(seed + 1)
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
