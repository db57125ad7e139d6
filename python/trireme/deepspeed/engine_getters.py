"""More methods of an engine under DeepSpeed's names: options of the configuration, and the module's own state."""
import gc

import torch

from . import zero
from .runtime import sections
from .settings import DTYPES

# Methods that tell the value of a key of `zero_optimization`, or DeepSpeed's default. Many of these keys change nothing
# here, as docs/config.md says.
_ZERO = {f"zero_{key}": key for key in (
    "allgather_bucket_size", "allgather_partitions", "allgather_sequential", "compute_grad_norm", "contiguous_gradients", "elastic_checkpoint",
    "legacy_stage1", "load_from_fp32_weights", "log_trace_cache_warnings", "max_live_parameters", "max_reuse_distance",
    "model_persistence_threshold", "module_granularity_threshold", "overlap_comm", "param_persistence_threshold", "parameter_alignment",
    "prefetch_bucket_size", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients", "save_muon_momentum_buffer_in_memory",
    "sub_group_size")}
_ZERO |= {key: key for key in ("zero_hpz_partition_size", "zero_quantized_gradients", "zero_quantized_nontrainable_weights",
                               "zero_quantized_weights")}
_ZERO |= {"zero_multi_rank_bucket_allreduce": "use_multi_rank_bucket_allreduce", "is_sanity_checks_enabled": "enable_sanity_checks"}

# Methods that tell the value of a key of the top level: (key, DeepSpeed's default).
_TOP = {name: (name, default) for name, default in {
    "dataloader_drop_last": False, "dump_state": False, "gradient_predivide_factor": 1.0, "log_level": None, "memory_breakdown": False,
    "zero_force_ds_cpu_optimizer": True}.items()}

# Methods about features that are not there yet: a configuration can only have them off.
_OFF = dict.fromkeys(("autotuning_enabled", "checkpoint_writer_enabled", "compile_autosp", "compile_autotp", "curriculum_learning_enabled",
                      "data_efficiency_enabled", "data_sampling_enabled", "is_deepcompile_active",
                      "is_deepcompile_enabled", "optimizer_legacy_fusion", "random_ltd_enabled", "super_offload", "use_node_local_storage",
                      "uses_parallelization_pass_only", "fp16_master_weights_and_gradients", "zero_nvme_offload_optimizer", "load_universal_checkpoint"), False)
_OFF |= {"autotuning_end_profile_step": 5, "autotuning_metric": "throughput", "autotuning_profile_model_info": False,
         "autotuning_start_profile_step": 3, "curriculum_learning_config": {"enabled": False}, "zenflow_config": None}

# Methods flops_profiler_KEY, of the section's keys.
_FLOPS_PROFILER = ("enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed", "output_file")


class EngineGetters:
    """Methods of an engine that has `config`, `resolved_config` and `module`."""

    @property
    def zero_config(self):
        """The `zero_optimization` section as an object."""
        return sections.get_zero_config(self.config)

    def zero_offload_optimizer(self):
        """The section as an object; None: there is none."""
        return self.zero_config.offload_optimizer

    def zero_offload_param(self):
        """The section as an object; None: there is none."""
        return self.zero_config.offload_param

    def zero_partial_offload(self):
        """The part of the optimizer's states that is offloaded, of those that can be."""
        section = self.zero_offload_optimizer()
        return section.ratio if section is not None else 1.0

    def zero_use_cpu_optimizer(self):
        """Whether the optimizer's states are offloaded."""
        section = self.zero_offload_optimizer()
        return section is not None and section.device != sections.OffloadDeviceEnum.none

    def checkpoint_tag_validation_enabled(self):
        """Whether ranks compare the tags of checkpoints."""
        return self._section("checkpoint").get("tag_validation", "Warn").lower() != "ignore"

    def checkpoint_tag_validation_fail(self):
        """Whether tags that differ end a save."""
        return self._section("checkpoint").get("tag_validation", "Warn").lower() == "fail"

    def checkpoint_serialization_enabled(self):
        """True: checkpoints are files."""
        return True

    @property
    def communication_data_type(self):
        """The dtype in which gradients travel where the configuration names one, else that of the weights."""
        given = self.config.get("communication_data_type")
        return DTYPES[given] if given else self.get_data_types()[0]

    def bf16_master_weights_and_gradients(self):
        """Whether weights are updated in bf16 themselves, without fp32 masters."""
        return bool(self._section("bf16").get("bf16_master_weights_and_grads"))

    def bf16_optimizer_states(self):
        """Whether optimizer states are bf16."""
        return bool(self._section("bf16").get("bf16_optimizer_states"))

    def postscale_gradients(self):
        """Whether gradients are divided after they were summed."""
        return not self.config.get("prescale_gradients", False)

    def initial_dynamic_scale(self):
        """The first loss scale where it follows overflows."""
        return 2 ** sections.get_float16_config(self.config).initial_scale_power

    def dynamic_loss_scale_args(self):
        """How the loss scale follows overflows, by DeepSpeed's keys."""
        fp16 = sections.get_float16_config(self.config)
        return {"init_scale": 2 ** fp16.initial_scale_power, "scale_window": fp16.loss_scale_window, "delayed_shift": fp16.hysteresis,
                "consecutive_hysteresis": fp16.consecutive_hysteresis, "min_scale": fp16.min_loss_scale}

    def torch_autocast_lower_precision_safe_modules(self):
        """The classes, dotted, whose parameters travel in autocast's dtype."""
        from .runtime import torch_autocast  # which asks engines  # pylint: disable=import-outside-toplevel
        given = (self.config.get("torch_autocast") or {}).get("lower_precision_safe_modules")
        return given if given is not None else torch_autocast.get_default_autocast_lower_precision_modules()

    def get_wall_clock_timers(self):
        """With wall_clock_breakdown, of the last window: {"fwd", "bwd", "bwd_inner", "bwd_allreduce", "step": ms}."""
        times = self.core.step_times
        return dict(zip(("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"), times[1:], strict=True)) if times else {}

    def get_compile_time(self):
        """None of them: an empty list."""
        return []

    @staticmethod
    def is_map_style_dataset(obj):
        """Whether a data set has a length and indices."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj):
        """Whether a data set is one of torch's that are iterated over."""
        return isinstance(obj, torch.utils.data.IterableDataset)

    def is_first_weights_partition_group(self):
        """Whether this rank is in the first group of ranks that together hold all weights: at stage 3 all ranks are."""
        return self.zero_optimization_partition_weights()

    # --- the module's state, and gradients ---------------------------------------------------------------------------

    def module_state_dict(self, destination=None, prefix="", keep_vars=False, exclude_frozen_parameters=False):
        """The module's state_dict(), on request without frozen parameters. Where ranks share layers it has this rank's
        slices: _consolidated_16bit_state_dict() and save_16bit_model() have whole tensors."""
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(self, checkpoint, strict=True, custom_load_fn=None, fetch_z3_params=False, z3_params_to_fetch=None,
                               allowed_missing_keys=None):
        """Fills the module from checkpoint["module"]; rank 0's values become everybody's, masters follow. Collective.

        custom_load_fn        called as custom_load_fn(src=…, dst=module) in place of load_state_dict().
        allowed_missing_keys  names that may lack although `strict`.
        Raises  RuntimeError: names or shapes do not fit, as load_state_dict().
        """
        # pylint: disable=unused-argument
        state = checkpoint["module"]
        with zero.GatheredParameters(self.module, modifier_rank=0):
            if custom_load_fn is not None:
                custom_load_fn(src=state, dst=self.module)
                return
            present = {name: value for name, value in self.module.state_dict().items() if name in (allowed_missing_keys or ())}
            self.module.load_state_dict({**present, **state}, strict=strict)

    def allreduce_gradients(self, bucket_size=None):
        """Nothing: backward() has reduced them. Collective in DeepSpeed."""

    def buffered_allreduce_fallback(self, grads=None, elements_per_buffer=None):
        """Nothing, as allreduce_gradients()."""

    def clip_fp32_gradients(self):
        """Nothing: step() clips by `gradient_clipping`."""

    def autotp_size(self):
        """Ranks that share each layer, as the configuration says; 0: it says nothing."""
        return (self.config.get("tensor_parallel") or {}).get("autotp_size", 0)

    def collect_python_gc(self):
        """gc.collect()."""
        return gc.collect()


def _getter(read, doc):
    def get(self):
        return read(self)

    get.__doc__ = doc
    return get


for _name, _key in _ZERO.items():
    setattr(EngineGetters, _name, _getter(lambda self, key=_key: getattr(self.zero_config, key), f"zero_optimization.{_key}."))
for _name, (_key, _default) in _TOP.items():
    setattr(EngineGetters, _name, _getter(lambda self, key=_key, default=_default: self.config.get(key, default), f"{_key}."))
for _key in _FLOPS_PROFILER:
    setattr(EngineGetters, f"flops_profiler_{_key}", _getter(lambda self, key=_key: self.resolved_config["flops_profiler"][key], f"flops_profiler.{_key}."))
for _name, _value in _OFF.items():
    setattr(EngineGetters, _name, _getter(lambda self, value=_value: value, f"{_value}: not there yet."))
