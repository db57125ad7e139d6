"""A few of watched_programs.py. TRIREME_TEST_SEED chooses others."""
import json
import os
import pathlib

from harness import Case, RankServer, main

RankServer.imports = ("torch._dynamo", "transformers.models.llama.modeling_llama")
_PROGRAMS = pathlib.Path(__file__).with_name("watched_programs.py")


class Watched(Case):
    ranks, count = (2,), 4

    def test_watched_programs_have_the_bits_of_unwatched_ones(self):
        seed = os.environ.get("TRIREME_TEST_SEED", "1")
        print(f"TRIREME_TEST_SEED={seed}")
        for ranks in self.ranks:
            folder = self.folder / str(ranks)
            folder.mkdir()
            status, out, err = RankServer.run(ranks, [_PROGRAMS, folder, seed, self.count], as_deepspeed=True, timeout_s=1200,
                                              environment={"TRIREME_LOG_LEVEL": "ERROR"})
            told = [json.loads(line) for line in out.splitlines() if line.startswith('{"program"')]
            self.assertEqual((status, len(told)), (0, ranks * self.count), f"{out[-2000:]}\n{err[-4000:]}")
            self.assertEqual([line for line in told if line["wrong"]], [])


if __name__ == "__main__":
    main()
