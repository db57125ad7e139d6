"""The helper of the tests beside it: a rank that fails is a failure of the test."""
from harness import Case, main


class Harness(Case):
    """Ranks that are forked, and ranks of the launcher."""

    def test_gives_the_result_of_rank_0(self):
        result = self.on_ranks(2, """
            import trireme, torch
            trireme.init_distributed()
            total = torch.tensor([1.0 + trireme.comm.get_rank()])
            trireme.comm.all_reduce(total)
            result = {"total": total.item(), "rank": trireme.comm.get_rank()}
        """)
        self.assertEqual(result, {"total": 3.0, "rank": 0})

    def test_fails_where_a_rank_does(self):
        with self.assertRaisesRegex(AssertionError, "only on rank 1"):
            self.on_ranks(2, """
                import os
                result = 1
                if os.environ["RANK"] == "1":
                    raise ValueError("only on rank 1")
            """)

    def test_ranks_that_are_forked_have_what_those_of_the_launcher_have(self):
        program = """
            import os, sys, __main__
            result = {"name": __name__, "file": __file__ == sys.argv[0] == folder + "/snippet.py", "path": sys.path[0] == folder,
                      "words": len(sys.argv), "main": __main__.__dict__ is globals(), "threads": len(os.listdir("/proc/self/task")),
                      "variables": sorted(name for name in os.environ if name.endswith(("RANK", "SIZE")) or name.startswith(("MASTER_", "OMP_")))}
            import pathlib, random, torch
            pathlib.Path(folder, os.environ.get("RANK", "0")).write_text(f"{torch.initial_seed()} {random.random()}")
        """
        for ranks in (0, 2):
            self.assertEqual(self.on_ranks(ranks, program), self.on_ranks(ranks, program, launched=True), ranks)
        self.on_ranks(2, program)
        seeds = [number for rank in "01" for number in (self.folder / rank).read_text().split()]
        self.assertEqual(len(set(seeds)), 4, seeds)

    def test_ranks_that_are_forked_get_variables_of_trireme_and_no_others(self):
        program = "import os; result = os.environ.get('TRIREME_COMM')"
        self.assertEqual(self.on_ranks(1, program, environment={"TRIREME_COMM": "c10d"}), "c10d")
        self.assertIsNone(self.on_ranks(1, program))
        with self.assertRaisesRegex(ValueError, "OMP_NUM_THREADS.*use launch"):
            self.on_ranks(1, program, environment={"OMP_NUM_THREADS": "2"})

    def test_ends_ranks_that_take_too_long(self):
        with self.assertRaisesRegex(AssertionError, "ran longer than 1 s"):
            self.on_ranks(2, "import time; time.sleep(60)", timeout_s=1)


if __name__ == "__main__":
    main()
