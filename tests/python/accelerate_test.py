"""Accelerate's DeepSpeed plugin, unchanged, on two ranks."""
from harness import main
from huggingface import SCHEDULER, Case


class OfAccelerate(Case):
    def test_accumulates_saves_and_loads_as_without_deepspeed(self):
        alone = self.trained("accelerated", 0, "alone", micro=8, accumulation=2)
        told = self.trained("accelerated", 2, "stage3", micro=4, accumulation=2, stage=3)
        self.assert_close(told["losses"], alone["losses"])
        self.assert_close(told["bias"], alone["bias"])
        self.assertEqual(told["lr"], alone["lr"])
        self.assertEqual(told["again"], told["losses"][len(told["losses"]) // 2:])
        self.assertEqual((told["model"], told["kind"]), ("Net", "DistributedType.DEEPSPEED"))
        self.assert_same_weights("stage3/model", "alone/model", 1e-5)

    def test_fills_auto_values_of_an_optimizer_and_a_schedule_of_the_configuration(self):
        zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
        config = self.config(2, zero_optimization=zero, scheduler=SCHEDULER, gradient_accumulation_steps=1,
                             optimizer={"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}})
        told = self.trained("accelerated", 2, "auto", micro=4, accumulation=1, config=config)
        self.assertEqual(told["again"], told["losses"][len(told["losses"]) // 2:])
        # Accelerate divides total_num_steps by the processes: 12 steps, 3 of them warm-up, of which 16 were taken.
        self.assertEqual(told["lr"], 0)


if __name__ == "__main__":
    main()
