"""Members of DeepSpeed's engine that this package's engine does not have, and what a program does instead.

An engine answers for its module's attributes too. Without this table an error would name the program's own class as
what lacks the member. A member that the engine gets is taken out of the table; tests/python/missing_members_test.py
says so.
"""

# Advice, and the members that it is for.
_INSTEAD = {
    "engine.backward() returns the loss, and engine.monitor is told of it": "losses",
    "engine.timers has the times of a window where wall_clock_breakdown is on, and engine.tput_timer samples per second": """
        engine_timers engine_timers_cache fwd_duration print_forward_breakdown""",
    "engine.flops_profiler counts them where the configuration's section flops_profiler is on": "flops",
    "there is no autotuning": "autotuning_metric_path autotuning_model_info autotuning_model_info_path",
    "read the key in engine.config, which is as it was given, or in engine.resolved_config, where every option is spelled out": """
        aio_config cpuadam_cores_perc get_optimizer_configuration swap_tensor_config""",
    "the dataset is the program's own; engine.training_dataloader is the loader that initialize() made of it": """
        collate_fn first_dataloader_check set_data_post_process_func training_data""",
    "there is no curriculum, sampling by difficulty or random layer-token drop": """
        data_efficiency_config data_sampling_config random_ltd_config random_ltd_initialize random_ltd_scheduler
        set_custom_curriculum_learning_schedule""",
    "the groups of ranks are functions of trireme.utils.groups": """
        all_to_all_group checkpoint_mp_rank data_parallel_group dist_backend expert_data_parallel_group
        expert_parallel_group loaded_checkpoint_mp_world_size local_all_to_all_group mesh_device mpu
        pipeline_parallelism seq_data_parallel_group
        tensor_parallel_config use_ds_comm""",
    "the library reduces gradients by itself; engine.no_sync() and engine.coalesce_grad_reduction() say when": """
        all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_no_retain enable_backward_allreduce flatten
        gradient_average inside_no_sync_ctxt scale_wrt_gas sparse_all_gather sparse_allreduce sparse_allreduce_bucket
        sparse_allreduce_no_retain torch_autocast_z0_gradscaler unflatten warn_unscaled_loss""",
    "engine.optimizer is what initialize() returned, engine.client_optimizer the program's own": "basic_optimizer update_interval",
    "name parameters by engine.module.named_parameters()": "param_names",
    "engine.compile() is torch.compile(); there are no passes of DeepCompile": """
        compile_zero_optimization_stage get_autosp_backend get_autotp_backend get_deepcompile_backend
        get_deepspeed_compile_backend register_compile_pass""",
    "there are no layers of experts": "gate_modules has_moe_layers load_moe_state_dict moe_layers num_experts",
    "save_checkpoint() and load_checkpoint() write and read at any number of ranks; `trireme convert` reads and writes DeepSpeed's files": """
        checkpoint_engine save_non_zero_checkpoint save_zero_checkpoint""",
    "the engine's forward() has no hooks of its own; register yours on engine.module": "module_forward_post_hook module_forward_pre_hook",
    "parameters and the model's device are left as they are": "dont_change_device",
    "LoRA layers are those of the program or of PEFT": "optimized_linear_base_weight_sharding optimized_linear_lora_enabled",
}

INSTEAD = {name: instead for instead, names in _INSTEAD.items() for name in names.split()}


def error(name, module):
    """The AttributeError for `name`, which neither an engine nor its `module` has."""
    if name in INSTEAD:
        return AttributeError(f"DeepSpeedEngine.{name} is not there in Trireme: {INSTEAD[name]}")
    return AttributeError(f"neither the engine nor its module, {type(module).__name__}, has an attribute '{name}'")
