"""Programs of users whose models' layers ranks share train what plain PyTorch trains in one process, or are refused
with a word that helps."""
import json
import pathlib

from harness import Case, RankServer, main

RankServer.imports = ("torch._dynamo", "transformers", "zoo.sequence")

HERE = pathlib.Path(__file__).parent
LARGEST = 2e-5
_RUN = """
import sys
sys.path.insert(0, {here!r})
import json, pathlib, os
import tensor_compare, zoo
tensor_compare.SECTION = {section!r}
programs = zoo.collection({collection!r})
result = {{}}
for name in {names!r}:
    try:
        result[name] = tensor_compare.run(programs[name], {tensor}, {stage})
    except Exception as error:
        result[name] = type(error).__name__ + ": " + str(error)
pathlib.Path(folder, os.environ["RANK"] + ".json").write_text(json.dumps(result))
"""


class Programs(Case):
    """Results of programs of a collection of the zoo on every rank."""

    def outcomes(self, ranks, tensor, stage, collection, names, section=None, timeout_s=240):
        """By rank, by name: the differences from plain PyTorch, or the error's text. `section`: of every program's
        `tensor_parallel`."""
        self.on_ranks(ranks, _RUN.format(here=str(HERE), collection=collection, names=names, tensor=tensor, stage=stage, section=section or {}), timeout_s=timeout_s)
        return [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(ranks)]

    def assert_right(self, ranks, tensor, stage, collection, names, **options):
        for rank, found in enumerate(self.outcomes(ranks, tensor, stage, collection, names, **options)):
            for name, differences in found.items():
                with self.subTest(name, ranks=ranks, tensor=tensor, stage=stage, rank=rank):
                    self.assertIsInstance(differences, dict, differences)
                    self.assertGreater(len(differences), 0)
                    for kind, (relative, where) in differences.items():
                        self.assertLessEqual(relative, LARGEST, f"{kind} {where}")

    def assert_refused(self, ranks, tensor, stage, collection, texts, **options):
        """Each program ends on every rank with an error that has its text. One after the other: what is refused late
        leaves its engine."""
        for name, text in texts.items():
            for rank, found in enumerate(self.outcomes(ranks, tensor, stage, collection, [name], **options)):
                with self.subTest(name, ranks=ranks, tensor=tensor, stage=stage, rank=rank):
                    self.assertIn(text, found[name])


class Quick(Programs):
    def test_attention_and_mlps_of_users(self):
        self.assert_right(2, 2, 3, "layers", ["attention_PackedUnbind_ruled", "attention_Heads3Of3", "mlp_LinearFunction", "attention_AlibiBaddbmm", "attention_RelativeBias", "attention_PiecesOfKeys",
                                                    "mlp_SwiGlu", "mlp_NormInside", "mlp_Experts", "mlp_SoftmaxInside"])

    def test_losses_and_loops_of_users(self):
        self.assert_right(2, 2, 1, "loops", ["loss_with_z", "loss_by_log_softmax_tied", "loop_shared_parameter", "loop_checkpointed_reentrant",
                                                          "penalty_orthogonal_rows", "edit_rows_of_head", "checkpoint_other_degree"])

    def test_rows_of_the_table_of_sequences(self):
        self.assert_right(2, 2, 3, "sequence", ["Llama with padding", "GPT-2 with padding", "BERT with padding", "BART with padding", "Llama with LoRA"])

    def test_what_is_not_known_to_be_right_is_refused_by_name(self):
        self.assert_refused(2, 2, 0, "layers", {"mlp_Put": "writes across slices"})


if __name__ == "__main__":
    main()
