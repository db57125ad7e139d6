"""DeepSpeedEngine: an Engine behind the attributes and methods that DeepSpeed's programs use."""
import numbers
import operator
from collections.abc import Mapping

import torch

from .. import config as configs
from .._native import core
from ..engine import Engine
from ..errors import ConfigError, UnsupportedError
from ..log import logger
from ..training import schedules
from ..training.optimizer_copy import fill
from . import autosp, autotp, missing_members
from .engine_getters import EngineGetters
from .monitor import of_engine as monitors
from .optimizer_kinds import engine_optimizer
from .profiling.flops_profiler import step_profile
from .runtime import lr_schedules
from .settings import EngineSettings
from .utils import groups as groups_of_ranks, timer
from .utils.config import DeepSpeedThroughputTimerConfig
from .utils.leaf_modules import set_z3_leaf_module


class DeepSpeedEngine(EngineSettings, EngineGetters, Engine):
    """Trains `module` over the ranks of the job. Made by initialize(); methods have DeepSpeed's names and meanings.

    What says collective is called by all ranks in the same order. Errors are those of trireme.errors.
    """

    # pylint: disable=too-many-public-methods

    _topology = None  # of a pipeline
    _reports_flops = True
    _attach_profile = step_profile.attach
    flops_profiler = None  # a FlopsProfiler, where the configuration's section is on

    def __init__(self, model, config, *, mpu=None, **options):
        origin, given = configs.origin_of(config), config if isinstance(config, dict) else configs.read(config)
        merged, slices = autotp.merged(given, mpu)
        if slices > 1:
            self._program_slices = slices
        self._given = configs.without_auto(configs.read(merged))
        configs.check_filled(self._given, origin)
        super().__init__(model, self._given, origin=origin, prepare=lambda: monitors.open_for(self), **options)
        for name in self.core.leaf_modules:
            set_z3_leaf_module(model.get_submodule(name), True)
        groups_of_ranks.set_degrees(self._sequence_size, self.mp_world_size, self._topology)
        self.training_dataloader = None
        self.timers = timer.SynchronizedWallClockTimer()
        # The host's time: a step waits for no device.
        self.tput_timer = timer.ThroughputTimer(DeepSpeedThroughputTimerConfig(synchronized=False), self.train_batch_size())
        if self.flops_profiler_enabled():
            self._attach_profile()

    def forward(self, *inputs, **kwargs):
        """The module's forward(), under autocast and with cast inputs where the configuration says so."""
        if self.training:
            self.tput_timer.start()
        return super().forward(*inputs, **kwargs)

    def step(self, lr_kwargs=None):
        """At the end of an accumulation window updates the weights and advances the schedule; before it only counts.
        Collective. Waits for no device, unless the program's own scheduler must know whether the step was applied."""
        super().step(lr_kwargs)
        self.tput_timer.stop()  # of a micro-batch within a window

    def _follow_step(self, applied, lr_kwargs=None):
        super()._follow_step(applied, lr_kwargs)
        self.tput_timer.stop(global_step=True)
        if self._resolved["wall_clock_breakdown"]:
            for name, ms in self.get_wall_clock_timers().items():
                self.timers(name).add(ms)
        if self.monitor.enabled:
            monitors.tell_of_step(self)

    def _library_config(self, config):
        """With the modules that set_z3_leaf_modules() has marked."""
        marked = [name for name, module in self.module.named_modules() if getattr(module, "_z3_leaf", False)]
        if not marked:
            return config
        section = dict(config.get("zero_optimization") or {})
        leaves = dict(section.get("leaf_module") or {})
        leaves["names"] = list(leaves.get("names", [])) + marked
        return {**config, "zero_optimization": {**section, "leaf_module": leaves}}

    def _engine_optimizer(self, groups, client):
        return engine_optimizer(self, groups, client)

    def _schedule_type(self, kind):
        """For isinstance() one of lr_schedules, where there is such."""
        like = (getattr(lr_schedules, kind),) if kind in lr_schedules.VALID_LR_SCHEDULES else ()
        return type(kind, (schedules.EngineSchedule, *like), {"__doc__": schedules.EngineSchedule.__doc__, "__module__": __name__})

    def _own_tokens(self, inputs, kwargs):
        return super()._own_tokens(*autosp.cut(self.core, self.module, inputs, kwargs))

    def _no_member(self, name):
        return missing_members.error(name, self.module)

    def cut(self, input_ids, labels=None, position_ids=None, attention_mask=None, dim=1, **others):
        """This rank's tokens of a batch that its sequence group has whole, as keyword arguments of forward().

        The model computes attention and losses of all tokens then. Tensors [B, S] as they are where samples are not
        cut; `others` are more of them, one number for each token, such as token_type_ids.
        Raises  ShapeError: fewer than two tokens for some rank. StateError, on every rank: the ranks of a sequence have
                other batches. ConfigError: the batch itself, not its tensors.
        """
        if isinstance(input_ids, Mapping):
            raise ConfigError("cut: input_ids is a batch of several tensors; pass them by their names: engine.cut(**batch)")
        names = ("input_ids", "labels", "position_ids", "attention_mask")
        parts = self.core.cut(input_ids, labels, position_ids, attention_mask, dim)
        other_parts = {name: self.core.cut(tensor, None, None, None, dim)[0] for name, tensor in others.items()}
        return {**{name: part for name, part in zip(names, parts) if part is not None}, **other_parts}

    def coalesce_grad_reduction(self):
        """As no_sync(), but its end reduces, once. Collective."""
        return self.core.coalesce_grad_reduction()

    def set_gradient_accumulation_boundary(self, is_boundary):
        """From here on `is_boundary` says that, not the count."""
        self.core.set_gradient_accumulation_boundary(is_boundary)

    # --- numbers -----------------------------------------------------------------------------------------------------

    def get_lr(self):
        """Learning rates of the next step, by parameter group."""
        return self.optimizer.rates()

    def set_lr(self, lr):
        """For the next step, in every group; every rank alike. Raises ConfigError: no number >= 0."""
        if isinstance(lr, bool) or not isinstance(lr, numbers.Real) or not lr >= 0:
            raise ConfigError(f"set_lr: {lr!r} is no learning rate; use one number >= 0, or param_groups for one each")
        for group in self.optimizer.param_groups:
            fill(group, "lr", lr)

    def get_mom(self):
        """(beta1, beta2) or (momentum, 0), by parameter group."""
        return self.optimizer.momenta()

    def get_type(self):
        """The optimizer's name, by parameter group."""
        kind = self._resolved["optimizer"]["type"] if self.client_steps is None else type(self.client_optimizer).__name__
        return [kind] * len(self.optimizer.param_groups)

    def get_batch_info(self):
        """(train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size):
        """By the accumulation steps. Raises BatchSizeError: not a multiple of micro-batch times ranks."""
        self.core.set_train_batch_size(train_batch_size)
        self.tput_timer.batch_size = self.train_batch_size()

    def set_train_micro_batch_size(self, micro_batch_size):
        """And train_batch_size with it."""
        self.core.set_train_micro_batch_size(micro_batch_size)
        self.tput_timer.batch_size = self.train_batch_size()

    global_rank = property(lambda self: self.world.rank)
    local_rank = property(lambda self: self.world.local_rank)
    world_size = property(lambda self: self.world.size)
    dp_world_size = property(lambda self: self.core.data_size, doc="Ranks, or groups of ranks, that take different samples.")
    seq_dp_world_size = property(lambda self: self.dp_world_size * self._sequence_size, doc="Ranks over which ZeRO shards.")
    sequence_parallel_size = property(lambda self: self._sequence_size, doc="Ranks that share samples.")
    loaded_checkpoint_dp_world_size = property(lambda self: self.loaded_data_size)
    seq_parallel_group = property(lambda self: self.get_sequence_parallel_group())
    _dp_rank = property(lambda self: self.core.data_rank)
    _drops_last = property(lambda self: bool(self._given.get("dataloader_drop_last")), doc="The last micro-batch of a data set, where it is smaller.")
    mp_world_size = property(lambda self: self._tensor_size * self._program_slices, doc="Ranks that share each layer.")
    config = property(lambda self: self._given)

    def zero_optimization_stage(self):
        """0 to 3."""
        return self._resolved["zero_optimization"]["stage"]

    def zero_optimization(self):
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_weights(self):
        """Whether weights are."""
        return self.zero_optimization_stage() >= 3

    def bfloat16_enabled(self):
        """Whether weights are bf16."""
        return bool(self._resolved["bf16"]["enabled"])

    def fp16_enabled(self):
        """Whether weights are fp16."""
        return bool(self._resolved["fp16"]["enabled"])

    def gradient_clipping(self):
        """The largest global norm; 0 is none."""
        return self._resolved["gradient_clipping"]

    def steps_per_print(self):
        """Steps between two progress lines."""
        return self._resolved["steps_per_print"]

    def zero_gather_16bit_weights_on_model_save(self):
        """Whether weights are gathered for a model file at stage 3: they are unless the configuration says no."""
        zero = self._given.get("zero_optimization") or {}
        return bool(zero.get("stage3_gather_16bit_weights_on_model_save", zero.get("gather_16bit_weights_on_model_save", True)))

    # --- the rest ----------------------------------------------------------------------------------------------------

    def deepspeed_io(self, dataset, batch_size=None, route="train", pin_memory=True, data_sampler=None, collate_fn=None, num_local_io_workers=None):
        """A DataLoader over `dataset`, in micro-batches: this rank's part, shuffled, in one order unless the program
        calls data_sampler.set_epoch() of it; with `route` "eval" or "predict" all, in order."""
        if data_sampler is None and route == "train":
            data_sampler = torch.utils.data.DistributedSampler(dataset, self.dp_world_size, self._dp_rank)
        loader = torch.utils.data.DataLoader(dataset, batch_size=batch_size or self.train_micro_batch_size_per_gpu(), sampler=data_sampler,
                                             collate_fn=collate_fn, num_workers=num_local_io_workers or 0, drop_last=self._drops_last,
                                             pin_memory=pin_memory and self.device.type != "cpu")
        loader.data_sampler = loader.sampler  # DeepSpeed's name
        return loader

    def take_training_data(self, dataset, collate_fn):
        """initialize()'s training_data: `training_dataloader` is its DataLoader from here on."""
        self.training_dataloader = self.deepspeed_io(dataset, collate_fn=collate_fn)

    def compile(self, backend="inductor", compile_kwargs=None, schedule=None, compiled_autograd_enabled=False):
        """Compiles the module's forward() by torch.compile(), once; leaves it eager where samples or layers are cut.
        Raises UnsupportedError: a schedule, compiled autograd."""
        if schedule is not None or compiled_autograd_enabled:
            raise UnsupportedError("compile(schedule=…, compiled_autograd_enabled=…) is not there yet; leave it out")
        if self._cut_by:
            logger.info("compile: sequence and tensor parallelism work on the operators of an eager model, which is left so")
        elif not self.is_compiled:
            self.module.compile(backend=backend, **(compile_kwargs or {}))

    def empty_partition_cache(self):
        """Drops what is gathered (stage 3). Every rank alike."""
        self.core.empty_partition_cache()

    def offload_states(self, include=None, device="cpu", pin_memory=True, non_blocking=False):
        """Accepted: every state is in host memory already."""
        names = [getattr(state, "value", state) for state in include or ()]
        self.core.offload_states(names, str(getattr(device, "value", device)))

    def reload_states(self, non_blocking=False):
        """The reverse of offload_states()."""
        self.core.reload_states()

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters=False):
        """The whole state dict on rank 0, None elsewhere. Collective.

        Raises  UnsupportedError: the program has cut its layers itself.
        """
        if self._program_slices > 1:
            raise UnsupportedError("_zero3_consolidated_16bit_state_dict: the program has cut its layers itself, over the axis \"model\", so what their whole is "
                                   "it alone knows; save_checkpoint() keeps the slices of each rank, and module.state_dict() has this rank's")
        result = {} if self.world.rank == 0 else None
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if exclude_frozen_parameters and isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad:
                continue
            whole = core.whole_tensor(tensor)
            if result is not None:
                result[name] = whole
        return result

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict


def _getter(name, is_method, doc):
    """A member that tells what the core's of that name does."""
    read = operator.attrgetter(f"core.{name}")
    if not is_method:
        return property(read, doc=doc)

    def get(self):
        return read(self)()

    get.__name__, get.__qualname__, get.__doc__ = name, f"DeepSpeedEngine.{name}", doc
    return get


for _name, _is_method, _doc in core.ENGINE_GETTERS:
    setattr(DeepSpeedEngine, _name, _getter(_name, _is_method, _doc))
