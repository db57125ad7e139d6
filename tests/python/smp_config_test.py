"""smp.init() and the numbers of ranks."""
import json

from harness import Case, main

_TOLD = """
    import json, os, torch
    import trireme.smp as smp
    from trireme.smp.config import KEYS, checked, resolved
    def told(call):
        try:
            return call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    def read(options, size=1):
        return told(lambda: vars(resolved(checked(options), size)))
"""


class Keys(Case):
    def test_defaults_are_smps(self):
        found = self.on_ranks(0, _TOLD + """
    result = [read({"partitions": 2, "microbatches": 8}, 2), read({"pipeline_parallel_degree": 2, "microbatches": 3, "optimize": "speed"}, 2)]
""")
        cfg, of_speed = found
        self.assertEqual({name: cfg[name] for name in ("pipeline_parallel_degree", "microbatches", "active_microbatches", "pipeline", "optimize", "placement_strategy",
                                                       "auto_partition", "default_partition", "memory_weight", "ddp", "tensor_parallel_degree", "fp16",
                                                       "sharded_data_parallel_degree", "partition_method")},
                         {"pipeline_parallel_degree": 2, "microbatches": 8, "active_microbatches": 4, "pipeline": "interleaved", "optimize": "memory",
                          "placement_strategy": "cluster", "auto_partition": True, "default_partition": 0, "memory_weight": 0.8, "ddp": False,
                          "tensor_parallel_degree": 1, "fp16": False, "sharded_data_parallel_degree": 1, "partition_method": "ordered"})
        # there are three micro-batches
        self.assertEqual([of_speed["memory_weight"], of_speed["active_microbatches"]], [0.2, 3])

    def test_an_unknown_key_names_the_nearest(self):
        found = self.on_ranks(0, _TOLD + """
    result = [read({"partitions": 1, "microbatch": 2}), read({"partitions": 1, 7: 2})]
""")
        self.assertEqual(found, ["ConfigError: smp.init: there is no key `microbatch`; did you mean `microbatches`?; docs/smp.md has all keys",
                                 "ConfigError: smp.init: there is no key `7`; docs/smp.md has all keys"])

    def test_a_value_of_another_kind_is_named(self):
        cases = {"microbatches": [0, 2.0, True, "4"], "pipeline": ["fast", 1], "memory_weight": [1.5, "0.5", None], "ddp": [1, "true"], "ddp_port": [0, "80"],
                 "default_partition": [-1], "active_microbatches": [0], "auto_partition": [None], "optimize": ["size"], "fp16": ["on"]}
        found = self.on_ranks(0, _TOLD + f"""
    cases = json.loads({json.dumps(json.dumps(cases))})
    result = [read({{"partitions": 1, key: value}}) for key, values in cases.items() for value in values]
""")
        pairs = [(key, value) for key, values in cases.items() for value in values]
        for (key, value), text in zip(pairs, found, strict=True):
            self.assertTrue(text.startswith(f"ConfigError: smp.init: `{key}` = {json.dumps(value)}; expected "), text)
        self.assertEqual(found[0], "ConfigError: smp.init: `microbatches` = 0; expected a whole number of 1 or more")

    def test_what_is_for_tensorflow_is_refused_by_name_unless_it_has_its_default(self):
        values = {"horovod": True, "load_partition": True, "contiguous": False, "partition_file": "a"}
        found = self.on_ranks(0, _TOLD + f"""
    values = json.loads({json.dumps(json.dumps(values))})
    result = [[read({{"partitions": 1, key: value}}) for key, value in values.items()],
              [type(read({{"partitions": 1, key: KEYS[key].default}})).__name__ for key in values],
              sorted(key for key, row in KEYS.items() if row.refused)]
""")
        for (key, value), text in zip(values.items(), found[0], strict=True):
            self.assertEqual(text, f"UnsupportedError: smp.init: `{key}` = {json.dumps(value)} is for TensorFlow; leave it out")
        self.assertEqual(set(found[1]), {"dict"})
        self.assertEqual(found[2], sorted(values))  # no other key is refused so

    def test_combinations_that_do_not_fit_are_named(self):
        found = self.on_ranks(0, _TOLD + """
    result = [read({"microbatches": 2}), read({"partitions": 2, "pipeline_parallel_degree": 4}, 4),
              read({"partitions": 1, "microbatches": 2, "active_microbatches": 3}), read({"partitions": 2, "auto_partition": False}, 2),
              read({"partitions": 2, "auto_partition": False, "default_partition": 2}, 2), read({"partitions": 3}, 4), read({"partitions": 2}, 4),
              read({"partitions": 1, "ddp_port": 80}), read({"partitions": 1, "placement_strategy": "near"}),
              type(read({"partitions": 2, "pipeline_parallel_degree": 2, "ddp": True, "ddp_port": 80, "ddp_dist_backend": "gloo"}, 4)).__name__]
""")
        self.assertEqual(found[:-1], [
            "ConfigError: smp.init: `pipeline_parallel_degree` (or `partitions`) is missing; give the number of stages of the model, 1 for none",
            "ConfigError: smp.init: `pipeline_parallel_degree` is 2 and `pipeline_parallel_degree` 4; they are two names of one number: give one of them",
            "ConfigError: smp.init: `active_microbatches` = 3 is more than `microbatches` = 2; give at most that, or leave it out",
            "ConfigError: smp.init: `auto_partition` = false needs `default_partition`, the stage of modules that were made outside of smp.partition(); give it",
            "ConfigError: smp.init: `default_partition` = 2, and there are 2 partitions; give 0 to 1",
            "ConfigError: smp.init: `pipeline_parallel_degree` = 3 does not divide the 4 ranks; start a multiple of 3 ranks, or give another degree",
            "ConfigError: smp.init: 4 ranks have 2 copies of a model of `pipeline_parallel_degree` = 2, which needs `ddp` = true; give it, or start 2 ranks",
            "ConfigError: smp.init: `ddp_port` = 80 needs `ddp` = true; give it, or leave `ddp_port` out",
            'ConfigError: placement_strategy is "near"; expected "cluster", "spread" or the letters D, P and T in any order'])
        self.assertEqual(found[-1], "dict")

    def test_precision_and_sharding_that_do_not_fit_are_named(self):
        found = self.on_ranks(0, _TOLD + """
    sharded = {"partitions": 1, "ddp": True, "sharded_data_parallel_degree": 2}
    result = [read({"partitions": 1, "fp16": True, "bf16": True}), read({"partitions": 1, "bf16": True, "fp16_params": True}),
              read({"partitions": 1, "shard_optimizer_state": True}), read({"partitions": 1, "sharded_data_parallel_degree": 2}),
              read({**sharded, "shard_optimizer_state": True}, 2), read({**sharded, "partitions": 2}, 6), read({"partitions": 1, "sdp_gradient_clipping": 2.0}),
              read({"partitions": 1, "sdp_hierarchical_allgather": False}), read({"partitions": 1, "activation_loading_horizon": 2}),
              read({**sharded, "sdp_gradient_clipping": 0}, 2)]
    fits = [read({**sharded, "partitions": 2, "sdp_gradient_clipping": 2.0, "sdp_max_live_parameters": 7, "sdp_hierarchical_allgather": False, "bf16": True}, 8),
            read({"partitions": 1, "fp16": True, "fp16_params": True, "offload_activations": True, "activation_loading_horizon": 2})]
    result.append([[cfg["sharded_data_parallel_degree"], cfg["sdp_gradient_clipping"], cfg["fp16"], cfg["bf16"], cfg["activation_loading_horizon"]] for cfg in fits])
""")
        self.assertEqual(found, [
            "ConfigError: smp.init: `fp16` = true and `bf16` = true are two types of weights; give one of them",
            "ConfigError: smp.init: `fp16_params` = true needs `fp16` = true, which has masters and a loss scale; give it, or leave `fp16_params` out",
            "ConfigError: smp.init: `shard_optimizer_state` = true needs `ddp` = true; give it, or leave `shard_optimizer_state` out",
            "ConfigError: smp.init: `sharded_data_parallel_degree` = 2 needs `ddp` = true; give it, or leave `sharded_data_parallel_degree` out",
            "ConfigError: smp.init: `sharded_data_parallel_degree` = 2 shards optimizer states, too; leave out `shard_optimizer_state` = true",
            "ConfigError: smp.init: `sharded_data_parallel_degree` = 2 does not divide the 3 ranks that have the same parameters; give a divisor of 3",
            "ConfigError: smp.init: `sdp_gradient_clipping` = 2.0 needs `sharded_data_parallel_degree` above 1; give it, or leave `sdp_gradient_clipping` out",
            "ConfigError: smp.init: `sdp_hierarchical_allgather` = false needs `sharded_data_parallel_degree` above 1; give it, or leave `sdp_hierarchical_allgather` out",
            "ConfigError: smp.init: `activation_loading_horizon` = 2 needs `offload_activations` = true; give it, or leave the horizon out",
            "ConfigError: smp.init: `sdp_gradient_clipping` = 0; expected a number above 0",
            [[2, 2.0, False, True, 4], [1, 1.0, True, False, 2]]])


class Init(Case):
    def test_reads_the_variable_and_takes_its_values_first(self):
        found = self.on_ranks(0, _TOLD + """
    before = [smp.is_initialized(), told(smp.rank), told(lambda: smp.state.cfg)]
    missing = told(smp.init)
    os.environ["SM_HP_MP_PARAMETERS"] = "{"
    broken = told(smp.init)
    os.environ["SM_HP_MP_PARAMETERS"] = '[1]'
    no_object = told(smp.init)
    os.environ["SM_HP_MP_PARAMETERS"] = '{"partitions": 1, "microbatches": 6}'
    smp.init({"pipeline_parallel_degree": 4, "microbatches": 2, "pipeline": "simple"})
    cfg = smp.state.cfg
    result = [before, missing, broken, no_object, [cfg.pipeline_parallel_degree, cfg.partitions, cfg.microbatches, cfg.pipeline, cfg.schedule],
              told(lambda: cfg.fp61), [smp.is_initialized(), smp.rank(), smp.size()], told(lambda: smp.init({"pipeline": "simple"})),
              told(lambda: smp.init({"pipeline": "interleaved"}))]
""")
        self.assertEqual(found[0], [False, "StateError: smp.state.world: there is none yet; call smp.init() first",
                                    "StateError: smp.state.cfg: there is none yet; call smp.init() first"])
        self.assertEqual(found[1], "ConfigError: smp.init: no configuration; give a dict, or set SM_HP_MP_PARAMETERS to its JSON")
        self.assertTrue(found[2].startswith("ConfigError: smp.init: SM_HP_MP_PARAMETERS is no JSON: "), found[2])
        self.assertEqual(found[3], 'ConfigError: smp.init: SM_HP_MP_PARAMETERS is "[1]"; expected a JSON object of smp\'s keys')
        self.assertEqual(found[4], [1, 1, 6, "simple", "gpipe"])
        self.assertEqual(found[5], "AttributeError: smp.state.cfg has no key 'fp61'; did you mean `fp16`?")
        self.assertEqual(found[6:8], [[True, 0, 1], None])
        self.assertEqual(found[8], "StateError: smp.init: it was called before with another `pipeline` ('simple', now 'interleaved'); a process has one configuration: "
                                   "call it once")

    def test_ranks_with_other_configurations_are_told_everywhere(self):
        found = self.on_ranks(2, _TOLD + """
    import trireme
    trireme.init_distributed()
    text = told(lambda: smp.init({"partitions": 2, "microbatches": 2 + int(os.environ["RANK"])}))
    result = trireme.ranks.world().gather(text)
""")
        self.assertEqual(found, [f"ConfigError: smp.init: the ranks' configurations differ in `active_microbatches` (here {count}), `microbatches` (here {count}); "
                                 "give every rank the same" for count in (2, 3)])


class Ranks(Case):
    _NUMBERS = """
    smp.init({options})
    names = ["rank", "size", "local_rank", "local_size", "pp_rank", "tp_rank", "rdp_rank", "mp_rank", "dp_rank", "pp_size", "tp_size", "rdp_size", "mp_size", "dp_size"]
    mine = [getattr(smp, name)() for name in names]
    groups = [smp.get_pp_group(), smp.get_tp_group(), smp.get_rdp_group(), smp.get_mp_group(), smp.get_dp_group()]
    result = [json.loads(text) for text in smp.state.world.gather(json.dumps([mine, groups]))]
"""

    def _numbers(self, strategy):
        return self.on_ranks(4, _TOLD + self._NUMBERS.replace("{options}", repr({"partitions": 2, "ddp": True, "placement_strategy": strategy})))

    def test_of_cluster_a_model_is_on_neighbours(self):
        for rank, (mine, groups) in enumerate(self._numbers("cluster")):
            stage, copy = rank % 2, rank // 2
            self.assertEqual(mine, [rank, 4, rank, 4, stage, 0, copy, stage, copy, 2, 1, 2, 2, 2])
            self.assertEqual(groups, [[2 * copy, 2 * copy + 1], [rank], [stage, stage + 2], [2 * copy, 2 * copy + 1], [stage, stage + 2]])

    def test_of_spread_copies_are_neighbours(self):
        for rank, (mine, groups) in enumerate(self._numbers("spread")):
            stage, copy = rank // 2, rank % 2
            self.assertEqual(mine, [rank, 4, rank, 4, stage, 0, copy, stage, copy, 2, 1, 2, 2, 2])
            self.assertEqual(groups, [[copy, copy + 2], [rank], [2 * stage, 2 * stage + 1], [copy, copy + 2], [2 * stage, 2 * stage + 1]])

    def test_ranks_with_slices_of_layers_take_different_samples(self):
        # The table of smp's documentation for eight ranks: DPT is rank = 4 · rdp + 2 · pp + tp, PTD is 4 · pp + 2 ·
        # tp + rdp.
        found = self.on_ranks(0, _TOLD + """
    from trireme._native import core
    from trireme.smp.config import Configuration, state
    class World:
        def __init__(self, rank):
            self.rank, self.size = rank, 8
    result = []
    for strategy in ("cluster", "PTD"):
        topology = core.place(strategy, 2, 2, 2)
        for rank in range(8):
            state.set(cfg=None, world=World(rank), topology=topology, place={axis: topology.position_of(rank, axis) for axis in ("data", "pipe", "tensor")})
            result.append([smp.pp_rank(), smp.tp_rank(), smp.rdp_rank(), smp.mp_rank(), smp.dp_rank(), smp.mp_size(), smp.dp_size(), smp.get_mp_group(), smp.get_dp_group()])
""")
        for rank in range(8):
            high, middle, low = rank // 4, rank // 2 % 2, rank % 2
            self.assertEqual(found[rank], [middle, low, high, 2 * middle + low, 2 * high + low, 4, 4, list(range(4 * high, 4 * high + 4)),
                                           [one for one in range(8) if one // 2 % 2 == middle]])
            self.assertEqual(found[8 + rank], [high, middle, low, 2 * high + middle, 2 * middle + low, 4, 4, [one for one in range(8) if one % 2 == low],
                                               list(range(4 * high, 4 * high + 4))])


if __name__ == "__main__":
    main()
