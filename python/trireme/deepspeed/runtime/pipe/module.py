"""A model as a sequence of layers, of which each stage of a pipeline builds and trains its own."""
import functools
import glob
import os
import time

import torch
import torch.distributed as dist
from torch import nn

from ...._native import core
from ....errors import ConfigError, PipelineError, PipelineSpecError, UnsupportedError
from ... import checkpointing, comm
from ...accelerator import get_accelerator
from ...missing import names_of
from ...utils.logging import logger
from ..utils import call_to_str, set_random_seed
from .topology import PipeDataParallelTopology, PipelineParallelGrid

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]
__getattr__ = names_of(__name__)


class LayerSpec:
    """A layer to be built, on its stage alone: the class of a torch.nn.Module and its arguments."""

    def __init__(self, typename, *module_args, **module_kwargs):
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise PipelineSpecError(f"LayerSpec: {typename!r:.60} is no class of modules; give one derived from torch.nn.Module")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self):
        return call_to_str(self.typename.__name__, *self.module_args, **self.module_kwargs)

    def build(self, log=False):
        """The layer; `log` tells of it."""
        if log:
            logger.info("building %r", self)
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """Layers that share one module. Each stage with such a layer has a copy; what happens to one happens to all.

    key               the same for the layers that share a module, which the first of them says how to build.
    forward_fn        called as forward_fn(module, inputs) in place of module(inputs).
    tied_weight_attr  name or names of the weights that the layers share, such as "embedding.weight".
    """

    def __init__(self, key, typename, *module_args, forward_fn=None, tied_weight_attr=("weight",), **module_kwargs):
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class TiedOwner:
    """The owner of a copy of a tied parameter: name and stage of the one that is trained, and that itself where it is
    on this stage."""

    def __init__(self, name, stage, parameter):
        self.name, self.stage, self.parameter = name, stage, parameter

    def __deepcopy__(self, memo):
        # A parameter that is copied with its attributes is not the owner's copy any more, and nothing follows it
        return self


class LayerProfile:
    """The cost of one layer: seconds of a forward and a backward, bytes of parameters, bytes that autograd keeps
    between the two."""

    def __init__(self, seconds, parameter_bytes, activation_bytes):
        self.seconds, self.parameter_bytes, self.activation_bytes = seconds, parameter_bytes, activation_bytes

    def __repr__(self):
        return call_to_str("LayerProfile", **self.__dict__)


def _class_name(layer):
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", "")


def _built_on_meta(spec):
    """The layer without memory and without drawing random numbers; where its constructor needs values, with both for a
    moment."""
    try:
        with torch.device("meta"):
            return spec.build()
    except (NotImplementedError, RuntimeError):
        with torch.random.fork_rng():
            return spec.build()


def _tensors(value):
    """Tensors within any nesting of tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, (tuple, list, type({}.values()))) else []


def _detached(value):
    """The same nesting, of tensors that begin a graph of their own."""
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: _detached(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        made = [_detached(each) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


_NOT_REENTRANT = (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint)


def _parameters_of(function):
    """The parameters of a layer as it is called: a module, a function of one (forward_fn), or another function."""
    module = function.args[0] if isinstance(function, functools.partial) and function.args else function
    return module.parameters() if isinstance(module, nn.Module) else ()


def _is_trained(function):
    return any(parameter.requires_grad for parameter in _parameters_of(function))


def _begins_graph(value):
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if is_float else value


def _bytes_of(tensors):
    """The bytes of their storages, each counted once."""
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def _profile_layer(function, parameters, inputs, repeats=3):
    """(LayerProfile, outputs) of one layer; the shortest of some repeats, after one that warms up."""
    seconds, kept, outputs = [], [], None
    for _ in range(repeats + 1):
        arguments, kept = _detached(inputs), []
        begin = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, to=kept: to.append(tensor) or tensor, lambda tensor: tensor):
            outputs = function(arguments)
        differentiable = [tensor for tensor in _tensors(outputs) if tensor.requires_grad]
        if differentiable:
            torch.autograd.backward(differentiable, [torch.ones_like(tensor) for tensor in differentiable])
        get_accelerator().synchronize()
        seconds.append(time.perf_counter() - begin)
    of_parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    activations = [tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in of_parameters]
    return LayerProfile(min(seconds[1:]), _bytes_of(parameters), _bytes_of(activations)), outputs


# Messages on the world's group: torch gives groups that only some ranks make names by which later ones would wait for
# ever.


def _send_from_first(tensor, ranks):
    """The first rank's values become those of all `ranks`. Collective over them."""
    if dist.get_rank() == ranks[0]:
        for other in ranks[1:]:
            dist.send(tensor, other)
    else:
        dist.recv(tensor, ranks[0])


def sum_over(tensor, ranks):
    """Sums over `ranks`, in their order, in place. Collective over them."""
    if dist.get_rank() == ranks[0]:
        received = torch.empty_like(tensor)
        for other in ranks[1:]:
            dist.recv(received, other)
            tensor += received
    else:
        dist.send(tensor, ranks[0])
    _send_from_first(tensor, ranks)


class _Part:
    """One piece of the model on this rank: the functions of layers `first` and on."""

    def __init__(self, first, functions):
        self.first, self.functions = first, functions
        self.micro_offset = 0  # how often it has computed


class PipelineModule(nn.Module):
    """The layers of this rank's stage: forward() is `for layer in layers: inputs = layer(inputs)`.

    layers                          modules, LayerSpecs, TiedLayerSpecs and plain functions; any iterable, such as an
                                    nn.Sequential.
    num_stages, topology            one of them; with num_stages the other ranks are data parallel.
    loss_fn                         loss_fn(outputs, labels), on the last stage.
    seed_layers, seed_fn, base_seed whether layer i is built after seed_fn(base_seed + i), and draws random numbers that
    follow from
                                    layer and micro-batch: then every number of stages gives the same model. None: all
                                    generators.
    partition_method                "parameters" (their number), "uniform" (the number of layers), "type:REGEX" (the
                                    number of layers whose class matches, in any case) or "profile" (measured times,
                                    within the memory of a rank; of `profile_input`).
    activation_checkpoint_interval  so many layers at a time keep their inputs alone and are computed again in backward;
                                    0: none.
    activation_checkpoint_func      that does it: func(function, inputs), of a tuple func(function, *inputs). One that
                                    is reentrant works under schedules whose backward is not split.
    checkpointable_layers           names of the classes that are; None: all that have parameters.
    dynamic_shape                   shapes of activations may change from one micro-batch to the next.
    profile_input                   what the first layer takes, for partition_method="profile".
    schedule, chunks                a name of trireme.pipe.schedule_names(), and how many parts of the model each stage
                                    has: 2 for "zb-v" and "dualpipe-v", any number for "interleaved", else 1.

    Parameters of layer i are called "i.weight" and so on, wherever they live; those of tied layers by the first of
    these layers.
    Collective. Raises  PipelineSpecError, UnsupportedError.
    """

    # pylint: disable=too-many-instance-attributes,too-many-arguments

    def __init__(self, layers, num_stages=None, topology=None, loss_fn=None, seed_layers=False, seed_fn=None, base_seed=1234,
                 partition_method="parameters", activation_checkpoint_interval=0, activation_checkpoint_func=checkpointing.checkpoint,
                 checkpointable_layers=None, dynamic_shape=False, *, profile_input=None, schedule="1f1b", chunks=1):
        super().__init__()
        if num_stages is None and topology is None:
            raise PipelineSpecError("PipelineModule: must provide num_stages or topology")
        if core.is_init_open():
            raise ConfigError("PipelineModule: a zero.Init scope is open, whose ranks must make the same layers, and stages make different ones; make the "
                              "PipelineModule outside of it: initialize() shards each stage's layers at ZeRO 3")
        if checkpointable_layers is not None and not isinstance(checkpointable_layers, list):
            raise ConfigError(f"PipelineModule: checkpointable_layers={checkpointable_layers!r}; give a list of names of classes")
        self.loss_fn, self.dynamic_shape = loss_fn, dynamic_shape
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn or set_random_seed, base_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self._grid = PipelineParallelGrid(topology or self._data_parallel_topology(num_stages))
        self.num_stages, self.stage_id = self._grid.pipe_parallel_size, self._grid.stage_id
        self.schedule, self.chunks = schedule, chunks
        self._shape = self._checked_schedule()

        layers = list(layers)
        for layer in layers:
            self._check_layer(layer)
        self._first_tied = {}  # index of the first layer of each key
        for index, layer in enumerate(layers):
            if isinstance(layer, TiedLayerSpec):
                self._first_tied.setdefault(layer.key, index)
        self.layer_profiles = []
        self.parts = self._partition(layers, partition_method, profile_input)
        self._check_shared(layers)
        self.tied_modules, self._tied_of_part = {}, {}  # by key; by key and part
        self._parts = [self._build_part(layers, self._shape.part_of(self.stage_id, chunk)) for chunk in range(chunks)]
        self._tied_parts = {key: sorted({self._part_with(index) for index, layer in enumerate(layers)
                                         if isinstance(layer, TiedLayerSpec) and layer.key == key}) for key in self._first_tied}
        self.tied_stages = {key: sorted({self._shape.stage_of(part) for part in parts}) for key, parts in self._tied_parts.items()}
        # In the order of the whole model, so that stages exchange them in one order.
        self.tied_modules = {key: self.tied_modules[key] for key in self._first_tied if key in self.tied_modules}
        self._synchronize_tied_weights()
        self._mark_copies()

    @staticmethod
    def _data_parallel_topology(num_stages):
        size = comm.world().size
        if num_stages < 1 or size % num_stages:
            raise PipelineSpecError(f"PipelineModule: num_stages ({num_stages}) must divide distributed world size ({size})")
        return PipeDataParallelTopology(num_pp=num_stages, num_dp=size // num_stages)

    def _checked_schedule(self):
        """Its stages and chunks are the module's. Raises PipelineSpecError."""
        try:
            shape = core.make_schedule(self.schedule, self.num_stages, 2 * self.num_stages, self.chunks)
        except ConfigError as error:
            raise PipelineSpecError(f"PipelineModule: {error}") from None
        if shape.chunks != self.chunks:
            raise PipelineSpecError(f"PipelineModule: schedule={self.schedule!r} has {shape.chunks} parts on each stage, and chunks="
                                    f"{self.chunks}; set it to {shape.chunks}")
        return shape

    @staticmethod
    def _check_layer(layer):
        if isinstance(layer, PipelineModule):
            raise UnsupportedError("PipelineModule: a layer is a PipelineModule itself; pass its layers")
        if not (isinstance(layer, LayerSpec) or callable(layer)):
            raise PipelineSpecError(f"PipelineModule: the layer {layer!r:.60} cannot be called; give modules, LayerSpecs or functions")

    def _check_shared(self, layers):
        """Stages cannot share a module's parameters behind the back of TiedLayerSpec."""
        owners = {}
        for index, layer in enumerate(layers):
            for parameter in layer.parameters() if isinstance(layer, nn.Module) else ():
                first = owners.setdefault(id(parameter), index)
                if self.stage_owner(first) != self.stage_owner(index):
                    raise PipelineSpecError(f"PipelineModule: layers {first} and {index} share a parameter, on stages "
                                            f"{self.stage_owner(first)} and {self.stage_owner(index)}; use TiedLayerSpec")

    # --- partition ---

    def _partition(self, layers, method, profile_input):
        name, _, pattern = method.partition(":")
        name, count = name.lower(), self.num_stages * self.chunks
        try:
            if name == "uniform":
                parts = core.partition_uniform(len(layers), count)
            elif name == "parameters":
                parts = core.partition_balanced([self._count_parameters(layer) for layer in layers], count)
            elif name == "type":
                parts = core.partition_by_type([_class_name(layer) for layer in layers], pattern, count)
            elif name == "profile":
                parts = self._partition_by_profile(layers, profile_input)
            else:
                raise UnsupportedError(f"PipelineModule: partition_method={method!r}; use \"uniform\", \"parameters\", \"type:REGEX\" or \"profile\"")
        except UnsupportedError:
            raise
        except ConfigError as error:
            raise PipelineSpecError(f"PipelineModule: {error}") from None
        if self._grid.global_rank == 0:
            for part in range(count):
                names = [_class_name(layer) for layer in layers[parts[part]:parts[part + 1]]]
                logger.info("stage %d of %d: layers %d to %d: %s", self._shape.stage_of(part), self.num_stages, parts[part], parts[part + 1] - 1,
                            ", ".join(names))
        return parts

    @staticmethod
    def _count_parameters(layer):
        if isinstance(layer, LayerSpec):
            layer = _built_on_meta(layer)
        return sum(each.numel() for each in layer.parameters() if each.requires_grad) if isinstance(layer, nn.Module) else 0

    def _partition_by_profile(self, layers, inputs):
        if inputs is None:
            raise ConfigError("partition_method=\"profile\" measures the layers; give profile_input=, what the first layer takes")
        # Rank 0's measurements, and the memory of a rank
        told = torch.full((len(layers) + 1, 3), -1.0, dtype=torch.float64)
        failure = PipelineSpecError("partition_method=\"profile\" failed on rank 0, which says why")
        if self._grid.global_rank == 0:
            try:
                told[:-1] = torch.tensor([list(vars(each).values()) for each in self._profile(layers, inputs)], dtype=torch.float64)
                told[-1] = self._bytes_of_a_rank()
            except PipelineSpecError as error:
                failure = error
        comm.world().broadcast(told, 0)
        *measured, (limit, _, _) = told.tolist()
        if limit < 0:
            raise failure
        profiles = [(seconds, int(parameters), int(activations)) for seconds, parameters, activations in measured]
        self.layer_profiles = [LayerProfile(*each) for each in profiles]
        return core.partition_profiled(profiles, self.num_stages, self.chunks, int(limit))

    @staticmethod
    def _bytes_of_a_rank():
        total = get_accelerator().total_memory()
        return total if get_accelerator().device_name() != "cpu" else total // comm.world().local_size

    def _profile(self, layers, inputs):
        """Measures each layer, built for the moment; random numbers are as before."""
        profiles, tied = [], {}
        with torch.random.fork_rng():
            for index, layer in enumerate(layers):
                if isinstance(layer, TiedLayerSpec):
                    if layer.key not in tied:
                        tied[layer.key] = layers[self._first_tied[layer.key]].build()
                    module = tied[layer.key]
                    function = functools.partial(layer.forward_fn, module) if layer.forward_fn else module
                else:
                    function = module = layer.build() if isinstance(layer, LayerSpec) else layer
                parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
                try:
                    profile, inputs = _profile_layer(function, parameters, inputs)
                except Exception as error:
                    raise PipelineSpecError(f"layer {index}, {_class_name(layer)}, failed on profile_input: {error}") from error
                for parameter in parameters:
                    parameter.grad = None
                profiles.append(profile)
        return profiles

    # --- layers ---

    @property
    def forward_funcs(self):
        """The modules and functions that this rank's stage calls one after the other, a new list."""
        return [function for part in self._parts for function in part.functions]

    def _build_part(self, layers, part):
        return _Part(self.parts[part], [self._build(layers, index, part) for index in range(self.parts[part], self.parts[part + 1])])

    def _build(self, layers, index, part):
        """The function that computes layer `index` of this stage; its module is registered under the layer's number."""
        layer = layers[index]
        if isinstance(layer, TiedLayerSpec):
            module = self._tied_module(layers, index, part)
            for name in layer.tied_weight_attr:
                if name not in dict(module.named_parameters()):
                    raise PipelineSpecError(f"PipelineModule: layer {index}, {layer!r}: its module has no parameter {name!r}; name one of its "
                                            "own in tied_weight_attr")
            return functools.partial(layer.forward_fn, module) if layer.forward_fn else module
        return self._registered(index, layer) if isinstance(layer, (LayerSpec, nn.Module)) else layer

    def _tied_module(self, layers, index, part):
        """Each part has a module of its own; the stage's first one has the number of the first layer, whichever stage
        owns that."""
        key = layers[index].key
        if (key, part) not in self._tied_of_part:
            first = self._first_tied[key]
            number = index if key in self.tied_modules else first
            module = self._registered(first, layers[first], number)
            self._tied_of_part[key, part] = module
            self.tied_modules.setdefault(key, module)
            if number != first:
                self._leave_out_of_checkpoints(module)
        return self._tied_of_part[key, part]

    def _registered(self, index, layer, number=None):
        if self.seed_layers:
            self.seed_fn(self.base_seed + index)
        module = layer.build() if isinstance(layer, LayerSpec) else layer
        self.add_module(str(index if number is None else number), module)
        return module

    @staticmethod
    def _leave_out_of_checkpoints(copy):
        """They have the owner's buffers alone."""
        for module in copy.modules():
            module._non_persistent_buffers_set.update(module._buffers)  # pylint: disable=protected-access

    def _copies(self):
        """(module, the ranks of this pipeline that have a copy of it), in one order on every stage."""
        for key, module in self.tied_modules.items():
            if len(self.tied_stages[key]) > 1:
                yield module, [self._grid.stage_to_global(stage) for stage in self.tied_stages[key]]

    def _synchronize_tied_weights(self):
        """Copies begin with the values of the first stage that has one."""
        for module, ranks in self._copies():
            for tensor in (*module.parameters(), *module.buffers()):
                _send_from_first(tensor.detach(), ranks)
            if self._grid.global_rank != ranks[0]:
                self._leave_out_of_checkpoints(module)
        for (key, _), module in self._tied_of_part.items():
            for tensor, first in zip((*module.parameters(), *module.buffers()),
                                     (*self.tied_modules[key].parameters(), *self.tied_modules[key].buffers())):
                tensor.detach().copy_(first.detach())

    def _mark_copies(self):
        """Copies say what they are of: DeepSpeed's attribute, and the owner, which is asked for gradients and states
        (utils/parameters.py)."""
        of_parts = self.tied_copies()
        for name, parts in self.tied_parameters().items():
            owner, stage = of_parts[name].get(parts[0]), self._shape.stage_of(parts[0])
            for part, copy in of_parts[name].items():
                if part != parts[0] and copy is not owner:
                    copy.ds_pipe_replicated, copy.tied_owner = True, TiedOwner(name, stage, owner)

    def tied_parameters(self):
        """{name of a parameter of this stage: the parts that have a copy}, where there are several; the first of them
        owns it. With one chunk parts are stages."""
        return {f"{self._first_tied[key]}.{name}": self._tied_parts[key] for key, module in self.tied_modules.items()
                if len(self._tied_parts[key]) > 1 for name, _ in module.named_parameters()}

    def tied_copies(self):
        """{name of a parameter: {part on this stage: its copy}}, for the names of tied_parameters()."""
        copies = {}
        for (key, part), module in self._tied_of_part.items():
            for name, parameter in module.named_parameters() if len(self._tied_parts[key]) > 1 else ():
                copies.setdefault(f"{self._first_tied[key]}.{name}", {})[part] = parameter
        return copies

    def parameters_of_parts(self):
        """[parameters of the layers of one part], by chunk."""
        return [[parameter for function in part.functions for parameter in _parameters_of(function)] for part in self._parts]

    def allreduce_tied_weight_gradients(self):
        """Adds `.grad` of tied weights over their stages; one that is None counts as zeros. An engine does so itself.
        Collective.

        Raises  UnsupportedError: a stage has several parts of the model.
        """
        if self.chunks > 1:
            raise UnsupportedError("allreduce_tied_weight_gradients: stages have several parts of the model; let an engine do it")
        for module, ranks in self._copies():
            for parameter in module.parameters():
                if parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    sum_over(parameter.grad, ranks)

    # --- forward ---

    def forward(self, forward_input, chunk=None):
        """The layers of this stage in order; of the whole model where there is one stage. Inputs and outputs are any
        nesting of tensors.

        chunk  the layers of that part alone. Raises ConfigError: it is None, and between this stage's parts there are
               others.
        """
        if chunk is None and self.num_stages > 1 and self.chunks > 1:
            raise ConfigError(f"PipelineModule: forward() of a stage with {self.chunks} parts; say which one by chunk=, or call train_batch()")
        outputs = forward_input
        for part in self._parts if chunk is None else [self._parts[chunk]]:
            outputs = self._forward_part(part, outputs)
        return outputs

    def _forward_part(self, part, outputs):
        part.micro_offset += 1
        interval = self.activation_checkpoint_interval or len(part.functions)
        for start in range(0, len(part.functions), max(interval, 1)):
            functions = part.functions[start:start + interval]
            compute = functools.partial(self._compute, functions, part.first + start, part.micro_offset + 1)
            is_kept = not self.activation_checkpoint_interval or not self._is_checkpointable(functions)
            outputs = compute(outputs) if is_kept else self._recomputed(compute, functions, outputs)
        return outputs

    def _recomputed(self, compute, functions, inputs):
        """compute(inputs) by activation_checkpoint_func. A reentrant one, torch.utils.checkpoint's, gives gradients
        where an argument needs one."""
        # Reentrant checkpointing finds tensors among the arguments alone, not in a tuple
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        # A function that is not known counts as reentrant
        is_reentrant = self.activation_checkpoint_func not in _NOT_REENTRANT and torch.is_grad_enabled()
        if is_reentrant and not any(tensor.requires_grad for tensor in _tensors(arguments)):
            if not any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in arguments):
                return compute(inputs)  # such as numbers of words
            arguments = [_begins_graph(each) for each in arguments]
        run = (lambda *inputs: compute(inputs)) if isinstance(inputs, tuple) else compute
        outputs = self.activation_checkpoint_func(run, *arguments)
        if is_reentrant and not any(tensor.requires_grad for tensor in _tensors(outputs)) and any(map(_is_trained, functions)):
            raise ConfigError("PipelineModule: activation_checkpoint_func gave outputs without a gradient for layers that are trained, as "
                              "torch.utils.checkpoint does with use_reentrant=True where no argument needs a gradient; use use_reentrant=False")
        return outputs

    def _compute(self, functions, first_layer, micro_offset, inputs):
        for index, function in enumerate(functions, first_layer):
            if self.seed_layers:
                self.seed_fn(self.base_seed * micro_offset + index)
            inputs = function(inputs)
        return inputs

    def _is_checkpointable(self, functions):
        if self.checkpointable_layers is not None:
            return all(type(each).__name__ in self.checkpointable_layers for each in functions)
        return any(True for function in functions for _ in _parameters_of(function))

    def set_checkpoint_interval(self, interval):
        """Replaces activation_checkpoint_interval."""
        if interval < 0:
            raise ConfigError(f"set_checkpoint_interval: {interval}; use 0 (none) or more layers")
        self.activation_checkpoint_interval = interval

    def get_additional_losses(self):
        """{name: value} of losses to report beside loss_fn's; None: there are none. For subclasses. Called after each
        loss of a step, on the last stage; the engine's get_additional_losses() has their means."""
        return None

    # --- where what is ---

    def partitions(self):
        """Part p has layers partitions()[p] to partitions()[p + 1] - 1; with one chunk parts are stages."""
        return list(self.parts)

    def stage_owner(self, layer_idx):
        """The stage that has a layer."""
        if not 0 <= layer_idx < self.parts[-1]:
            raise ConfigError(f"stage_owner: layer {layer_idx}; there are layers 0 to {self.parts[-1] - 1}")
        return self._shape.stage_of(self._part_with(layer_idx))

    def _part_with(self, layer):
        return next(part for part in range(len(self.parts) - 1) if layer < self.parts[part + 1])

    def has_first_part(self):
        """Whether this rank has the first layers."""
        return self._shape.stage_of(0) == self.stage_id

    def has_last_part(self):
        """Whether this rank has the last layers: with placement "v" the first stage does."""
        return self._shape.stage_of(len(self.parts) - 2) == self.stage_id

    def topology(self):
        """The ProcessTopology of all ranks."""
        return self._grid.topology()

    def mpu(self):
        """The PipelineParallelGrid: this rank's place and groups."""
        return self._grid

    def num_pipeline_stages(self):
        """The number of stages."""
        return self.num_stages

    # --- names of files ---

    def ckpt_prefix(self, checkpoints_path, tag):
        """How the names of this rank's files begin: "checkpoints/tag/module-pipe_00"."""
        label = self.topology().get_rank_repr(self._grid.global_rank, omit_axes=["data"])
        return os.path.join(checkpoints_path, str(tag), f"module-{label}" if label else "module")

    def _layer(self, local_layer_idx):
        """The number in the whole model of this stage's layer."""
        return [part.first + i for part in self._parts for i in range(len(part.functions))][local_layer_idx]

    def ckpt_layer_path(self, ckpt_dir, local_layer_idx):
        """The file of one layer of this stage: "checkpoints/layer_03-model_states.pt"."""
        label = self.topology().get_rank_repr(self._grid.global_rank)
        return os.path.join(ckpt_dir, f"layer_{self._layer(local_layer_idx):02d}{'-' if label else ''}{label}-model_states.pt")

    def ckpt_layer_path_list(self, ckpt_dir, local_layer_idx):
        """The files of one layer of this stage that are there, of all slices of the layer."""
        return sorted(glob.glob(os.path.join(glob.escape(str(ckpt_dir)), f"layer_{self._layer(local_layer_idx):02d}-*model_states.pt")))
