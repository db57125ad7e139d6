"""Accelerate's DeepSpeed plugin, unchanged, on two ranks; and files of Accelerate that are written for it."""
import json
import pathlib
import tempfile

import harness
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

    def test_its_loader_takes_the_files_that_config_convert_writes(self):
        from accelerate.commands.config.config_args import load_config_from_file  # pylint: disable=import-outside-toplevel
        zero = {"stage": 3, "mics_shard_size": 2}
        for name, options, kind in (
                ("plain", {"zero_optimization": {"stage": 0}}, "MULTI_GPU"),
                ("sharded", {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "gradient_clipping": 0}, "FSDP"),
                ("replicated", {"zero_optimization": zero, "trireme": {"recompute": "full"}}, "FSDP")):
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                given, written = pathlib.Path(folder, "ds.json"), pathlib.Path(folder, "fsdp.yaml")
                given.write_text(json.dumps({"train_micro_batch_size_per_gpu": "auto", **options}))
                status, out, err = harness.run([harness.PROGRAM, "config", "convert", "--to", "fsdp", "--world", 4, given])
                self.assertEqual(status, 0, err)
                written.write_text(out)
                loaded = load_config_from_file(str(written))
                self.assertEqual(str(loaded.distributed_type), f"DistributedType.{kind}")
                if kind == "FSDP":
                    self.assertEqual((loaded.fsdp_config["fsdp_version"], loaded.fsdp_config["fsdp_reshard_after_forward"]), (2, True))
                self.assertEqual(loaded.mixed_precision, "bf16" if name == "sharded" else "no")
                if name == "replicated":
                    self.assertEqual(loaded.parallelism_config, {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2})


if __name__ == "__main__":
    main()
