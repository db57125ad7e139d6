"""DeepSpeed's ways to ask for shared layers: tp_model_init(), mpu and the configuration, and what they contradict each
other in."""
import json

from harness import Case, main

_PRELUDE = """
    import json, os, pathlib, torch
    import deepspeed
    import torch.distributed as dist
    from trireme.deepspeed import autotp
    deepspeed.init_distributed()
    RANK, SIZE = dist.get_rank(), dist.get_world_size()

    def record(**arguments):
        autotp._recorded = None
        if arguments:
            return deepspeed.tp_model_init(torch.nn.Linear(2, 2), **{"tp_size": 2, "dtype": torch.float32, **arguments})

    def raised(call):
        try:
            return call()
        except Exception as error:
            return [kind.__name__ for kind in type(error).__mro__] + [str(error)]

    def say(result):
        pathlib.Path(folder, f"{RANK}.json").write_text(json.dumps(result))
    result = None

    class Mpu:
        def __init__(self, size, group=None, rank=None, **others):
            self.size, self.group, self.rank = size, group, RANK % size if rank is None else rank
            vars(self).update({f"get_{name}_parallel_world_size": lambda value=value: value for name, value in others.items()})
        get_model_parallel_world_size = lambda self: self.size
        get_model_parallel_rank = lambda self: self.rank
        get_model_parallel_group = lambda self: self.group

    def merged(config, mpu=None):
        return raised(lambda: autotp.merged(config, mpu)[0])
"""


class Asking(Case):
    def told(self, ranks, text):
        """The text of say(), by rank."""
        self.on_ranks(ranks, _PRELUDE + text, as_deepspeed=True)
        return [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(ranks)]

    def test_names_are_where_programs_import_them_from(self):
        (result,) = self.told(1, """
    from deepspeed.module_inject import set_autotp_mode
    from deepspeed.module_inject.layers import is_autotp_training_mode, LinearLayer, set_autotp_mode as same
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config, merge_tp_model_init_into_config, record_tp_model_init_args, tp_group_world_size
    from deepspeed.runtime.tensor_parallel import AUTOTP_MODE, TpTrainingManager
    from deepspeed.runtime.tensor_parallel.tp_manager import TpTrainingManager as other
    from deepspeed import load_ds_config as load
    modes = [is_autotp_training_mode()]
    for is_training in (True, False):
        deepspeed.set_autotp_mode(training=is_training)
        modes.append(is_autotp_training_mode())
    model = torch.nn.Linear(2, 2)
    same_model = deepspeed.tp_model_init(model, 1, torch.float32, config={}, tp_group=None) is model
    say([same is set_autotp_mode is deepspeed.set_autotp_mode, load is load_ds_config, modes, is_autotp_training_mode(), same_model, AUTOTP_MODE.TRAINING.name,
         raised(lambda: LinearLayer())[0], raised(lambda: TpTrainingManager())[0], raised(lambda: other())[0]])
""")
        self.assertEqual(result, [True, True, [False, True, False], True, True, "TRAINING", "UnsupportedError", "UnsupportedError", "UnsupportedError"])

    def test_calls_and_configurations_that_contradict_each_other_are_refused_with_both_values(self):
        told = self.told(2, """
    record(tp_size=2)
    again = lambda **arguments: raised(lambda: deepspeed.tp_model_init(torch.nn.Linear(2, 2), **{"tp_size": 2, "dtype": torch.float32, **arguments}))
    found = [again(tp_size=4), again(dtype=torch.float16), again(tp_group=dist.group.WORLD), again(tp_size=0), again(dtype="fp16")]
    record(tp_size=2, dtype=torch.float16)
    for section, more in (({"autotp_size": 4}, {}), ({"tp": {"tp_size": 8}}, {}), ({"tp": 3}, {}), ({}, {"bf16": {"enabled": True}}), ({"dtype": "bf16"}, {})):
        found.append(merged({"tensor_parallel": section, **more}))
    found.append(merged({}, Mpu(4)))
    record(tp_size=2, tp_group=dist.group.WORLD)
    found += [merged({}, Mpu(2)), merged({"tensor_parallel": {"tp": {"tp_group": dist.new_group([0, 1])}}})]
    record(tp_size=1, tp_group=dist.group.WORLD)
    found.append(merged({}))
    say(found)
""")
        texts = ("across multiple calls: tp_size 2 and 4", "across multiple calls: dtype torch.float32 and torch.float16", "one of them has a tp_group",
                 "tp_size is 0", "dtype is 'fp16'", "Conflicting tensor_parallel.autotp_size in config (4) and tp_model_init (2)",
                 "Conflicting tensor_parallel.tp.tp_size in config (8) and tp_model_init (2)", "tensor_parallel.tp must be a dict when provided",
                 "config uses torch.bfloat16 but tp_model_init requested torch.float16",
                 "Conflicting tensor_parallel.dtype in config (bf16) and tp_model_init (torch.float16)",
                 "Conflicting tensor_parallel.autotp_size in config (2) and mpu (4)",
                 "tp_model_init provided tp_group; deepspeed.initialize must not receive mpu", "Conflicting tensor_parallel.tp.tp_group in config and tp_model_init",
                 "tp_size (1) does not match tp_group size (2)")
        for found in told:
            self.assertEqual(len(found), len(texts))
            for (*kinds, text), words in zip(found, texts):
                self.assertIn(words, text)
                self.assertIn("ValueError", kinds)

    def test_a_configuration_is_completed(self):
        told = self.told(2, """
    given = {"train_batch_size": 2, "tensor_parallel": {"preset_model": "llama", "tp": {"tp_grain_size": 8}}}
    record()
    found = [merged({"train_batch_size": 2}), merged({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2}}}), merged(given, Mpu(2, dist.group.WORLD)),
             merged({"tensor_parallel": {"autotp_size": 2, "tp": {"mpu": Mpu(2, dist.group.WORLD)}}}), merged({"train_batch_size": 2}, Mpu(1))]
    record(tp_size=2)
    found += [merged({"train_batch_size": 2}), merged(given), given]
    record(tp_size=2, tp_group=dist.group.WORLD)
    found += [merged({"tensor_parallel": {"autotp_size": "auto"}}), autotp.is_autotp_training_mode()]
    say(found)
""")
        asked = {"autotp_size": 2}
        given = {"train_batch_size": 2, "tensor_parallel": {"preset_model": "llama", "tp": {"tp_grain_size": 8}}}
        full = {"train_batch_size": 2, "tensor_parallel": {**given["tensor_parallel"], **asked}}
        for found in told:
            self.assertEqual(found, [{"train_batch_size": 2}, {"tensor_parallel": asked}, full, {"tensor_parallel": asked}, {"train_batch_size": 2},
                                     {"train_batch_size": 2, "tensor_parallel": asked}, full, given, {"tensor_parallel": asked}, True])

    def test_ranks_that_are_no_neighbours_are_refused_on_every_rank(self):
        told = self.told(4, """
    record()
    strided = [dist.new_group([0, 2]), dist.new_group([1, 3])][RANK % 2]
    near = [dist.new_group([0, 1]), dist.new_group([2, 3])][RANK // 2]
    asked = {"tensor_parallel": {"autotp_size": 2}}
    found = [merged(asked, Mpu(2, strided, RANK // 2)), merged(asked, Mpu(2, near)), merged(asked, Mpu(2, near, 1 - RANK % 2 if RANK == 2 else None)),
             merged({}, Mpu(2, near)), merged(asked, Mpu(2, near, sequence=2)), merged(asked, object()), merged(asked, Mpu(1)), merged(asked, Mpu(2))]
    record(tp_size=2, tp_group=strided)
    found.append(merged({}))
    say(found)
""")
        for rank, found in enumerate(told):
            near = [0, 1] if rank < 2 else [2, 3]
            texts = ["ranks of a tensor group are neighbours" if rank in (1, 2) else f"rank {rank} is in the tensor group of ranks {[rank % 2, rank % 2 + 2]}",
                     {"tensor_parallel": {"autotp_size": 2}},
                     "rank 2 is number 1 of its tensor group; here it is number 0" if rank == 2 else "another rank was given a tensor group, or an mpu, that does not fit",
                     {}, "sequence_parallel_size makes here",
                     "object has no get_tensor_model_parallel_world_size()", "Conflicting tensor_parallel.autotp_size in config (2) and mpu (1)",
                     "lacks a getter of the group or rank", f"with tensor_parallel.autotp_size=2 it is ranks {near}"]
            for one, words in zip(found, texts, strict=True):
                with self.subTest(rank=rank, words=words):
                    if isinstance(words, dict):
                        self.assertEqual(one, words)
                    else:
                        self.assertIn(words, one[-1])
                        self.assertIn("ConfigError", one)

    def test_initialize_takes_what_was_asked(self):
        told = self.told(2, """
    from deepspeed.pipe import PipelineModule
    record()
    asked, config = Mpu(2, dist.group.WORLD), {"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 4}}
    make = lambda **options: raised(lambda: deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config, **options))
    path = pathlib.Path(folder, f"config{RANK}.json")
    path.write_text(json.dumps(config))
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 2), config={"train_micro_batch_size_per_gpu": 2}, mpu=Mpu(1))
    pipeline = raised(lambda: deepspeed.initialize(model=PipelineModule([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], num_stages=2), config={"train_batch_size": 2}, mpu=Mpu(1)))
    say([make(mpu=asked)[-1], raised(lambda: deepspeed.initialize(model=torch.nn.Linear(2, 2), config=str(path), mpu=asked))[-1], make(mesh_param=(1, 2))[-1],
         [engine.autotp_size(), engine.mp_world_size, engine.get_tensor_parallel_rank(), engine.seq_dp_world_size], pipeline[-1]])
""")
        for found in told:
            self.assertIn("Conflicting tensor_parallel.autotp_size in config (4) and mpu (2)", found[0])
            self.assertEqual(found[0], found[1])
            self.assertIn("mesh_param=(1, 2)) is not there yet; leave it out, and set sequence_parallel_size", found[2])
            self.assertEqual(found[3], [0, 1, 0, 2])
            self.assertEqual(found[4], "mpu must be None with pipeline parallelism")

    def test_groups_of_ranks_that_share_layers_are_neighbours(self):
        told = self.told(4, """
    from deepspeed.utils import groups
    members = dist.get_process_group_ranks
    groups.set_degrees(1, 2)
    found = [members(groups.get_tensor_model_parallel_group()), groups.get_model_parallel_rank(), groups.get_tensor_model_parallel_world_size(),
             groups.get_tensor_model_parallel_src_rank(), members(groups.get_data_parallel_group()), groups.get_data_parallel_rank(),
             groups.get_data_parallel_world_size(), members(groups._get_sequence_data_parallel_group()), groups._get_sequence_parallel_world_size()]
    groups.set_degrees(2, 2)
    found += [members(groups._get_sequence_parallel_group()), groups._get_sequence_parallel_rank(), members(groups.get_data_parallel_group()),
              members(groups._get_sequence_data_parallel_group()), groups.bwc_tensor_model_parallel_world_size(Mpu(3)), groups.bwc_tensor_model_parallel_world_size()]
    say(found)
""")
        for rank, found in enumerate(told):
            place, others = rank % 2, [rank % 2, rank % 2 + 2]
            self.assertEqual(found, [[rank - place, rank - place + 1], place, 2, rank - place, others, rank // 2, 2, others, 1,
                                     others, rank // 2, [rank], others, 3, 1])


if __name__ == "__main__":
    main()
