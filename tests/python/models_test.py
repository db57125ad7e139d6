"""Unmodified models at ZeRO stages 2 and 3 on two ranks against plain PyTorch on the whole batch."""
from harness import Case, main


class Models(Case):
    """Every model of zoo/models.py."""

    def test_two_ranks_give_the_losses_of_plain_pytorch(self):
        result = self.on_ranks(2, """
            from zoo import models
            result = {}
            for name in models.PROGRAMS:
                runs = [(2, "auto"), (3, "auto"), (3, "copy")]
                found = {f"{stage} {gather}": models.sharded(name, 6, stage, gather) for stage, gather in runs}
                result[name] = (models.plain(name, 6) if os.environ["RANK"] == "0" else None, found)
        """, timeout_s=500)
        for name, (expected, found) in result.items():
            for run, losses in found.items():
                with self.subTest(model=name, run=run):
                    self.assert_close(losses, expected, 1e-5)
                    self.assertEqual(len(set(losses)), len(losses))  # weights and batches change
        self.assertGreaterEqual(len(result), 15)


if __name__ == "__main__":
    main()
