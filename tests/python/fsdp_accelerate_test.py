"""Accelerate's FSDP on hosts: losses, gradients and weights of one process."""
from fsdp_accelerated import Case
from harness import main


class Accelerated(Case):
    def test_trains_saves_and_loads_as_one_process(self):
        alone = self.told("alone", 0, micro=8)
        plugin = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}
        found = self.told("plugin", 2, micro=4, plugin=plugin)
        self.assert_same(found, alone)
        self.assertEqual((found["kind"], found["lr"]), ("DistributedType.FSDP", alone["lr"]))
        # Variables that `accelerate launch --config_file fsdp.yaml` sets.
        variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
                     "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT", "FSDP_RESHARD_AFTER_FORWARD": "true",
                     "FSDP_OFFLOAD_PARAMS": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_ACTIVATION_CHECKPOINTING": "true"}
        self.assert_same(self.told("variables", 2, micro=4, environment=variables), alone)

    def test_trains_saves_and_loads_by_fsdp1_as_one_process(self):
        alone = self.told("alone", 0, micro=8)
        # On a host a plugin of PyTorch's own refuses sync_module_states, which cpu_ram_efficient_loading asks for.
        plugin = {"fsdp_version": 1, "auto_wrap_policy": "transformer_based_wrap", "cpu_ram_efficient_loading": True, "state_dict_type": "SHARDED_STATE_DICT"}
        found = self.told("plugin", 2, micro=4, plugin=plugin, differs=True)
        self.assert_same(found, alone)
        self.assertEqual((found["kind"], found["lr"], found["model"]), ("DistributedType.FSDP", alone["lr"], "Net"))
        variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
                     "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT", "FSDP_SYNC_MODULE_STATES": "true",
                     "FSDP_USE_ORIG_PARAMS": "false", "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE", "FSDP_ACTIVATION_CHECKPOINTING": "true"}
        self.assert_same(self.told("variables", 2, micro=4, environment=variables), alone)

    def test_refuses_by_name_what_is_not_known_to_be_right(self):
        plugin = {"fsdp_version": 2}
        for words, options in {
                "accelerate 0.1: its FSDP is known to train here in version 1.15.0": {"before": "import importlib.metadata; importlib.metadata.version = lambda name: '0.1'"},
                "fp16 needs a loss scale": {"precision": "fp16"}, "fsdp_version=3 is not there; set it to 2 or 1": {"plugin": {"fsdp_version": 3}},
                "dp_replicate_size=2. says nothing to fsdp_version 1": {"plugin": {"fsdp_version": 1}, "parallelism": {"dp_replicate_size": 2}}}.items():
            with self.subTest(words), self.assertRaisesRegex(AssertionError, words):
                self.told(words[:5], 2, micro=4, **{"plugin": plugin, **options})


if __name__ == "__main__":
    main()
