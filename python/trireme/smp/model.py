"""DistributedModel: a model whose tensors have homes on stages, and what a program asks of it."""
import collections
import contextlib
import functools
import gc
import json
import os
import sys
import weakref

import torch
from torch.utils.hooks import RemovableHandle

from .. import agreement
from .. import ranks as world_ranks
from ..errors import ConfigError, ShapeError, StateError, UnsupportedError
from ..log import logger
from . import casts, delayed, entries, inside, joining, offload, program, ranks, readers, states, trace
from .comm_hook import CommHook
from .config import state
from .engine import StepEngine, memory_of
from .nn import queries
from .partition import homes_of


class Unwound(BaseException):
    """Leaves a step function that has called `model`, whose tensors have no homes yet, with the arguments of the
    call."""

    def __init__(self, model, args, kwargs):
        super().__init__()
        self.model = model
        self.args_of_call, self.kwargs_of_call = args, kwargs


class DistributedModel(torch.nn.Module):
    """`module` over the stages of the configuration and the ranks that have copies of it.

    A program may have several, which step functions use together; each has its gradients, and an optimizer of its own.

    With several stages its tensors get their homes in the first call of a @smp.step function; until then every rank has
    all of them. With one stage the model is ready at once.

    trace_device                        "gpu" or "cpu"; the trace needs no memory but where values decide, and runs
                                        where the arguments are then
    trace_execution_times               True: the partition goes by the seconds of operators on rank 0, where the model
                                        runs twice with values; another partition may come out in each run
    trace_memory_usage                  True: it goes by the results that a backward pass needs, rather than all
    average_grads_across_microbatches   False: gradients are the sum over micro-batches
    backward_passes_per_step            step functions that run between two steps of the optimizer; their gradients are
                                        added up
    broadcast_buffers                   False: buffers, as batch norm's statistics, are rank 0's only at the start; else
                                        after each step
    overlapping_allreduce, bucket_cap_mb, gradient_as_bucket_view, find_unused_parameters: accepted; the library decides

    Raises  UnsupportedError: an option or a model that is not there yet.
    """

    def __init__(self, module, trace_device="gpu", trace_execution_times=False, trace_memory_usage=False, overlapping_allreduce=True, backward_passes_per_step=1,
                 average_grads_across_microbatches=True, bucket_cap_mb=25, broadcast_buffers=True, gradient_as_bucket_view=False, find_unused_parameters=False):
        super().__init__()
        _check_module(module)
        offload.check()
        if trace_device not in ("gpu", "cpu"):
            raise ConfigError(f"smp.DistributedModel(trace_device={trace_device!r}): expected \"gpu\" or \"cpu\"")
        for name, value in (("trace_execution_times", trace_execution_times), ("trace_memory_usage", trace_memory_usage)):
            if not isinstance(value, bool):
                raise ConfigError(f"smp.DistributedModel({name}={value!r}): expected True or False")
            if value and state.cfg.skip_tracing:
                raise ConfigError(f"smp.DistributedModel({name}=True): `skip_tracing` of smp.init() is true, so nothing is measured; leave one of them out")
        if trace_execution_times and trace_device == "cpu":
            raise ConfigError("smp.DistributedModel(trace_execution_times=True, trace_device=\"cpu\"): times are those of the device that trains; leave one of them out")
        if not isinstance(backward_passes_per_step, int) or isinstance(backward_passes_per_step, bool) or backward_passes_per_step < 1:
            raise ConfigError(f"smp.DistributedModel(backward_passes_per_step={backward_passes_per_step!r}): expected a whole number of 1 or more")
        if not isinstance(broadcast_buffers, bool):
            raise ConfigError(f"smp.DistributedModel(broadcast_buffers={broadcast_buffers!r}): expected True or False")
        if (overlapping_allreduce, bucket_cap_mb, gradient_as_bucket_view, find_unused_parameters) != (True, 25, False, False):
            logger.info("smp.DistributedModel: overlapping_allreduce, bucket_cap_mb, gradient_as_bucket_view and find_unused_parameters change nothing: gradients are "
                        "reduced as they become final, and unused parameters are found")
        self.module = module
        self._options = {"sums": not average_grads_across_microbatches, "calls_per_step": backward_passes_per_step, "own_buffers": not broadcast_buffers}
        if program.models():
            gc.collect()  # modules refer to themselves
        agreement.check(state.world, {"broadcast_buffers": broadcast_buffers, "models that the program has": len(program.models())}, "smp.DistributedModel")
        _check_beside(module, program.models())
        self._measures = {"times": trace_execution_times, "memory": trace_memory_usage}
        self._after_partition, self._after_step = collections.OrderedDict(), collections.OrderedDict()
        self.__dict__["_engine"] = None  # not one of the model's modules
        self._is_plain = False  # cpu() has been called
        self._comm_hook = None
        self.joined = None  # the Join that the program is in
        self._waiting = []  # state dicts for tensors without memory, and whether they have to fit
        self._watching = contextlib.ExitStack()  # of modules that begin and end
        program.add_model(self)
        if ranks.pp_size() == 1:
            self.partition()

    # --- homes -------------------------------------------------------------------------------------------------------

    @property
    def partitioned(self):
        """Whether tensors have their homes."""
        return self._engine is not None

    def engine(self, call):
        """The StepEngine. Raises StateError: there is none yet, or none any more, for `call`."""
        if self._is_plain:
            raise StateError(f"{call}: model.cpu() has made the module a plain one; make another DistributedModel of model.get_module() to go on")
        if self._engine is None:
            raise StateError(f"{call}: the model's tensors have no stages yet; they get them in the first call of a @smp.step function")
        return self._engine

    @property
    def is_plain(self):
        """Whether cpu() has made the module a plain one."""
        return self._is_plain

    def partition(self, args=(), kwargs=None, called=None):
        """Gives tensors their homes, by the arguments of a call of the model on rank 0; without one, where another
        model was `called`, as that one where they have the same tensors. Collective."""
        if self._is_plain:
            self.engine("smp.step")
        if torch.is_inference_mode_enabled():
            raise StateError("smp: the model would get its stages inside of torch.inference_mode(), which ends what watches operators when it ends; use torch.no_grad() "
                             "for the first step")
        inside.PATCHES.apply()
        if state.cfg.half is not None and any(parameter.dtype == casts.half_type() for parameter in self.module.parameters()):
            args, kwargs = casts.inputs((args, kwargs or {}))
        homes = _decided(self.module, args, kwargs, {**self._measures, "is_called": called is None}, called)
        absent = delayed.names_of(self.module)
        delayed.give(self.module, trace.homed_tensors(self.module), homes, ranks.pp_rank())
        other = program.partitioned_or_none()
        self.__dict__["_engine"] = StepEngine(self.module, homes, agreed=absent, beside=other and other.engine("smp.step").core, **self._options)
        # The engine may be collected later, on some ranks.
        weakref.finalize(self, _let_leave, weakref.ref(self._engine)).atexit = False
        self._engine.comm_hook = self._comm_hook
        if ranks.pp_size() > 1:
            self._watching = entries.watch(self.module, self._engine)
        if ranks.pp_size() > 1:
            readers.PATCHES.apply()
        optimizer = program.optimizer_of(self)
        if optimizer is not None and (waiting := program.take_waiting_states(optimizer)) is not None:
            states.load_optimizer(optimizer, waiting, self._engine)
        for state_dict, strict in self._waiting:
            self.load_state_dict(state_dict, strict)
        self._waiting.clear()
        for hook in list(self._after_partition.values()):
            hook(self, program.optimizer_of(self))

    def register_post_partition_hook(self, hook):
        """`hook(model, optimizer)` is called when tensors have got their homes. Returns a handle that removes it."""
        return _registered(self._after_partition, hook)

    def register_post_step_hook(self, hook):
        """`hook(model, optimizer)` is called after each step function. Returns a handle that removes it."""
        return _registered(self._after_step, hook)

    def finish_step(self):
        """Calls what was registered for the end of a step function."""
        for hook in list(self._after_step.values()):
            hook(self, program.optimizer_of(self))

    # --- passes ------------------------------------------------------------------------------------------------------

    def forward(self, *args, **kwargs):
        """The module's forward pass. Inside of a @smp.step function; with one stage anywhere.

        Raises  StateError: outside of one.
        """
        running = program.running()
        if self._is_plain:
            return self.module(*args, **kwargs)
        if running is None and ranks.mp_size() > 1:
            what = "only this stage's tensors have numbers" if ranks.pp_size() > 1 else "ranks do not compute on slices of layers"
            raise StateError(f"DistributedModel: a call outside of a @smp.step function, where {what}; put it into one, for evaluation, too (without backward(), under "
                             "torch.no_grad())")
        if running is not None and not self.partitioned:
            raise Unwound(self, args, kwargs)
        if state.cfg.half is None:
            return self.module(*args, **kwargs)
        args, kwargs = casts.inputs((args, kwargs))
        return casts.outputs(self.module(*args, **kwargs))

    def backward(self, tensors, grad_tensors=None, retain_graph=None, create_graph=False):
        """Inside of a @smp.step function: backward passes begin with these tensors, one or several, when the forward
        pass of the micro-batch has ended. Like torch.autograd.backward().

        Raises  StateError: outside of one. ShapeError: another number of gradients. UnsupportedError: create_graph.
        """
        if trace.is_tracing():
            return  # which has no backward pass; the step has
        if create_graph:
            raise UnsupportedError(inside.no_graph("DistributedModel.backward()"))
        if program.running() is None:
            raise StateError("DistributedModel.backward(): a call outside of a @smp.step function; put the forward pass and this call into one")
        if state.cfg.pipeline == "_only_forward":
            raise StateError("DistributedModel.backward(): `pipeline` = \"_only_forward\" of smp.init() has step functions without backward passes; leave that out to train")
        engine = self.engine("DistributedModel.backward()")
        roots = _listed(tensors)
        gradients = [None] * len(roots) if grad_tensors is None else _listed(grad_tensors)
        if len(gradients) != len(roots):
            raise ShapeError(f"DistributedModel.backward(): {len(roots)} tensors and {len(gradients)} gradients; give one for each, None for the 1 of a loss")
        for root, gradient in zip(roots, gradients):
            engine.backward(root, gradient)

    def join(self, divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False):
        """A context, as that of torch's DistributedDataParallel, in which copies of the model may have different
        numbers of batches: at its end those that have none any more follow the others, with gradients of 0. Collective.

        divide_by_initial_world_size    False: gradients are means over the copies that have a batch
        enable                          False: a context that does nothing
        throw_on_early_termination      True: a StateError on every rank when the first has no batch
        """
        return joining.join(self, divide_by_initial_world_size, enable, throw_on_early_termination)

    def register_comm_hook(self, state, callable):  # pylint: disable=redefined-outer-name, redefined-builtin
        """`callable(state, bucket)` joins the gradients of data-parallel ranks, as torch's DistributedDataParallel has
        it, in optimizer.step() or what reads them before. It gets sums over micro-batches.

        Raises  ConfigError, UnsupportedError, StateError: it cannot be called, or there is one.
        """
        if self._comm_hook is not None:
            raise StateError("DistributedModel.register_comm_hook(): there is one already")
        self._comm_hook = CommHook(state, callable)
        if self._engine is not None:
            self._engine.comm_hook = self._comm_hook

    @property
    def has_own_buffers(self):
        """Whether data-parallel ranks keep their own buffers."""
        return self._options["own_buffers"]

    def zero_grad(self, set_to_none=True):
        """Drops gradients. Collective."""
        if self.joined is not None:
            self.joined.meet("zero_grad()")
        if self._engine is not None:
            self._engine.zero_grad(set_to_none)

    # --- what is here ------------------------------------------------------------------------------------------------

    def get_module(self):
        """The module that was wrapped."""
        return self.module

    def local_named_parameters(self, recurse=True):
        """(name, parameter) of those whose home is this rank's stage."""
        return self._local("local_named_parameters()", self.module.named_parameters(recurse=recurse))

    def local_parameters(self, recurse=True):
        """Parameters whose home is this rank's stage."""
        return (parameter for _, parameter in self.local_named_parameters(recurse))

    def local_named_buffers(self, recurse=True):
        """(name, buffer) of those whose home is this rank's stage, and of those that are no state, which every stage
        has."""
        core = self.engine("local_named_buffers()").core
        # One that is no state is a stage's once values of that stage have been written into it.
        return ((name, buffer) for name, buffer in self.module.named_buffers(recurse=recurse) if core.home_of(buffer) in (None, core.stage))

    def local_buffers(self, recurse=True):
        """The buffers of local_named_buffers()."""
        return (buffer for _, buffer in self.local_named_buffers(recurse))

    def local_named_modules(self):
        """(name, module) of those on this rank's stage: where their first own tensor is, else the first one in them,
        else the module around them."""
        engine = self.engine("local_named_modules()")
        stages = {}
        for name, module in self.module.named_modules():
            own = next((engine.homes[tensor] for tensor in _tensors_of(name, module) if tensor in engine.homes), None)
            stages[name] = stages.get(name.rpartition(".")[0], 0) if own is None else own
            if stages[name] == engine.stage:
                yield name, module

    def local_modules(self):
        """The modules of local_named_modules()."""
        return (module for _, module in self.local_named_modules())

    def _local(self, call, named):
        engine = self.engine(call)
        return ((name, tensor) for name, tensor in named if engine.homes.get(name, engine.stage) == engine.stage)

    # --- layers that ranks share -------------------------------------------------------------------------------------

    distributed_modules = queries.distributed_modules
    is_distributed_parameter, is_distributed_buffer = queries.is_distributed_parameter, queries.is_distributed_buffer
    is_scaled_batch_parameter, is_scaled_batch_buffer = queries.is_scaled_batch_parameter, queries.is_scaled_batch_buffer
    default_reducer_named_parameters = queries.default_reducer_named_parameters
    scaled_batch_reducer_named_parameters = queries.scaled_batch_reducer_named_parameters

    # --- files -------------------------------------------------------------------------------------------------------

    def local_state_dict(self):
        """The module's state_dict() of the tensors whose home is this rank's stage, as copies on the host, and
        `_smp_is_partial`: True."""
        joining.refuse(self, "DistributedModel.local_state_dict()")
        return states.local(self.module, self.engine("local_state_dict()"))

    def state_dict(self, gather_to_rank0=False):
        """The module's, whole, as copies on the host; with `gather_to_rank0` it is empty on all stages but the first.
        Collective over the stages of this copy of the model once tensors have their homes.

        Raises  CommTimeoutError: a stage does not call it.
        """
        joining.refuse(self, "DistributedModel.state_dict()")
        if not self.partitioned or len(ranks.get_whole_group()) == 1:
            return states.alone(self.module)
        return states.whole("DistributedModel.state_dict()", self.module, self._engine, gather_to_rank0)

    def load_state_dict(self, state_dict, strict=True, same_partition_load=False):
        """The module's, of a whole state dict, or of one of each stage, of whatever partition; with
        `same_partition_load` of one that was saved of this stage. Collective over the stages where it is partial. Where
        tensors have no memory before they get their homes, it waits for that.

        Returns what the module's does. Raises  ShapeError, StateError: it does not fit.
        """
        joining.refuse(self, "DistributedModel.load_state_dict()")
        if not self.partitioned and delayed.names_of(self.module):
            states.check_fits(self.module, state_dict, strict)
            self._waiting.append((state_dict, strict))
            return torch.nn.modules.module._IncompatibleKeys([], [])  # pylint: disable=protected-access
        homes, stage = (self._engine.homes, self._engine.stage) if self.partitioned else ({}, 0)
        if states.is_partial(state_dict) and not (same_partition_load and self.partitioned and ranks.tp_size() == 1):
            state_dict = states.joined("DistributedModel.load_state_dict()", state_dict, homes, stage)
        return states.load(self.module, state_dict, strict, self._engine)

    def save_checkpoint(self, save_dir, tag=None, **options):
        """All that training needs, as save_dir/tag, which any number of stages loads; as Engine.save_checkpoint().
        Collective."""
        joining.refuse(self, "DistributedModel.save_checkpoint()")
        return self.engine("save_checkpoint()").save_checkpoint(save_dir, tag, **options)

    def load_checkpoint(self, load_dir, tag=None, **options):
        """Continues where save_checkpoint() has saved; as Engine.load_checkpoint(). Collective."""
        joining.refuse(self, "DistributedModel.load_checkpoint()")
        return self.engine("load_checkpoint()").load_checkpoint(load_dir, tag, **options)

    def cpu(self):
        """Gives every rank all parameters and buffers, plain and on the host: the module is PyTorch's again, and is
        called anywhere. The engine is spent; a second call does nothing. Collective. Returns the model."""
        if self._is_plain:
            return self
        joining.refuse(self, "DistributedModel.cpu()")
        with torch.no_grad():
            if self.partitioned:
                values = states.whole("DistributedModel.cpu()", self.module, self._engine, False)
                unlisted = {name: buffer.cpu() for name, buffer in self.module.named_buffers(remove_duplicate=False) if name not in values}
                self._engine.destroy()
                self._watching.close()
                for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
                    tensor.data = values[name] if name in values else unlisted[name]
            self.__dict__["_engine"] = None
        self._is_plain = True
        return self

    def to(self, *args, **kwargs):
        """Nothing: the library moves the model to this rank's device. Raises UnsupportedError: a dtype."""
        dtype = torch._C._nn._parse_to(*args, **kwargs)[1]  # pylint: disable=protected-access
        if dtype is not None:
            raise UnsupportedError(f"DistributedModel.to({dtype}) is not there yet; convert the module before it is wrapped, or compute under torch.autocast")
        return self

    def cuda(self, device=None):
        """Nothing: the library moves the model to this rank's device."""
        return self

    def _apply(self, fn, recurse=True):
        raise UnsupportedError("DistributedModel: conversions such as half() and to_empty() are not there yet; convert the module before it is wrapped")

    def __reduce_ex__(self, protocol):
        raise StateError("a DistributedModel cannot be pickled or copied: its tensors are on several ranks")


def _let_leave(reference):
    engine = reference()
    if engine is not None and engine.core is not None and not engine.is_spent:
        engine.core.leave_steps()


def _check_module(module):
    """Raises ConfigError, UnsupportedError: it cannot be wrapped."""
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"smp.DistributedModel: {type(module).__name__} is no torch.nn.Module")
    pipelines = sys.modules.get("trireme.deepspeed.runtime.pipe.module")
    refused = {torch.nn.parallel.DistributedDataParallel: "averages gradients itself; wrap what is in it", torch.nn.DataParallel: "has several devices; wrap what is in it",
               torch.jit.ScriptModule: "is compiled by TorchScript, which hides operators; wrap the module that it was made of",
               DistributedModel: "is one already; wrap the module once"}
    if pipelines is not None:
        refused[pipelines.PipelineModule] = "has stages of its own; wrap a plain module, or train it by initialize()"
    for name, inner in module.named_modules():
        where = f"'{name}' ({type(inner).__name__})" if name else type(inner).__name__
        for kind, reason in refused.items():
            if isinstance(inner, kind):
                raise UnsupportedError(f"smp.DistributedModel: {where} {reason}")
        if inner._compiled_call_impl is not None or hasattr(inner, "_orig_mod"):  # pylint: disable=protected-access
            raise UnsupportedError(f"smp.DistributedModel: {where} is compiled by torch.compile(), which hides operators; leave it eager")
        if hasattr(inner, "fsdp_wrap"):
            raise UnsupportedError(f"smp.DistributedModel: {where} was given to fully_shard(), which shards its parameters; leave that out")
    if absent := next((name for name, tensor in module.named_parameters() if tensor.is_meta), None):
        raise UnsupportedError(f"smp.DistributedModel: '{absent}' is on the device \"meta\", where no initial values are known; make the module inside of smp.delay_param_initialization()")


def _check_beside(module, others):
    """Raises UnsupportedError: it cannot be wrapped, as the program has `others` already."""
    if not others:
        return
    refuse = functools.partial(_refuse_beside, len(others))
    for key, is_on in (("`fp16`, whose loss scale belongs to an optimizer", state.cfg.fp16),
                       ("`sharded_data_parallel_degree` above 1", state.cfg.zero_stage > 1 and ranks.rdp_size() > 1),
                       ("`tensor_parallel_degree` above 1", ranks.tp_size() > 1)):
        if is_on:
            refuse(f"several with {key} are not there yet")
    if ranks.pp_size() > 1 and any(other.partitioned for other in others):
        refuse("tensors of another one have got their stages; make all models before the first step function runs")
    if any(delayed.names_of(one) for one in (module, *(other.module for other in others))):
        refuse("several with smp.delay_param_initialization() are not there yet")
    of_others = {memory_of(tensor) for other in others for tensor in _all_tensors(other.module)}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.numel() and memory_of(tensor) in of_others:
            refuse(f"'{name}' is a tensor of another one, too; copy the module by copy.deepcopy() to train both")


def _refuse_beside(count, why):
    raise UnsupportedError(f"smp.DistributedModel: this program has {count} already, and {why}; or put the modules into one, or delete the other")


def _all_tensors(module):
    return (*module.parameters(), *module.buffers())


def _decided(module, args, kwargs, measures, called=None):
    """Rank 0's homes. Collective. Raises  what rank 0 raises there, StateError elsewhere."""
    told, failure = None, None
    if state.world.rank == 0:
        try:
            same = _homes_of_same(module, called) if state.cfg.auto_partition else None
            told = {"homes": same or homes_of(module, args, kwargs, limit_bytes=_bytes_of_a_rank(), **measures)}
        except Exception as error:  # pylint: disable=broad-exception-caught
            failure, told = error, {"failure": f"{type(error).__name__}: {error}"}
    told = json.loads(state.world.gather(json.dumps(told))[0])
    if failure is not None:
        raise failure
    if "failure" in told:
        raise StateError(f"smp: rank 0 could not partition the model: {told['failure']}")
    return told["homes"]


def _homes_of_same(module, called):
    """The homes of the model `called` where `module` has the same tensors, as an average has; None: it has others."""
    if called is None:
        return None
    own, others = ({name: tensor.shape for name, tensor in trace.homed_tensors(one).items()} for one in (module, called.module))
    return {name: called.engine("smp.step").homes[name] for name in own} if own == others else None


def _bytes_of_a_rank():
    with contextlib.suppress(RuntimeError, AssertionError):
        if torch.cuda.is_available():
            return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // world_ranks.world().local_size


def _tensors_of(name, module):
    """Names of the tensors of a module, its own first."""
    prefix = f"{name}." if name else ""
    for recurse in (False, True):
        for found in (module.named_parameters(recurse=recurse, remove_duplicate=False), module.named_buffers(recurse=recurse, remove_duplicate=False)):
            yield from (prefix + tensor for tensor, _ in found)


def _listed(tensors):
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _registered(hooks, hook):
    if not callable(hook):
        raise ConfigError(f"smp: a hook is {type(hook).__name__}; expected a function of (model, optimizer)")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
