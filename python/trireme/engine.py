"""Engine: what trains a torch.nn.Module over the ranks of the job, under whatever names a façade gives it."""
import contextlib
import itertools
import sys
import typing

import torch
from torch.utils import _pytree

from . import agreement, config as configs, higher_order, parameters, ranks
from ._native import core
from .activations import eager, wholes
from .device import local_device
from .errors import Error, ShapeError, StateError, UnsupportedError
from .log import logger
from .sequences import batches
from .tensor import marks
from .tensor.inputs import SameInputs
from .tensor.model_facts import facts_of
from .training import optimizers, plan as plans, schedules
from .training.model_files import ModelFiles
from .watch import beside, clipping, earlier_engines, late_parameters, shared_memory

_numbers = itertools.count()


class Exchange(typing.NamedTuple):
    """The exchanges of one operator in one way, as this rank made them."""
    axis: str  # "sequence" or "tensor"
    what: str  # the operator, the parameter where one is known, and the direction
    way: str  # "sum", "gather", "scatter", "recut" or "ring"
    exchanges: int  # collectives, or messages to the next rank
    bytes_sent: int


class Engine(ModelFiles, torch.nn.Module):
    """Trains `module` over the ranks of the job: forward(), backward(), step(), and what ModelFiles saves and loads.

    A call of these crosses into the library once, and waits for no device. What says collective is called by all ranks
    in the same order. Errors are those of trireme.errors.
    """

    _stages = 1  # of a pipeline
    _program_slices = 1  # of layers that the program has cut itself
    _knows_micro_batch = True  # the program has said how many samples its batches have
    _reports_flops = False  # writes the report that the section flops_profiler asks for
    # Words of errors: the call that laid memory out, and the calls that do so anew
    layout_call, remake, anew = "initialize()", "engine.destroy() and initialize() again", "make a new one with initialize()"
    # Why clip_grad_norm_() and an optimizer beside the engine are refused; None: the program is told that they do
    # nothing
    clips_otherwise = steps_otherwise = None

    def __init__(self, model, config, *, origin="config", optimizer=None, model_parameters=None, lr_scheduler=None, output="", unmanaged=(), prepare=None):
        """`config` is a dict in the library's keys; errors about it open with `origin`. The others are as
        initialize()'s.

        `unmanaged`: parameters of the model that stay the program's own: neither sharded, updated nor saved.
        `prepare`: called before the model is changed; may refuse, on every rank.
        """
        super().__init__()
        self.is_spent = False
        self.engine_number = next(_numbers)
        self.module = model
        self.world = ranks.world()
        self._given = config
        self.unmanaged = frozenset(unmanaged)
        plan = plans.plan(model, config, optimizer=optimizer, model_parameters=model_parameters, lr_scheduler=lr_scheduler,
                          over_stages=self.over_stages, unmanaged=self.unmanaged)
        self._freeze(plan.frozen(model))
        try:
            self._train_by(plan, origin, output, prepare)
        except Exception:
            self._thaw()
            raise
        self._follow(plan)

    def _train_by(self, plan, origin, output, prepare):
        """Makes the core. What is refused is refused before the model is changed."""
        read = configs.resolve(self._library_config(plan.config), self.world.size, origin, self._stages, self._program_slices)
        self._resolved = read.options
        agreement.check(self.world, read.options)
        if read.options["flops_profiler"]["enabled"] and not self._reports_flops:
            raise UnsupportedError(f"`flops_profiler.enabled` = true is not there yet for {type(self).__name__}; remove it or set it to false, and count by "
                                   "trireme.profiling.flops_profiler.FlopsProfiler(model) in the program")
        if (slices := configs.tensor_degree(read.options)) > 1:
            marks.check_none(self.world, self.module, slices)
        self._check_models(read.core)
        self.client_steps = plan.trial(self.module, self._divides_parameters(read.options))
        # A scheduler that refuses the program's optimizer says so now.
        self.client_lr_scheduler = schedules.make_client_schedule(plan.scheduler, plan.client) if plan.client is not None else None
        if prepare is not None:
            prepare()
        earlier_engines.end(self.world, self.module)
        self._move_to_device()
        higher_order.PATCHES.apply()
        shared_memory.PATCHES.apply()
        self.core = self._make_core(read.core, plan.others, self.client_steps and self.client_steps.make, output)

    def _follow(self, plan):
        """Optimizer and schedule of an engine whose core is there, and who looks after it."""
        ranks.engines.add(self)
        for parameter in self.module.parameters():
            parameters.number(self.module, "", parameter)
        self._casts_inputs = bool(self._resolved.get("fp16", {}).get("auto_cast"))
        self._sequence_size, self._tensor_size = self._resolved["sequence_parallel_size"], configs.tensor_degree(self._resolved)
        degrees = {"sequence_parallel_size": self._sequence_size, "tensor_parallel.autotp_size": self._tensor_size}
        self._cut_by = [key for key, degree in degrees.items() if degree > 1]
        if self._cut_by:
            wholes.watch(self.core)
        self._same_inputs = SameInputs(self.core)
        if plan.torch_section is not None:
            self._resolved["scheduler"] = plan.torch_section
        self.optimizer = self._engine_optimizer(plan.groups, plan.client) if plan.has_optimizer else None
        self.client_optimizer = plan.client
        if plan.client is None:
            self.client_lr_scheduler = self._schedule_of_section(plan.scheduler)
        self.lr_scheduler = self.client_lr_scheduler or self._own_schedule()
        if self.client_lr_scheduler is None and self.lr_scheduler is not None and self.optimizer is not None:
            self.optimizer.pull()  # the schedule's first learning rate, not the optimizer's
        self._schedule_wants = schedules.arguments_of(self.client_lr_scheduler)
        late_parameters.watch(self)
        beside.PATCHES.apply()
        clipping.PATCHES.apply()

    def set_optimizer(self, optimizer):
        """Lets the program's `optimizer` set what the next steps do, where no configuration and no argument has.
        Collective.

        Raises  ConfigError: it does not fit the model. UnsupportedError: it cannot step here, or leaves out parameters
                that require gradients.
        """
        plan = plans.plan(self.module, self._given, optimizer=optimizer, model_parameters=None, lr_scheduler=None, over_stages=self.over_stages,
                          unmanaged=self.unmanaged)
        if left_out := list(dict.fromkeys(itertools.chain(*self.over_stages(list(plan.frozen(self.module)))))):
            raise UnsupportedError(f"optimizer: {len(left_out)} parameters require gradients and are in no group: {', '.join(left_out[:5])}; add them, "
                                   "or freeze them by requires_grad_(False) before the first forward")
        read = configs.resolve(self._library_config(plan.config), self.world.size, "optimizer", self._stages, self._program_slices)
        agreement.check(self.world, read.options)
        client_steps = plan.trial(self.module, self._divides_parameters(read.options))
        self.core.set_optimizer(read.core, plan.others, client_steps and client_steps.make)
        self._resolved, self.client_steps, self.client_optimizer = read.options, client_steps, plan.client
        self.optimizer = self._engine_optimizer(plan.groups, plan.client)

    def _divides_parameters(self, options):
        """Whether a rank has parts of parameters."""
        return configs.tensor_degree(options) > 1 or (self.world.size > self._stages and options["zero_optimization"]["stage"] > 0)

    def _library_config(self, config):
        """`config` as the library gets it."""
        return config

    def _check_models(self, read):
        core.check_models(self.world, self.module, read, self._unmanaged_names())

    def _make_core(self, read, groups, make_client, output):
        return core.Engine(self.world, self.module, read, groups, make_client, output, self._slices(), self._unmanaged_names())

    def _slices(self):
        """How layers are cut: the facts by which rules do so, the names of the parameters that the program has cut
        itself, or None."""
        if configs.tensor_degree(self._resolved) > 1:
            return facts_of(self.module)
        if self._program_slices == 1:
            return None
        return set(marks.marked(self.module))

    def _unmanaged_names(self):
        return {name for name, parameter in self.module.named_parameters(remove_duplicate=False) if parameter in self.unmanaged}

    def over_stages(self, value):
        """`value` of each stage of a pipeline: without one, [value]. Collective over the stages."""
        return [value]

    def _move_to_device(self):
        """A model that a program has left on the host trains on this rank's GPU where there is one."""
        device = local_device()
        if device.type == "cpu" or any(p.device.type != "cpu" for p in self.module.parameters()):
            return
        for tensor in (*self.module.parameters(), *self.module.buffers()):  # one at a time: they may be shards
            core.make_whole(tensor)
            tensor.data = tensor.data.to(device)

    def _freeze(self, others):
        """{name: parameter} that nobody trains."""
        for parameter in others.values():
            parameter.requires_grad_(False)
        if others:
            logger.warning("initialize: %d parameters that the optimizer was not given are frozen: %s", len(others),
                           ", ".join(list(others)[:5]))
        self.frozen_parameters = list(others.values())

    def _thaw(self):
        for parameter in self.frozen_parameters:
            parameter.requires_grad_(True)

    def _schedule_of_section(self, lr_scheduler):
        """The program's scheduler over the optimizer of the configuration, which is there since the engine is."""
        try:
            return schedules.make_client_schedule(lr_scheduler, self.optimizer)
        except Exception:
            self.destroy()
            raise

    def _own_schedule(self):
        if self._resolved.get("scheduler") is None:
            return None
        if self.optimizer is None:
            logger.warning("initialize: there is no optimizer whose learning rate the configuration's scheduler could set")
        return self._schedule_type(self._resolved["scheduler"]["type"])(self)

    def _schedule_type(self, kind):  # pylint: disable=unused-argument
        """The class of the library's schedule `kind`, for a program that asks isinstance()."""
        return schedules.EngineSchedule

    def _engine_optimizer(self, groups, client):
        return optimizers.EngineOptimizer(self, groups, client)

    def scheduled_momenta(self):
        """Those that the configuration's schedule sets, by parameter group; None: it sets none."""
        return self.lr_scheduler.get_mom() if isinstance(self.lr_scheduler, schedules.EngineSchedule) else None

    # --- the training step -------------------------------------------------------------------------------------------

    def forward(self, *inputs, **kwargs):
        """The module's forward(), under autocast and with cast inputs where the configuration says so."""
        with self.core.forward_scope() as scope:
            tensors = [value for value in _pytree.tree_leaves((inputs, kwargs)) if isinstance(value, torch.Tensor)]
            if tensors and self._knows_micro_batch:
                scope.look_at(tensors[0])
            if self._cut_by:
                eager.check(self.module, self._cut_by)
            if self._tensor_size > 1 or self._program_slices > 1:
                self._same_inputs.check(inputs, kwargs)
            if self._sequence_size > 1:
                inputs, kwargs = self._own_tokens(inputs, kwargs)
            if self._casts_inputs:
                cast = lambda value: scope.input(value) if isinstance(value, torch.Tensor) else value
                inputs, kwargs = _pytree.tree_map(cast, (inputs, kwargs))
            try:
                with self._cutting() if self._cut_by else contextlib.nullcontext():
                    return self.module(*inputs, **kwargs)
            except RuntimeError as error:
                if type(error) is RuntimeError:  # libtorch's, not one of ours
                    scope.explain(str(error), [tensor.dtype for tensor in tensors])
                raise

    @contextlib.contextmanager
    def _cutting(self):
        """While it lasts, the module computes on parts, where something is cut."""
        with contextlib.ExitStack() as scopes:
            if self._cut_by:
                scopes.enter_context(eager.forward_of(self._cut_by))
            if self._sequence_size > 1:
                scopes.enter_context(batches.forward_of(self.core))
            yield

    def _own_tokens(self, inputs, kwargs):
        """Arguments of forward() with this rank's tokens in place of whole batches."""
        return batches.prepare(self.core, self.module, inputs, kwargs)

    def backward(self, loss, retain_graph=False, scale_wrt_gas=True, create_graph=False, **_):
        """Accumulates gradients; returns the loss, detached and divided by the accumulation steps. Collective at ZeRO
        stages 2, 3.

        Raises  ShapeError: not a scalar with a graph. StateError: no optimizer.
        """
        if not isinstance(loss, torch.Tensor):
            raise ShapeError(f"backward: expected a scalar tensor as the loss, got {type(loss).__name__}")
        try:
            return self.core.backward(loss, retain_graph, create_graph, scale_wrt_gas)
        except RuntimeError as error:
            if self._cut_by and type(error) is RuntimeError:  # libtorch's, not one of ours
                raise StateError(f"backward: {error}; the backward() of a function of the program's own (torch.autograd.Function) gets gradients of this "
                                 "rank's tokens, heads or features: take sizes from them, not from what forward() has kept") from error
            raise

    def scale(self, loss):
        """The tensor to call backward() on directly: `loss` times the loss scale, in fp32, where something computes in
        fp16."""
        return self.core.scale(loss)

    def step(self, lr_kwargs=None):
        """At the end of an accumulation window updates the weights and advances the schedule; before it only counts.
        Collective.

        Waits for no device, unless the program's own scheduler must know whether the step was applied.
        """
        if self._schedule_wants and self.core.is_gradient_accumulation_boundary():
            schedules.check_arguments(self.client_lr_scheduler, self._schedule_wants, lr_kwargs)
        changes = self._changes()
        with self._stepping():
            has_ended_window, applied = self.core.step(changes)
        if has_ended_window:
            self._follow_step(applied, lr_kwargs)

    def _changes(self):
        """The program's changes to its parameter groups since the last step, as core's steps take them."""
        return self.optimizer.changes() if self.optimizer is not None else []

    def _stepping(self):
        """While it lasts, the program's optimizer steps where the library does."""
        return self.client_steps.calling() if self.client_steps is not None else contextlib.nullcontext()

    def _follow_step(self, applied, lr_kwargs=None):
        """After a step: optimizer and schedule go on. `applied`: whether the weights changed; None: a device has not
        told."""
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

    # --- the rest ----------------------------------------------------------------------------------------------------

    device = property(lambda self: torch.device(self.core.device), doc="Where the parameters are.")
    resolved_config = property(lambda self: self._resolved, doc="Every option, spelled out.")
    is_compiled = property(lambda self: self.module._compiled_call_impl is not None)  # pylint: disable=protected-access

    def gather(self, tensor):
        """The whole of an activation or parameter of which each rank that shares layers has a slice, on all of these;
        differentiable. `tensor` itself where it is whole. Collective over the ranks that share layers."""
        return self.core.gather(tensor)

    def count_exchanges(self, counts=True):
        """From now on counts what this rank sends other ranks along "sequence" and "tensor", by operator; False: no
        longer. Forgets what was counted. Local: ranks need not all count."""
        self.core.count_exchanges(bool(counts))

    def exchanges(self):
        """Exchange values of what count_exchanges() counts, most bytes first; exchange_table() is a text of them."""
        return [Exchange(*row) for row in self.core.exchange_rows]

    def destroy(self):
        """Gives the module plain, whole parameters again. Collective. The engine is spent; a second call does
        nothing."""
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
            if (error := getattr(sys, "last_value", None)) is not None:  # by which the program ends
                self.core.end_record(f"{type(error).__name__}: {error}")
        self._same_inputs = None
        self.core, self.is_spent = None, True  # its end: warnings are heard, and a record is whole, while Python lives
        return saved

    def __reduce_ex__(self, protocol):
        raise StateError("an engine cannot be pickled or copied; use save_checkpoint() or save_16bit_model(), or engine.module after destroy()")

    def __getattr__(self, name):
        """As the module's, for programs that treat the engine as their model."""
        with contextlib.suppress(AttributeError):
            return super().__getattr__(name)
        module = self._modules.get("module")
        if module is None:  # while it is made, to who looks at every object
            raise self._no_member(name)
        try:
            return getattr(module, name)
        except AttributeError:
            if hasattr(type(module), name):  # a property of the module's own, which failed
                raise
            raise self._no_member(name) from None

    def _no_member(self, name):
        return AttributeError(f"neither the engine nor its module, {type(self._modules.get('module')).__name__}, has an attribute '{name}'")
