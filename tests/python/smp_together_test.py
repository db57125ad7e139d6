"""Programs of smp that combine a few things at a time: losses, results, gradients of all parameters, norms and weights
are those of plain PyTorch. smp_together_slow_test.py has more."""
import json
import pathlib

import harness
from harness import RankServer, main, result_of

_SCRIPT = pathlib.Path(__file__).with_name("smp_together.py")
RankServer.imports = ("torch._dynamo", "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2")


class Case(harness.Case):
    def assert_right(self, **spec):
        with self.subTest(**spec):
            ranks = spec.get("pp", 1) * spec.get("tp", 1) * spec.get("rdp", 1)
            found = result_of(RankServer.run(ranks, [_SCRIPT, json.dumps(spec), self.folder], timeout_s=300))
            self.assertEqual(found["wrong"], [])
            return found


class Quick(Case):
    def test_the_norm_of_stages_whose_ranks_share_layers(self):
        """Stages with as many parameters, and with others."""
        for tied in (False, True):
            self.assert_right(net="gpt2", pp=2, tp=2, tied=tied, clip=0.3)

    def test_a_slice_of_a_parameter_that_another_stage_uses(self):
        """The bias of a head that is tied to the first stage's embedding."""
        self.assert_right(net="bert", pp=2, tp=2, tied=True, steps=2)

    def test_indices_of_a_parameter_of_which_ranks_have_slices(self):
        for seed in (1, 3):  # smp's own linear layer, and a marked one
            self.assert_right(net="blocks", pp=2, tp=2, indexed=True, by_hand=True, seed=seed, steps=2)

    def test_samples_of_each_rank_and_two_losses(self):
        self.assert_right(net="blocks", pp=2, tp=2, prescaled=False, optimize="memory", losses=2, values=True, hooks=True, frozen_later=True)

    def test_regions_of_stages_whose_ranks_share_layers(self):
        self.assert_right(net="gpt2", pp=2, tp=2, checkpointed="layers", steps=1)

    def test_tokens_that_are_cut_between_stages(self):
        self.assert_right(net="llama", pp=2, tp=2, optimize="memory", steps=1, evaluates=False)

    def test_a_save_of_stages_and_slices_is_loaded_by_one_process(self):
        spec = {"net": "blocks", "table": True, "tied": True, "scheduler": True, "samples": 16}
        for kind in ("partial", "full"):
            self.assert_right(pp=2, tp=2, saves=kind, **spec)
            self.assert_right(loads=kind, **spec)


if __name__ == "__main__":
    main()
