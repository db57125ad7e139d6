"""Accelerate's FSDP with replicas, and the Trainer's over adapters of peft, in fp32 and in bf16."""
from fsdp_accelerated import Case
from harness import main


class Replicas(Case):
    def test_shards_over_some_ranks_and_replicates_over_others(self):
        plugin, axes = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}, {"dp_replicate_size": 2, "dp_shard_size": 2}
        self.assert_same(self.told("found", 4, micro=2, plugin=plugin, parallelism=axes), self.told("alone", 0, micro=8))


class Adapters(Case):
    def trained(self, out, ranks, **options):
        return self.told(out, ranks, program="trainer.py", lora={"r": 4, "target_modules": ["q_proj", "v_proj"]}, **options)

    def test_trains_as_one_process_and_resumes_to_the_same_bits(self):
        options = {"micro": 2, "fsdp": "full_shard auto_wrap", "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
        alone = self.trained("alone", 0, micro=8, accumulation=1)
        found = self.trained("found", 2, **options)
        for key in ("eval_loss", "grad_norm", "learning_rate"):
            self.assert_close(found[key], alone[key])
        self.assert_same_model("found/final", "alone/final", 1e-5, "adapter_model.safetensors")
        for name, more in (("found", {}), ("half", {"bf16": True})):
            begun = found if name == "found" else self.trained(name, 2, **options, **more)
            self.assertEqual(self.trained(f"{name}-resumed", 2, resume=str(self.folder / name / "checkpoint-3"), **options, **more), begun)
            self.assert_same_model(f"{name}-resumed/final", f"{name}/final", 0, "adapter_model.safetensors")
        self.assert_close(begun["eval_loss"], alone["eval_loss"], 1e-2)


if __name__ == "__main__":
    main()
