"""Accelerate's FSDP with replicas, as PyTorch's own fully_shard in bf16, its FSDP1, and the Trainer's of both versions
over adapters of peft, in fp32 and in bf16."""
import torch
from fsdp_accelerated import Case
from harness import main


class Replicas(Case):
    def test_shards_over_some_ranks_and_replicates_over_others(self):
        plugin, axes = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}, {"dp_replicate_size": 2, "dp_shard_size": 2}
        self.assert_same(self.told("found", 4, micro=2, plugin=plugin, parallelism=axes), self.told("alone", 0, micro=8))


class Fsdp2(Case):
    """Accelerate's fsdp_version 2."""

    def test_computes_in_bf16_as_torchs_fully_shard(self):
        policy = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": "bfloat16"}
        options = {"micro": 4, "precision": "bf16", "plugin": {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "mixed_precision_policy": policy}}
        expected, found = self.told("torchs", 2, by="torch", **options), self.told("ours", 2, **options)
        self.assert_same(found, expected, 1e-6)
        self.assertEqual({value.dtype for value in found["weights"].values()}, {torch.float32})

    def test_transformers_trainer_trains_as_one_process_and_resumes_to_the_same_bits(self):
        self.assert_trainer_resumes({})


class Fsdp1(Case):
    """Accelerate's fsdp_version 1."""

    def test_trains_as_fsdp2_and_one_process_with_each_strategy_policy_and_state_dict(self):
        alone = self.told("alone", 0, micro=8)
        by_layers = {"fsdp_version": 1, "auto_wrap_policy": "transformer_based_wrap"}
        ways = {"kept": {**by_layers, "sharding_strategy": "SHARD_GRAD_OP", "state_dict_type": "SHARDED_STATE_DICT"},
                "local": {**by_layers, "state_dict_type": "LOCAL_STATE_DICT"},
                "whole": {**by_layers, "sharding_strategy": "NO_SHARD"}, "hybrid": {**by_layers, "sharding_strategy": "HYBRID_SHARD", "use_orig_params": True},
                "offloaded": {**by_layers, "cpu_offload": True, "activation_checkpointing": True},
                "sizes": {"fsdp_version": 1, "auto_wrap_policy": "size_based_wrap", "min_num_params": 100, "sync_module_states": True},
                "no policy": {"fsdp_version": 1, "auto_wrap_policy": "no_wrap", "activation_checkpointing": True}, "fsdp2": {**by_layers, "fsdp_version": 2}}
        for name, plugin in ways.items():
            with self.subTest(name):
                self.assert_same(self.told(name, 2, micro=4, plugin=plugin), alone)

    def test_computes_in_bf16_as_torchs_fsdp1(self):
        # PyTorch's FSDP1 adds up in bf16 what it does not reduce
        options = {"micro": 4, "precision": "bf16", "accumulation": 1,
                   "plugin": {"fsdp_version": 1, "auto_wrap_policy": "transformer_based_wrap", "use_orig_params": True,
                              "mixed_precision_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32", "buffer_dtype": "float32"}}}
        for name, more in (("fp32", {}), ("bf16", {"dtype": "bfloat16"})):  # the latter Accelerate keeps in fp32
            with self.subTest(name):
                expected, found = self.told(f"torchs {name}", 2, by="torch", **options, **more), self.told(f"ours {name}", 2, **options, **more)
                del expected["gradients"]  # PyTorch's are flat parts
                expected["weights"] = {name_: value.float() for name_, value in expected["weights"].items()}
                self.assert_same(found, expected, 1e-5)
                self.assertEqual({value.dtype for value in found["weights"].values()}, {torch.float32})

    def test_transformers_trainer_trains_as_one_process_and_resumes_to_the_same_bits(self):
        self.assert_trainer_resumes({"version": 1})


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
        first = {**options, "fsdp_config": {**options["fsdp_config"], "version": 1}}
        self.assert_close(self.trained("first", 2, **first)["eval_loss"], alone["eval_loss"])
        self.assert_same_model("first/final", "alone/final", 1e-5, "adapter_model.safetensors")
        self.trained("first-resumed", 2, resume=str(self.folder / "first" / "checkpoint-3"), **first)
        self.assert_same_model("first-resumed/final", "first/final", 0, "adapter_model.safetensors")
        for name, more in (("found", {}), ("half", {"bf16": True})):
            begun = found if name == "found" else self.trained(name, 2, **options, **more)
            self.assertEqual(self.trained(f"{name}-resumed", 2, resume=str(self.folder / name / "checkpoint-3"), **options, **more), begun)
            self.assert_same_model(f"{name}-resumed/final", f"{name}/final", 0, "adapter_model.safetensors")
        self.assert_close(begun["eval_loss"], alone["eval_loss"], 1e-2)


if __name__ == "__main__":
    main()
