"""Random programs of smp's step functions on two to four stages under every schedule: the bits of one process."""
import os

from harness import RankServer, main
from smp_programs import Case
from smp_random import PROGRAMS

RankServer.imports = ("torch._dynamo",)  # which optimizers of torch import
_SEEDS, _COUNT = int(os.environ.get("TRIREME_SMP_SEED", "1")), int(os.environ.get("TRIREME_SMP_PROGRAMS", "34"))


class RandomPrograms(Case):
    def test_programs_have_the_bits_of_one_process(self):
        for number, (stages, pipeline) in enumerate((stages, pipeline) for stages in (2, 3, 4) for pipeline in ("interleaved", "simple", "sequential")):
            seeds = range(_SEEDS * 10000 + number * _COUNT, _SEEDS * 10000 + (number + 1) * _COUNT)
            text = PROGRAMS + f"""
    begin(pipeline={pipeline!r}, auto_partition={pipeline == "simple"}, default_partition=0)
    result = [[seed, program(seed)] for seed in range({seeds.start}, {seeds.stop})]
"""
            alone = self.ran(1, text)
            for static in (False, True):
                found = self.ran(stages, text.replace("begin(", f"begin(static_mode={static}, "), timeout_s=1200)
                for (seed, expected), (_, own) in zip(alone, found):
                    with self.subTest(seed, stages=stages, pipeline=pipeline, static=static):
                        self.assertEqual(own, expected)


if __name__ == "__main__":
    main()
