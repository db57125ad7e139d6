"""DeepSpeed's modules and names: what is here works, what is not there yet is refused by name where it is used."""
import json

from harness import PROGRAM, Case, main, run

_CONFIG = """
    import os, torch
    import deepspeed

    def model():
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

    def config(stage=3, **zero):
        return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage, **zero},
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}

    def raised(function):
        try:
            function()
        except Exception as error:
            return [kind.__name__ for kind in type(error).__mro__] + [str(error)]
"""


class Names(Case):
    """Modules, constants, stubs."""

    def test_every_public_module_is_imported_and_disturbs_nothing(self):
        result = self.on_ranks(2, _CONFIG + """
    import importlib, json, pathlib, trireme
    table = json.loads(pathlib.Path(trireme.__file__).with_name("deepspeed").joinpath("deepspeed_names.json").read_text())
    failed = []
    for name in table:
        try:
            importlib.import_module(f"deepspeed.{name}".rstrip("."))
        except ImportError as error:
            failed.append(str(error))
    engine = deepspeed.initialize(model=model(), config=config())[0]
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    engine.save_checkpoint(folder)
    result = [len(table), failed, engine.global_steps]
""", as_deepspeed=True)
        self.assertGreater(result[0], 740)
        self.assertEqual(result[1:], [[], 1])

    def test_an_engine_does_without_torchs_compiler_whose_import_takes_a_second(self):
        result = self.on_ranks(1, _CONFIG + """
    import sys
    engine = deepspeed.initialize(model=model(), config=config())[0]
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    result = [engine.global_steps, "torch._dynamo" in sys.modules]
""", as_deepspeed=True)
        self.assertEqual(result, [1, False])

    def test_what_is_not_there_yet_is_refused_where_it_is_used_under_the_name_that_the_program_wrote(self):
        result = self.on_ranks(0, _CONFIG + """
    from deepspeed.runtime.zero.linear import LinearModuleForZeroStage3
    from deepspeed.moe.layer import MoE
    from deepspeed.autotuning.autotuner import Autotuner
    class Mine(MoE):
        pass
    result = [raised(use)[-1].partition(" ")[0] for use in (
        lambda: LinearModuleForZeroStage3(1, 2), lambda: MoE.forward, lambda: Mine(3),
        lambda: deepspeed.InferenceEngine(1), lambda: deepspeed.runtime.engine.MOELayer(1),
        lambda: deepspeed.comm.timed_op(print))]
    from deepspeed.elasticity import compute_elastic_config
    from deepspeed.runtime.zero import MiCS_Optimizer
    result += [raised(use)[-1].partition(" ")[0] for use in (
        lambda: compute_elastic_config(), lambda: MiCS_Optimizer(), lambda: deepspeed.runtime.eigenvalue.Eigenvalue())]
    result += [raised(lambda: Autotuner({}))[0], isinstance(torch.nn.Linear(1, 1), (MoE, deepspeed.PipelineModule))]
    result += [hasattr(module, "nonsense") for module in (deepspeed.comm, deepspeed.runtime.zero, deepspeed.moe.layer, deepspeed.ops.op_builder)]
    result += [raised(lambda: __import__("deepspeed.moe.layer.nonsense"))[0], raised(lambda: __import__("deepspeed.moe.nonsense"))[0]]
""", as_deepspeed=True)
        self.assertEqual(result, [
            "deepspeed.runtime.zero.linear.LinearModuleForZeroStage3",
            "deepspeed.moe.layer.MoE.forward", "deepspeed.moe.layer.MoE", "deepspeed.InferenceEngine",
            "deepspeed.runtime.engine.MOELayer", "deepspeed.comm.timed_op",
            "deepspeed.elasticity.compute_elastic_config", "deepspeed.zero.MiCS_Optimizer", "deepspeed.runtime.eigenvalue.Eigenvalue", "UnsupportedError",
            False, False, False, False, False, "ModuleNotFoundError", "ModuleNotFoundError"])

    def test_a_module_that_has_one_name_here_refuses_its_others(self):
        result = self.on_ranks(0, _CONFIG + """
    from deepspeed.compile.passes.sp_compile import apply_autosp, prepare_autosp_inputs
    import deepspeed.compile.init_sp
    result = [raised(use)[-1].partition(" ")[0] for use in (lambda: apply_autosp(1), lambda: deepspeed.compile.init_sp.apply_autosp(1))]
""", as_deepspeed=True)
        self.assertEqual(result, ["deepspeed.autosp.apply_autosp", "deepspeed.compile.init_sp.apply_autosp"])

    def test_constants_have_their_values_wherever_deepspeed_has_them(self):
        result = self.on_ranks(0, """
    from deepspeed.runtime.constants import *
    from deepspeed.runtime.lr_schedules import WARMUP_MIN_LR, WARMUP_LR, TOTAL_NUM_STEPS, CYCLE_MAX_MOM
    from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout
    from deepspeed.comm.constants import NCCL_BACKEND
    from deepspeed.runtime.config import ADAM_OPTIMIZER, STEPS_PER_PRINT
    from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
    import deepspeed.runtime.engine
    result = [TRAIN_BATCH_SIZE, GRADIENT_CLIPPING_DEFAULT, ROUTE_TRAIN, WARMUP_MIN_LR, WARMUP_LR, TOTAL_NUM_STEPS, CYCLE_MAX_MOM,
              TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout.total_seconds(), NCCL_BACKEND, ADAM_OPTIMIZER, STEPS_PER_PRINT,
              OPTIMIZER_STATE_DICT, deepspeed.runtime.engine.ROUTE_PREDICT, CHECKPOINT_TAG_VALIDATION_MODES]
""", as_deepspeed=True)
        self.assertEqual(result, ["train_batch_size", 1.0, "train", "warmup_min_lr", "WarmupLR", "total_num_steps", "cycle_max_mom", 29500, 1800,
                                  "nccl", "adam", "steps_per_print", "optimizer_state_dict", "predict", ["WARN", "IGNORE", "FAIL"]])

    def test_versions_builders_and_the_accelerator_answer(self):
        result = self.on_ranks(0, _CONFIG + """
    import deepspeed.git_version_info as info
    from deepspeed.ops.op_builder import CPUAdamBuilder, AsyncIOBuilder, OpBuilder
    from deepspeed.ops.op_builder.cpu_adam import CPUAdamBuilder as same
    from deepspeed.ops.op_builder.all_ops import ALL_OPS
    from deepspeed.utils.nvtx import instrument_w_nvtx
    import deepspeed.utils.init_on_device
    accelerator = deepspeed.get_accelerator()
    made = accelerator.create_op_builder("FusedLambBuilder")
    environment = {}
    accelerator.set_visible_devices_envs(environment, [1, 2])
    accelerator.set_compile_backend("eager")
    result = {
        "versions": [deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__, deepspeed.__git_hash__, info.version,
                     info.git_branch, info.installed_ops["cpu_adam"], info.accelerator_name],
        "builders": [CPUAdamBuilder().is_compatible(), AsyncIOBuilder().is_compatible(), CPUAdamBuilder().name, AsyncIOBuilder().name,
                     same is CPUAdamBuilder, issubclass(same, OpBuilder), sorted(ALL_OPS), type(made).__name__, made.is_compatible(),
                     accelerator.get_op_builder("NonsenseBuilder").__name__],
        "load": [raised(lambda: builder().load())[-1] for builder in (CPUAdamBuilder, AsyncIOBuilder)],
        "accelerator": [environment, accelerator.get_compile_backend(), raised(lambda: accelerator.set_compile_backend("zzz"))[0],
                        list(accelerator.pin_empty(3, dtype=torch.float32).shape), accelerator.supports_nvtx_domain],
        "nvtx": instrument_w_nvtx(abs)(-1)}
""", as_deepspeed=True, environment={"TRIREME_DEVICE": "cpu"})
        self.assertEqual(result["versions"], [0, 19, 8, "unknown", "0.19.8", "unknown", True, "cpu"])
        self.assertEqual(result["builders"], [True, False, "cpu_adam", "async_io", True, True,
                                              ["cpu_adagrad", "cpu_adam", "cpu_lion", "fused_adam", "fused_lamb", "fused_lion"],
                                              "FusedLambBuilder", True, "NotImplementedBuilder"])
        self.assertIn("CPUAdamBuilder.load(): Trireme compiles no operators; use deepspeed.ops.adam.DeepSpeedCPUAdam", result["load"][0])
        self.assertIn("AsyncIOBuilder.load()", result["load"][1])
        self.assertEqual(result["accelerator"], [{"CUDA_VISIBLE_DEVICES": "1,2"}, "eager", "ValueError", [3], False])
        self.assertEqual(result["nvtx"], 1)

    def test_comm_has_what_torch_has_not(self):
        result = self.on_ranks(2, _CONFIG + """
    from deepspeed import comm
    deepspeed.init_distributed()
    rank = comm.get_rank()
    ones = torch.ones(2)
    mine, halves, both = torch.full((2,), rank + 1.0), torch.zeros(1), [torch.zeros(4), torch.zeros(2)]
    comm.all_gather_coalesced(both, [mine, mine[:1].contiguous()])
    comm.reduce_scatter_fn(halves, mine)
    gathered = torch.zeros(4)
    comm.allgather_fn(gathered, mine)
    mesh = comm.initialize_mesh_device((2,), ("data_parallel",))
    result = [comm.inference_all_reduce(ones).tolist(), [t.tolist() for t in both], halves.item(), gathered.tolist(), mesh.mesh_dim_names,
              comm.get_world_size(comm.get_world_group()), comm.get_all_ranks_from_group(), comm.get_global_rank(comm.get_world_group(), 1),
              comm.log_summary(return_dict=True)["summary"], comm.has_comm_data(), comm.get_comm_operation_count(), comm.get_logged_comm_ops(),
              comm.has_all_gather_into_tensor(), raised(lambda: comm.configure(prof_ops="all"))[0], comm.configure(enabled=False)]
""", as_deepspeed=True)
        self.assertEqual(result, [[2, 2], [[1, 1, 2, 2], [1, 2]], 3, [1, 1, 2, 2], ["data_parallel"], 2, [0, 1], 1, {}, False, 0, [], True,
                                  "ConfigError", None])

    def test_checkpoints_files_have_deepspeeds_names(self):
        result = self.on_ranks(0, _CONFIG + """
    import pathlib
    from deepspeed.checkpoint.utils import get_model_ckpt_name_for_rank, get_zero_ckpt_name_for_rank, get_layer_ckpt_name_for_rank
    from deepspeed.utils.zero_to_fp32 import get_optim_files, get_model_state_files, get_model_state_file, get_checkpoint_files, natural_keys
    result = [get_model_ckpt_name_for_rank("base", "00"), get_zero_ckpt_name_for_rank("base", 3, 1), get_layer_ckpt_name_for_rank("base", 4, 2)]
    for rank in (0, 10, 2):
        pathlib.Path(get_zero_ckpt_name_for_rank(folder, rank, 0)).touch()
    pathlib.Path(get_model_ckpt_name_for_rank(folder, "00")).touch()
    result += [[os.path.basename(path) for path in get_optim_files(folder) + get_model_state_files(folder) + [get_model_state_file(folder, 2)]],
               natural_keys("a10b2"), raised(lambda: get_model_state_file(folder, 3))[0], raised(lambda: get_model_state_file(folder + "x", 2))[-1],
               raised(lambda: get_checkpoint_files(folder, "*.zz"))[0]]
""", as_deepspeed=True)
        optimizers = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 2, 10)]
        self.assertEqual(result[:3], ["base/mp_rank_00_model_states.pt", "base/zero_pp_rank_3_mp_rank_01_optim_states.pt",
                                      "base/4-model_02_model_states.pt"])
        self.assertEqual(result[3], optimizers + ["mp_rank_00_model_states.pt"] * 2)
        self.assertEqual(result[4:6] + result[7:], [["a", 10, "b", 2, ""], "FileNotFoundError", "FileNotFoundError"])
        self.assertRegex(result[6], "^Directory '.*x' doesn't exist$")


class Engines(Case):
    """Names that programs ask of an engine."""

    def test_its_getters_tell_the_configuration_or_deepspeeds_defaults(self):
        result = self.on_ranks(0, _CONFIG + """
    engine = deepspeed.initialize(model=model(), config={**config(2, reduce_bucket_size=1000, overlap_comm=1, stage3_max_reuse_distance=5e8),
                                                         "prescale_gradients": 0, "checkpoint": {"tag_validation": "Fail"}})[0]
    result = [engine.zero_reduce_bucket_size(), engine.zero_overlap_comm(), engine.zero_max_reuse_distance(), engine.zero_allgather_bucket_size(),
              engine.zero_sub_group_size(), engine.zero_param_persistence_threshold(), engine.zero_offload_param(), engine.zero_use_cpu_optimizer(),
              engine.zero_partial_offload(), engine.checkpoint_tag_validation_enabled(), engine.checkpoint_tag_validation_fail(),
              engine.postscale_gradients(), str(engine.communication_data_type), engine.initial_dynamic_scale(),
              engine.dynamic_loss_scale_args()["scale_window"], engine.curriculum_learning_enabled(), engine.autotp_size(), engine.dump_state(),
              engine.zero_config.stage, engine.get_wall_clock_timers(), engine.is_map_style_dataset([1]),
              engine.torch_autocast_lower_precision_safe_modules()[0], engine.zero_quantized_weights(), engine.flops_profiler_top_modules()]
""", as_deepspeed=True)
        self.assertEqual(result, [1000, True, 500_000_000, 500_000_000, 1_000_000_000, 100_000, None, False, 1.0, True, True, True,
                                  "torch.float32", 65536, 1000, False, 0, False, 2, {}, True, "torch.nn.modules.linear.Linear", False, 1])

    def test_module_state_dicts_are_taken_and_loaded_at_every_stage(self):
        result = self.on_ranks(2, _CONFIG + """
    result = []
    for stage in (0, 3):
        net = model()
        net[0].bias.requires_grad_(False)
        engine = deepspeed.initialize(model=net, config=config(stage))[0]
        names = list(engine.module_state_dict(prefix="net.", exclude_frozen_parameters=True))
        other = {name: torch.full_like(value, 2 + engine.global_rank) for name, value in model().state_dict().items()}
        other["0.bias"] = other["0.bias"] * 4
        engine.load_module_state_dict({"module": other})
        loaded = [deepspeed.utils.safe_get_full_fp32_param(net[2].weight).unique().tolist()]
        with deepspeed.zero.GatheredParameters(net):
            loaded.append(net[0].bias.unique().tolist())
        bad = raised(lambda: engine.load_module_state_dict({"module": {}}))[0]
        engine.load_module_state_dict({"module": {"2.bias": torch.full((1,), 7.0)}}, strict=False)
        loaded.append(deepspeed.utils.safe_get_full_fp32_param(net[2].bias).tolist())
        x = torch.ones(2, 4)
        engine.backward(engine(x).sum())
        engine.allreduce_gradients()
        gradient = deepspeed.utils.safe_get_full_grad(net[2].bias).tolist()
        engine.step()
        result.append([names, loaded, bad, gradient, deepspeed.utils.safe_get_full_fp32_param(net[2].bias).item()])
        engine.destroy()
""", as_deepspeed=True)
        for names, loaded, bad, gradient, stepped in result:
            self.assertEqual(names, ["net.0.weight", "net.1.weight", "net.1.bias", "net.1.running_mean", "net.1.running_var",
                                     "net.1.num_batches_tracked", "net.2.weight", "net.2.bias"])
            self.assertEqual(loaded, [[2], [8], [7]])
            self.assertEqual([bad, gradient], ["RuntimeError", [2]])
            self.assertLess(stepped, 7)


    def test_loaders_are_shuffled_parts_for_training_and_everything_in_order_for_evaluation(self):
        result = self.on_ranks(2, _CONFIG + """
    engine = deepspeed.initialize(model=model(), config=config())[0]
    numbers = list(range(8))
    found = [[batch.tolist() for batch in engine.deepspeed_io(numbers, route=route, pin_memory=True)] for route in ("train", "eval")]
    result = [sum(map(len, found[0])), found[1], [len(batch) for batch in engine.deepspeed_io(numbers, 4, "predict", False, None, list)]]
""", as_deepspeed=True)
        self.assertEqual(result, [4, [[0, 1], [2, 3], [4, 5], [6, 7]], [4, 4]])

    def test_a_smaller_last_batch_is_dropped_where_the_configuration_says_so_and_epochs_are_the_programs(self):
        result = self.on_ranks(2, _CONFIG + """
    result = []
    for drops in (False, True):
        engine = deepspeed.initialize(model=model(), config=dict(config(), dataloader_drop_last=drops))[0]
        loader = engine.deepspeed_io(list(range(10)), 2)
        orders = []
        for epoch in (0, 0, 1):
            loader.data_sampler.set_epoch(epoch)
            orders.append([batch.tolist() for batch in loader])
        result.append([[len(batch) for batch in orders[0]], len(loader), orders[0] == orders[1], orders[1] == orders[2]])
""", as_deepspeed=True)
        self.assertEqual(result, [[[2, 2, 1], 3, True, False], [[2, 2], 2, True, False]])


class Configurations(Case):
    """Files and objects."""

    def test_files_may_be_hjson_and_booleans_may_be_numbers(self):
        path = self.write("ds.hjson", """
            # comments, keys and texts without quotes, trailing commas
            train_micro_batch_size_per_gpu: 2
            bf16: {enabled: 1, check_grad_overflow: 0}
            optimizer: {
              type: AdamW
              "params": {"lr": 1e-3, "betas": [0.9, 0.95,],},
            }
            zero_optimization: {'stage': 3, ignore_unused_parameters: 0}
        """)
        result = self.on_ranks(0, f"""
    import base64, deepspeed, torch
    path = {str(path)!r}
    result = []
    for config in (path, base64.urlsafe_b64encode(open(path, "rb").read()).decode()):
        engine = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)[0]
        result.append([engine.bfloat16_enabled(), engine.zero_optimization_stage(), engine.optimizer_name(), engine.get_mom()[0],
                       engine.zero_ignore_unused_parameters()])
        engine.destroy()
""", as_deepspeed=True)
        self.assertEqual(result, [[True, 3, "adamw", [0.9, 0.95], False]] * 2)
        status, out, err = run([PROGRAM, "config", "check", path])
        self.assertEqual(status, 0, err)
        self.assertEqual(json.loads(out)["zero_optimization"]["stage"], 3)

    def test_sections_are_objects_with_deepspeeds_defaults(self):
        result = self.on_ranks(0, _CONFIG + """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum
    from deepspeed.runtime.zero.offload_config import (DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig, OffloadDeviceEnum,
                                                       OffloadStateTypeEnum)
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    zero = DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=7, reduce_bucket_size=5e8, contiguous_gradients=0, overlap_comm="auto",
                               offload_param={"device": "cpu"}, offload_optimizer=DeepSpeedZeroOffloadOptimizerConfig(device="nvme", nvme_path="/x"))
    section = DeepSpeedZeroConfig(stage=1, offload_optimizer=DeepSpeedZeroOffloadOptimizerConfig(device=OffloadDeviceEnum.none, ratio=1))
    engine = deepspeed.initialize(model=model(), config={**config(), "zero_optimization": section, "bf16": DeepSpeedBF16Config(enabled=True)})[0]
    read = deepspeed.DeepSpeedConfig({**config(2, cpu_offload=False), "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}})
    result = {
        "zero": [zero.stage == 3, zero.stage is ZeroStageEnum.weights, zero.prefetch_bucket_size, zero.reduce_bucket_size, zero.contiguous_gradients,
                 zero.overlap_comm, zero.offload_param.device is OffloadDeviceEnum.cpu, zero.offload_param.buffer_count, zero.offload_param.pin_memory,
                 str(zero.offload_optimizer.nvme_path), zero.offload_optimizer.ratio, zero == DeepSpeedZeroConfig(stage=3), zero.zenflow],
        "enums": [[state.value for state in OffloadStateTypeEnum], OffloadDeviceEnum("cpu") == "cpu", OffloadStateTypeEnum.hp_params.name],
        "errors": [raised(lambda: DeepSpeedZeroConfig(**wrong)) for wrong in (
            {"bogus": 1}, {"stage": 7}, {"reduce_bucket_size": 1.5}, {"reduce_scatter": "yes"}, {"offload_param": {"device": "tape"}})],
        "engine": [engine.zero_optimization_stage(), engine.bfloat16_enabled(), engine.zero_offload_optimizer().device.value, engine.zero_cpu_offload()],
        "config": [read.zero_config.stage, read.zero_config.offload_optimizer, read.optimizer_name, read.optimizer_params, read.scheduler_name,
                   read.bfloat16_config.enabled, read.float16_config.initial_scale_power, read.wall_clock_breakdown, read.gradient_predivide_factor,
                   read.train_batch_size, read.managed_gradient_accumulation],
        "refused": raised(lambda: deepspeed.initialize(model=model(), config={**config(), "zero_optimization": DeepSpeedZeroConfig(
            stage=3, zenflow={"topk_ratio": 0.1})}))[0]}
    engine.offload_states(include=[OffloadStateTypeEnum.optim_states], device=OffloadDeviceEnum.cpu)
""", as_deepspeed=True)
        self.assertEqual(result["zero"], [True, True, 7, 500_000_000, False, True, True, 5, True, "/x", 1.0, False, None])
        self.assertEqual(result["enums"], [["optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer"], True, "hp_params"])
        for (*kinds, text), part in zip(result["errors"], ("there is no key `bogus`", "`stage` is 7; expected ZeroStageEnum",
                                                           "`reduce_bucket_size` is 1.5; expected int", "`reduce_scatter` is 'yes'; expected bool",
                                                           "DeepSpeedZeroOffloadParamConfig: `device` is 'tape'; expected OffloadDeviceEnum")):
            self.assertIn("ValueError", kinds)
            self.assertIn(part, text)
        self.assertEqual(result["engine"], [1, True, "none", False])
        self.assertEqual(result["config"], [2, None, "sgd", {"lr": 0.1}, "WarmupLR", False, 16, False, 1.0, 2, True])
        self.assertEqual(result["refused"], "UnsupportedError")


if __name__ == "__main__":
    main()
