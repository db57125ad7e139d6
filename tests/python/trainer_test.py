"""The transformers Trainer with a configuration of DeepSpeed, unchanged, on two ranks."""
from harness import main
from huggingface import Case


class OfTrainer(Case):
    def test_stage_3_trains_as_one_process_on_the_whole_batch_and_resumes_to_the_same_bits(self):
        alone = self.trained("trainer", 0, "alone", micro=8)
        config = self.config(3)
        whole = self.trained("trainer", 2, "whole", micro=2, accumulation=2, deepspeed=config)
        self.assert_close(whole["eval_loss"], alone["eval_loss"])
        self.assert_close(whole["grad_norm"], alone["grad_norm"])
        self.assertEqual(whole["learning_rate"], alone["learning_rate"])
        self.assert_same_weights("whole/final", "alone/final", 1e-5)
        resumed = self.trained("trainer", 2, "resumed", micro=2, accumulation=2, deepspeed=config,
                               resume=str(self.folder / "whole/checkpoint-3"))
        self.assertEqual(resumed["eval_loss"], whole["eval_loss"])
        self.assert_same_weights("resumed/final", "whole/final")


if __name__ == "__main__":
    main()
