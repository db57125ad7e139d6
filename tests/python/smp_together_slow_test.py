"""Stages, layers that ranks share, copies and shards together, and programs that combine what there is at random."""
import os
import random

from harness import RankServer, main
from smp_together_test import Case

RankServer.imports = ("torch._dynamo", *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "bert", "llama", "t5")))
_SEED, _COUNT = int(os.environ.get("TRIREME_SMP_SEED", "3")), int(os.environ.get("TRIREME_SMP_PROGRAMS", "24"))


class Shards(Case):
    def test_stages_slices_and_copies_with_each_kind_of_shards(self):
        for net in ("blocks", "gpt2"):
            for shard in (None, 1, 3):
                self.assert_right(net=net, pp=2, tp=2, rdp=2, shard=shard, tied=True, clip=0.5)
            self.assert_right(net=net, pp=2, tp=2, rdp=2, shard=3, prescaled=False, optimize="memory")
            self.assert_right(net=net, pp=2, tp=2, rdp=2, shard=1, precision="fp16", clip=0.5)
        for shard in (1, 3):
            self.assert_right(net="bert", pp=2, tp=2, rdp=2, shard=shard, tied=True, clip=0.3)
            self.assert_right(net="gpt2", pp=2, rdp=2, shard=shard, tied=True, placement="spread")
            self.assert_right(net="gpt2", tp=2, rdp=2, shard=shard, tied=True, optimize="memory")


def drawn(seed):
    """A program's description, and that of another layout that loads what it saves, or None."""
    source = random.Random(seed)
    net = source.choice(["blocks"] * 4 + ["own", "gpt2", "gpt2", "bert", "llama", "t5"])
    pp, tp, rdp = source.choice([(2, 2, 1)] * 6 + [(3, 2, 1), (1, 2, 1), (1, 2, 2), (2, 1, 2), (2, 2, 2), (2, 1, 1)])
    is_own = net == "blocks"
    options = [{"prescaled": False, "optimize": source.choice(["speed", "memory"])}, {"optimize": "memory"}, {"shard": source.choice([1, 3])} if rdp > 1 else {"clip": 0.3},
               {"losses": 2}, {"hooks": is_own}, {"frozen": True}, {"frozen_later": True}, {"table": True}, {"saves": source.choice(["partial", "full"])}, {"scheduler": True},
               {"clip": 0.3}, {"by_hand": True}, {"optimizer": source.choice(["sgd", "momentum"])}, {"schedule": source.choice(["simple", "sequential"])}, {"placement": "spread"},
               {"partition_method": "tree"}, {"summed": True}]
    options += [{"batch_norm": True}, {"delayed": True}, {"tied": True}] if is_own else [{"precision": source.choice(["fp16", "bf16"])}]
    options += [{"checkpointed": source.choice(["each", "contiguous", "group_2", "layers"]), "offloads": source.random() < 0.4}]
    spec = {"net": net, "pp": pp, "tp": tp, "rdp": rdp, "seed": seed}
    for option in source.sample(options, 5):
        spec.update(option)
    if "saves" not in spec:
        return spec, None
    spec["samples"] = 16 * tp * rdp
    layout = dict(zip(("pp", "tp", "rdp"), source.choice([(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1)])))
    return spec, {**spec, **layout, "saves": None, "loads": spec["saves"], "shard": None}


class Random(Case):
    def test_programs_are_right(self):
        for seed in range(_SEED * 1000, _SEED * 1000 + _COUNT):
            spec, other = drawn(seed)
            self.assert_right(**spec)
            if other:
                self.assert_right(**other)


if __name__ == "__main__":
    main()
