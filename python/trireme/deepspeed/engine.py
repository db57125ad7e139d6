"""DeepSpeedEngine: an Engine of the library behind the attributes and methods that PyTorch programs use."""
import contextlib
import itertools
import json
import numbers

import torch
from torch.utils import _pytree

from .. import agreement, config as configs, parameters, ranks
from .._native import core
from ..device import local_device
from ..errors import ConfigError, Error, ShapeError, StateError, UnsupportedError
from ..log import logger
from ..sequences import batches
from ..training import optimizers, schedules
from ..training.client_optimizer import ClientOptimizer
from ..training.model_files import ModelFiles
from ..training.optimizer_copy import Beginnings, fill, is_optimizer
from ..watch import beside, clipping, earlier_engines, late_parameters
from . import autosp, missing_members
from .engine_getters import EngineGetters
from .optimizer_kinds import engine_optimizer
from .runtime import lr_schedules
from .settings import EngineSettings
from .utils import groups as groups_of_ranks
from .utils.leaf_modules import set_z3_leaf_module

_numbers = itertools.count()

clipping.watch()


class DeepSpeedEngine(EngineSettings, EngineGetters, ModelFiles, torch.nn.Module):
    """Trains `module` over the ranks of the job. Made by initialize(); methods have DeepSpeed's names and meanings.

    What says collective is called by all ranks in the same order. Errors are those of trireme.errors.
    """

    # pylint: disable=too-many-public-methods

    def __init__(self, model, config, *, optimizer=None, model_parameters=None, lr_scheduler=None, output=""):
        super().__init__()
        self.is_spent = False
        self.engine_number = next(_numbers)
        self.module = model
        self.world = ranks.world()
        origin, self._given = configs.origin_of(config), configs.without_auto(configs.read(config))
        configs.check_filled(self._given, origin)
        groups, client = self._choose_optimizer(optimizer, model_parameters)
        schedules.check(lr_scheduler, client)
        native, others = dict(self._given), []
        torch_section = None
        if lr_scheduler is None and (lr_scheduler := schedules.of_torch(native.get("scheduler"), groups)) is not None:
            torch_section = native.pop("scheduler")
        if client is not None:
            native["optimizer"] = optimizers.section_of(client)
        if lr_scheduler is not None and native.pop("scheduler", None) is not None:
            logger.info("initialize: lr_scheduler is used, not the configuration's scheduler section")
        steps_itself = client is not None and native["optimizer"] is None
        if native.get("optimizer") is not None:
            native["optimizer"], others = optimizers.native_groups(model, groups, native["optimizer"], self.over_stages)
        if client is None:
            schedules.check_callable(lr_scheduler, groups)
        self._add_leaves(native)
        text = json.dumps({k: v for k, v in native.items() if v is not None})
        self.frozen_parameters = self._freeze_others(groups) if native.get("optimizer") is not None or steps_itself else []
        try:
            read = core.Config(text, self.world.size, origin, self._stages)
            resolved = json.loads(read.text)
            agreement.check(self.world, resolved)
            self._check_models(read)
            is_sharded = self.world.size > self._stages and resolved["zero_optimization"]["stage"] > 0
            self.client_steps = ClientOptimizer(client, model, is_sharded) if steps_itself else None
            # A scheduler that refuses the program's optimizer says so before the model is changed.
            own_schedule = schedules.make_client_schedule(lr_scheduler, client) if client is not None else None
            earlier_engines.end(self.world, model)
            self._move_to_device()
            self.core = self._make_core(read, others, self.client_steps and self.client_steps.make, output)
        except Exception:
            self._thaw()
            raise
        ranks.engines.add(self)
        for name in self.core.leaf_modules:
            set_z3_leaf_module(model.get_submodule(name), True)
        for parameter in model.parameters():
            parameters.number(model, "", parameter)
        self._resolved = json.loads(self.core.config)
        self._sequence_size = self._resolved["sequence_parallel_size"]
        groups_of_ranks.set_sequence_size(self._sequence_size)
        if self._sequence_size > 1:
            batches.watch(self.core)
        if torch_section is not None:
            self._resolved["scheduler"] = torch_section
        has_optimizer = client is not None or native.get("optimizer") is not None
        self.client_lr_scheduler = None
        self.optimizer = engine_optimizer(self, groups, client) if has_optimizer else None
        self.client_optimizer = client
        self.client_lr_scheduler = own_schedule if client is not None else self._schedule_of_section(lr_scheduler)
        self.lr_scheduler = self.client_lr_scheduler or self._own_schedule()
        if self.client_lr_scheduler is None and self.lr_scheduler is not None and self.optimizer is not None:
            self.optimizer.pull()  # the schedule's first learning rate, not the optimizer's
        self._schedule_wants = schedules.arguments_of(self.client_lr_scheduler)
        late_parameters.watch(self)
        beside.watch()
        self.training_dataloader = None
        self._casts_inputs = bool(self._resolved.get("fp16", {}).get("auto_cast"))
        self.loaded_checkpoint_dp_world_size = None

    def _check_models(self, read):
        core.check_models(self.world, self.module, read)

    def _make_core(self, read, groups, make_client, output):
        return core.Engine(self.world, self.module, read, groups, make_client, output)

    def over_stages(self, value):
        """`value` of each stage of a pipeline: without one, [value]. Collective over the stages."""
        return [value]

    def _move_to_device(self):
        """What a program has left on the host trains on this rank's GPU where there is one, as with DeepSpeed."""
        device = local_device()
        if device.type == "cpu" or any(p.device.type != "cpu" for p in self.module.parameters()):
            return
        for tensor in (*self.module.parameters(), *self.module.buffers()):  # one at a time: zero.Init may hold them as shards
            core.make_whole(tensor)
            tensor.data = tensor.data.to(device)

    def _choose_optimizer(self, optimizer, model_parameters):
        """Parameter groups, and the optimizer object where there is one."""
        is_given = optimizer is not None
        if not is_given:
            optimizer = optimizers.of_torch(self._given.get("optimizer"))
        if optimizer is None:
            return optimizers.group_parameters(self.module, model_parameters, self.over_stages), None
        if not is_optimizer(optimizer):
            if not callable(optimizer):
                raise ConfigError(f"optimizer: {type(optimizer).__name__} is neither a torch.optim.Optimizer nor a callable that makes one")
            optimizer = optimizers.made_by(optimizer, optimizers.group_parameters(self.module, model_parameters, self.over_stages))
            if not is_optimizer(optimizer):
                raise ConfigError(f"optimizer: the callable gave {optimizer!r:.60}; expected a torch.optim.Optimizer")
        if is_given and self._given.get("optimizer") is not None:
            logger.info("initialize: the optimizer object is used, not the configuration's optimizer section")
        groups = optimizers.group_parameters(self.module, optimizer.param_groups, self.over_stages)
        if Beginnings(optimizer, {p for group in groups for p in group["params"]}).has_stepped:
            logger.warning("initialize: the optimizer has states already, which are dropped; load them with load_checkpoint()")
        return groups, optimizer

    def _freeze_others(self, groups):
        chosen = {p for group in groups for p in group["params"]}
        others = {name: p for name, p in self.module.named_parameters() if p.requires_grad and p not in chosen}
        for parameter in others.values():
            parameter.requires_grad_(False)
        if others:
            logger.warning("initialize: %d parameters that the optimizer was not given are frozen: %s", len(others),
                           ", ".join(list(others)[:5]))
        return list(others.values())

    def _thaw(self):
        for parameter in self.frozen_parameters:
            parameter.requires_grad_(True)

    def _add_leaves(self, config):
        """Modules marked by set_z3_leaf_modules()."""
        marked = [name for name, module in self.module.named_modules() if getattr(module, "_z3_leaf", False)]
        if not marked:
            return
        section = dict(config.get("zero_optimization") or {})
        leaves = dict(section.get("leaf_module") or {})
        leaves["names"] = list(leaves.get("names", [])) + marked
        config["zero_optimization"] = {**section, "leaf_module": leaves}

    def _schedule_of_section(self, lr_scheduler):
        """The program's scheduler over the optimizer of the configuration, which is there since the engine is."""
        try:
            return schedules.make_client_schedule(lr_scheduler, self.optimizer)
        except Exception:
            self.destroy()
            raise

    def _own_schedule(self):
        """Of a configuration with a `scheduler` section; for isinstance() one of lr_schedules, where there is such."""
        if self._resolved.get("scheduler") is None:
            return None
        if self.optimizer is None:
            logger.warning("initialize: there is no optimizer whose learning rate the configuration's scheduler could set")
        kind = self.scheduler_name()
        like = (getattr(lr_schedules, kind),) if kind in lr_schedules.VALID_LR_SCHEDULES else ()
        return type(kind, (schedules.EngineSchedule, *like), {"__doc__": schedules.EngineSchedule.__doc__, "__module__": __name__})(self)

    def scheduled_momenta(self):
        """Those that the configuration's schedule sets, by parameter group; None: it sets none."""
        return self.lr_scheduler.get_mom() if isinstance(self.lr_scheduler, schedules.EngineSchedule) else None

    # --- the training step -------------------------------------------------------------------------------------------

    def forward(self, *inputs, **kwargs):
        """The module's forward(), under autocast and with cast inputs where the configuration says so."""
        with self.core.forward_scope() as scope:
            tensors = [value for value in _pytree.tree_leaves((inputs, kwargs)) if isinstance(value, torch.Tensor)]
            if tensors:
                self.core.look_at(tensors[0])
            if self._sequence_size > 1:
                if self.is_compiled:
                    raise UnsupportedError("forward: the module is compiled by torch.compile(), which hides attention from sequence parallelism; "
                                           "leave it eager, or set sequence_parallel_size to 1")
                inputs, kwargs = autosp.cut(self.core, self.module, inputs, kwargs)
                inputs, kwargs = batches.prepare(self.core, self.module, inputs, kwargs)
            if self._casts_inputs:
                cast = lambda value: scope.input(value) if isinstance(value, torch.Tensor) else value
                inputs, kwargs = _pytree.tree_map(cast, (inputs, kwargs))
            try:
                with batches.forward_of(self.core) if self._sequence_size > 1 else contextlib.nullcontext():
                    return self.module(*inputs, **kwargs)
            except RuntimeError as error:
                if type(error) is RuntimeError:  # libtorch's, not one of ours
                    self.core.explain_forward(str(error), [tensor.dtype for tensor in tensors])
                raise

    def cut(self, input_ids, labels=None, position_ids=None, attention_mask=None, dim=1, **others):
        """This rank's tokens of a batch that its sequence group has whole, as keyword arguments of forward().

        The model computes attention and losses of all tokens then. Tensors [B, S] as they are where samples are not cut;
        `others` are more of them, one number for each token, such as token_type_ids.
        Raises  ShapeError: fewer than two tokens for some rank. StateError, on every rank: the ranks of a sequence have other batches.
        """
        names = ("input_ids", "labels", "position_ids", "attention_mask")
        parts = self.core.cut(input_ids, labels, position_ids, attention_mask, dim)
        other_parts = {name: self.core.cut(tensor, None, None, None, dim)[0] for name, tensor in others.items()}
        return {**{name: part for name, part in zip(names, parts) if part is not None}, **other_parts}

    def backward(self, loss, retain_graph=False, scale_wrt_gas=True, create_graph=False, **_):
        """Accumulates gradients; returns the loss, detached and divided by the accumulation steps. Collective at stages 2, 3.

        Raises  ShapeError: not a scalar with a graph. StateError: no optimizer.
        """
        if not isinstance(loss, torch.Tensor):
            raise ShapeError(f"backward: expected a scalar tensor as the loss, got {type(loss).__name__}")
        try:
            return self.core.backward(loss, retain_graph, create_graph, scale_wrt_gas)
        except RuntimeError as error:
            if self._sequence_size > 1 and type(error) is RuntimeError:  # libtorch's, not one of ours
                raise StateError(f"backward: {error}; the backward() of a function of the program's own (torch.autograd.Function) gets gradients of this "
                                 "rank's tokens: take sizes from them, not from what forward() has kept") from error
            raise

    def scale(self, loss):
        """What to call backward() on directly: `loss` times the loss scale, in fp32, where something computes in fp16."""
        return self.core.scale(loss)

    def step(self, lr_kwargs=None):
        """At the end of an accumulation window updates the weights and advances the schedule; before it only counts. Collective.

        Waits for no device, unless the program's own scheduler must know whether the step was applied.
        """
        if self._schedule_wants and self.core.is_gradient_accumulation_boundary():
            schedules.check_arguments(self.client_lr_scheduler, self._schedule_wants, lr_kwargs)
        changes = self.optimizer.changes() if self.optimizer is not None else []
        with self._stepping():
            has_ended_window, applied = self.core.step(changes)
        if has_ended_window:
            self._follow_step(applied, lr_kwargs)

    def _stepping(self):
        """While it lasts, the program's optimizer steps where the library does."""
        return self.client_steps.calling() if self.client_steps is not None else contextlib.nullcontext()

    def _follow_step(self, applied, lr_kwargs=None):
        """After a step: optimizer and schedule go on. `applied`: whether the weights changed; None: a device has not told."""
        if applied is None and self.client_lr_scheduler is not None:
            applied = self.core.was_step_applied()
        if applied is not False:
            self.optimizer.mark_stepped()
        if self.client_lr_scheduler is None:
            self.optimizer.pull(is_behind=applied is None)
        elif applied:
            self.client_lr_scheduler.step(**(lr_kwargs or {}))

    def zero_grad(self, set_to_none=True):
        """Drops the gradients of this window. Collective."""
        self.core.zero_grad()

    def no_sync(self):
        """A scope in which backward passes reduce nothing, at every ZeRO stage."""
        return self.core.no_sync()

    def coalesce_grad_reduction(self):
        """As no_sync(), but its end reduces, once. Collective."""
        return self.core.coalesce_grad_reduction()

    def is_gradient_accumulation_boundary(self):
        """Whether the next step() ends the window."""
        return self.core.is_gradient_accumulation_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary):
        """From here on `is_boundary` says that, not the count."""
        self.core.set_gradient_accumulation_boundary(is_boundary)

    def was_step_applied(self):
        """The last step() changed the weights."""
        return self.core.was_step_applied()

    def get_global_grad_norm(self):
        """L2, before clipping, of the last step; -1 if it was not finite; None before the first one."""
        return self.core.get_global_grad_norm()

    # --- numbers -----------------------------------------------------------------------------------------------------

    def get_lr(self):
        """Learning rates of the next step, by parameter group."""
        self.optimizer.push()
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

    def train_batch_size(self):
        """Samples of a step over all ranks."""
        return self.core.train_batch_size

    def train_micro_batch_size_per_gpu(self):
        """Samples of a forward on one rank."""
        return self.core.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self):
        """Micro-batches of a step on one rank."""
        return self.core.gradient_accumulation_steps

    def set_train_batch_size(self, train_batch_size):
        """By the accumulation steps. Raises BatchSizeError: not a multiple of micro-batch times ranks."""
        self.core.set_train_batch_size(train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size):
        """And train_batch_size with it."""
        self.core.set_train_micro_batch_size(micro_batch_size)

    global_steps = property(lambda self: self.core.global_steps)
    micro_steps = property(lambda self: self.core.micro_steps)
    skipped_steps = property(lambda self: self.core.skipped_steps)
    global_samples = property(lambda self: self.core.global_samples)
    global_rank = property(lambda self: self.world.rank)
    local_rank = property(lambda self: self.world.local_rank)
    world_size = property(lambda self: self.world.size)
    dp_world_size = property(lambda self: self.core.data_size, doc="Ranks, or groups of ranks, that take different samples.")
    seq_dp_world_size = property(lambda self: self.world.size, doc="Ranks over which ZeRO shards.")
    sequence_parallel_size = property(lambda self: self._sequence_size, doc="Ranks that share samples.")
    seq_parallel_group = property(lambda self: self.get_sequence_parallel_group())
    _dp_rank = property(lambda self: self.core.data_rank)
    _stages = 1  # of a pipeline
    _drops_last = False  # micro-batch of a data set, where it is smaller
    mp_world_size = property(lambda self: 1)
    device = property(lambda self: torch.device(self.core.device), doc="Where the parameters are.")
    config = property(lambda self: self._given)
    resolved_config = property(lambda self: self._resolved, doc="Every option, spelled out.")
    loss_scale = property(lambda self: self.core.loss_scale)

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
        """A DataLoader over `dataset`, in micro-batches: this rank's part, shuffled; with `route` "eval" or "predict" all, in order."""
        if data_sampler is None and route == "train":
            data_sampler = torch.utils.data.DistributedSampler(dataset, self.dp_world_size, self._dp_rank)
        return torch.utils.data.DataLoader(dataset, batch_size=batch_size or self.train_micro_batch_size_per_gpu(), sampler=data_sampler,
                                           collate_fn=collate_fn, num_workers=num_local_io_workers or 0, drop_last=self._drops_last,
                                           pin_memory=pin_memory and self.device.type != "cpu")

    def take_training_data(self, dataset, collate_fn):
        """initialize()'s training_data: `training_dataloader` is its DataLoader from here on."""
        self.training_dataloader = self.deepspeed_io(dataset, collate_fn=collate_fn)

    def compile(self, backend="inductor", compile_kwargs=None, schedule=None, compiled_autograd_enabled=False):
        """Compiles the module's forward() by torch.compile(), once; leaves it eager where samples are cut over ranks. Raises UnsupportedError: a schedule, compiled autograd."""
        if schedule is not None or compiled_autograd_enabled:
            raise UnsupportedError("compile(schedule=…, compiled_autograd_enabled=…) is not there yet; leave it out")
        if self._sequence_size > 1:
            logger.info("compile: sequence parallelism works on the operators of an eager model, which is left so")
        elif not self.is_compiled:
            self.module.compile(backend=backend, **(compile_kwargs or {}))

    is_compiled = property(lambda self: self.module._compiled_call_impl is not None)  # pylint: disable=protected-access

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

    def destroy(self):
        """Gives the module plain, whole parameters again. Collective. The engine is spent; a second call does nothing."""
        if not self.is_spent:
            self.core.destroy()
            self._thaw()
        self.is_spent = True

    def release(self):
        """At the end of the process: waits for a save in the background. Whether it, if there was one, is on disk.

        The engine is spent, and its module with it.
        """
        saved = True
        if not self.is_spent:
            try:
                self.core.wait_for_checkpoint()
            except Error as error:
                logger.error("%s", error)
                saved = False
        self.core, self.is_spent = None, True
        return saved

    def __reduce_ex__(self, protocol):
        raise StateError("an engine cannot be pickled or copied; use save_checkpoint() or save_16bit_model(), or engine.module after destroy()")

    def __getattr__(self, name):
        """As the module's, for programs that treat the engine as their model."""
        with contextlib.suppress(AttributeError):
            return super().__getattr__(name)
        module = self._modules["module"]
        try:
            return getattr(module, name)
        except AttributeError:
            if hasattr(type(module), name):  # a property of the module's own, which failed
                raise
            raise missing_members.error(name, module) from None
