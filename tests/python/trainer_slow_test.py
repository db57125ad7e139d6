"""The transformers Trainer at every stage and precision, with the configuration's optimizer and schedule, from a
folder."""
from harness import main
from huggingface import OPTIMIZER, SCHEDULER, Case


class OfTrainerEverywhere(Case):
    def test_stages_agree_with_one_process(self):
        alone = self.trained("trainer", 0, "alone", micro=8, save_first=str(self.folder / "first"))
        for stage in (0, 1, 2, 3):
            for ranks in (1, 2):
                with self.subTest(stage=stage, ranks=ranks):
                    out = f"stage{stage}-{ranks}"
                    told = self.trained("trainer", ranks, out, micro=8 // ranks, deepspeed=self.config(stage))
                    self.assert_close(told["eval_loss"], alone["eval_loss"])
                    self.assert_same_weights(f"{out}/final", "alone/final", 1e-5)

    def test_a_model_from_a_folder_is_sharded_while_it_is_loaded(self):
        alone = self.trained("trainer", 0, "alone", micro=8, save_first=str(self.folder / "first"))
        for ranks in (1, 2):
            told = self.trained("trainer", ranks, f"loaded{ranks}", micro=8 // ranks, deepspeed=self.config(3),
                                model=str(self.folder / "first"))
            self.assert_close(told["eval_loss"], alone["eval_loss"])

    def test_optimizer_and_schedule_of_the_configuration_are_the_same_at_every_stage(self):
        sections = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER}
        first = self.trained("trainer", 1, "one", micro=8, deepspeed=self.config(0, **sections))
        for stage in (1, 3):
            told = self.trained("trainer", 2, f"stage{stage}", micro=4, deepspeed=self.config(stage, **sections))
            self.assert_close(told["eval_loss"], first["eval_loss"])
            self.assertEqual(told["learning_rate"], first["learning_rate"])
        resumed = self.trained("trainer", 2, "resumed", micro=4, deepspeed=self.config(3, **sections),
                               resume=str(self.folder / "stage3/checkpoint-3"))
        self.assertEqual(resumed["eval_loss"], told["eval_loss"])

    def test_bf16_is_the_same_at_every_stage_and_resumes_at_another_one(self):
        first = self.trained("trainer", 2, "stage1", micro=4, bf16=True, deepspeed=self.config(1))
        whole = self.trained("trainer", 2, "stage3", micro=4, bf16=True, deepspeed=self.config(3))
        self.assertEqual(whole["eval_loss"], first["eval_loss"])
        self.assertEqual({weight.dtype.itemsize for weight in self.weights("stage3/final").values()}, {2})
        resumed = self.trained("trainer", 2, "resumed", micro=4, bf16=True, deepspeed=self.config(1),
                               resume=str(self.folder / "stage3/checkpoint-3"))
        self.assertEqual(resumed["eval_loss"], whole["eval_loss"])
        fp32 = self.trained("trainer", 0, "fp32", micro=8)
        self.assert_close(first["eval_loss"], fp32["eval_loss"], 1e-2)  # bf16 has 8 digits


if __name__ == "__main__":
    main()
