"""The helper of the tests beside it: a rank that fails is a failure of the test."""
from harness import Case, main


class Harness(Case):
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


if __name__ == "__main__":
    main()
