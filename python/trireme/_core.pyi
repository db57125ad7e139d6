"""The C++ library as the Python package uses it; programs import trireme. Errors are those of trireme.errors.

tests/python/stubs_test.py checks that the names here are those of the extension.
"""
from collections.abc import Callable, Mapping, Sequence, Set as AbstractSet
from typing import Any, Protocol

import torch
from torch import Tensor

from .tensor.model_facts import ModelFacts

# --- messages and waiting ---------------------------------------------------------------------------------------------

def leave_to_launcher(text: str) -> bool:
    """Lets `trireme launch` show `text` as why this process ends; False where nobody does."""
def set_log_sink(sink: Callable[[int, str], None] | None) -> None:
    """Calls sink(level, message) for each message; level is 0 debug, 1 info, 2 warning, 3 error. None drops them."""

def configure_comms_log(rank: int, *, enabled: bool, verbose: bool, prof_all: bool, debug: bool, prof_ops: list[str]) -> None:
    """Switches the log of this rank's collectives on or off; what it has counted stays."""
def comms_log_rows(rank: int) -> list[tuple[str, int, int, int, float, float, float, float]]:
    """(operation, bytes, ranks, calls, seconds, least seconds, 10^9 bits/s, of the bus) of each size."""
def comms_log_table(rank: int) -> str:
    """The same as text; empty: the log was never on."""
def clear_comms_log(rank: int) -> None:
    """Forgets what the log has counted."""
def has_listeners() -> bool:
    """Whether anybody hears what ranks do."""
def tell_collective(rank: int, names: tuple[str, str], bytes: int, group_size: int, seconds: float) -> None:
    """Tells of a call that ended now, which no group of the library's made."""

def clear_wait_hook() -> None:
    """Before Python ends: waits no longer listen for signals."""

# --- the ranks --------------------------------------------------------------------------------------------------------

class World:
    """The ranks of this job. Made by init() or join()."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def shares_memory(self) -> bool: ...
    def barrier(self) -> None: ...
    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """In place; contiguous. `op` is sum, mean, max or min."""
    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """In place; contiguous."""
    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, by rank."""
    def first_difference(self, values: list[int]) -> int | None:
        """Index of the first integer that ranks have otherwise; None: all have the same."""
    def abort(self, reason: str) -> None:
        """Peers' next waits raise PeerLostError with this reason."""
    def flight_record(self) -> str: ...
    def close(self) -> None: ...

class AwaitedRanks:
    """Where ranks have met. Made by await_ranks()."""
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def host(self) -> str:
        """Of the store; empty: there is none."""
    @property
    def port(self) -> int: ...
    @property
    def serves(self) -> bool:
        """Whether this rank runs the store's server."""
    @property
    def path(self) -> str:
        """What keys of this meeting begin with."""

def environment(name: str) -> str | None:
    """A variable that docs/environment.md lists."""
def await_ranks(timeout_s: float, variables: dict[str, str]) -> AwaitedRanks:
    """Returns when all ranks that the launcher's variables name have come; after 10 s it logs for whom this rank waits.

    `variables` of torchrun stand for those of the environment."""
def choose_device(name: str, local_rank: int) -> torch.device: ...


def init(timeout_s: float) -> World:
    """Joins the ranks that the launcher's variables name. Collective."""

def join(store: torch.distributed.Store | None, process_group: torch.distributed.ProcessGroup | None, rank: int, size: int,
         timeout_s: float) -> World:
    """Joins the ranks that torch.distributed has started. Collective."""

# --- configurations ---------------------------------------------------------------------------------------------------

def read_config_text(path: str) -> bytes:
    """The bytes of a file of people's, such as a configuration. Raises IoError, which names the file: not there, no regular file, too large."""

def options_of_text(text: str, origin: str) -> Any:
    """The options of a configuration's text in any dialect; YAML where `origin` is the path of such a file. Raises ConfigError, which opens with `origin`."""

def options_of(options: Any) -> Any:
    """The same of a dict in any dialect."""

def is_accelerates(options: Any) -> bool:
    """Whether a dict has the keys of Accelerate, of its files or of its FullyShardedDataParallelPlugin."""

class Config:
    """A configuration, a dict, read and checked for a number of ranks."""

    def __init__(self, options: Any, world_size: int, origin: str, pipe: int = 1, is_file: bool = False) -> None: ...
    @property
    def options(self) -> dict[str, Any]:
        """Every option, spelled out."""

class Schedule:
    """A configuration's `scheduler` section as a function of the steps applied so far."""

    def __init__(self, section: Any, group_lrs: Sequence[float]) -> None: ...
    cycle_beta2: float
    def lr(self, applied_steps: int, group: int = 0) -> float: ...
    def momentum(self, applied_steps: int, group: int = 0) -> float | None: ...

# --- pipelines --------------------------------------------------------------------------------------------------------

class Topology:
    """Ranks on named axes, the last of which varies fastest. `axes` are names and sizes, coordinates names and positions."""

    def __init__(self, axes: Sequence[tuple[str, int]]) -> None: ...
    @property
    def size(self) -> int: ...
    def check_axis(self, axis: str) -> None:
        """Raises ConfigError: there is no such axis."""
    def size_of(self, axis: str) -> int:
        """1 for an axis that is not there."""
    def rank_of(self, coordinate: Sequence[tuple[str, int]]) -> int: ...
    def coordinate_of(self, rank: int) -> list[int]: ...
    def position_of(self, rank: int, axis: str) -> int:
        """0 on an axis that is not there."""
    def groups_along(self, axis: str) -> list[list[int]]: ...
    def group_of(self, rank: int, axis: str) -> list[int]: ...
    def ranks_at(self, places: Sequence[tuple[str, int]]) -> list[int]:
        """Raises ConfigError: an axis or position that is not there."""

def place(strategy: str, data: int, pipe: int, tensor: int) -> Topology:
    """The axes data, pipe and tensor in smp's order: "cluster", "spread" or the letters D, P and T. Raises ConfigError."""

class PipelineInstruction:
    """One instruction of a schedule; numbers that it does not have are -1."""

    @property
    def name(self) -> str: ...
    @property
    def chunk(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def buffer(self) -> int: ...
    @property
    def peer(self) -> int: ...

class PipelineTimeline:
    """When each computation of a schedule runs."""

    @property
    def slots(self) -> list[list[tuple[PipelineInstruction, float, float]]]:
        """By stage: computations with their begin and end."""
    @property
    def makespan(self) -> float: ...
    @property
    def bubble_share(self) -> float: ...
    @property
    def peak_activations(self) -> list[int]: ...
    def text(self, unit: float = 1) -> str: ...
    def svg(self, title: str = "") -> str: ...

class PipelineSchedule:
    """Which instructions each stage of a pipeline executes in which order."""

    @property
    def name(self) -> str: ...
    @property
    def stages(self) -> int: ...
    @property
    def micro_batches(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    @property
    def streams(self) -> list[list[list[PipelineInstruction]]]:
        """By stage and step."""
    @property
    def buffers(self) -> list[list[int]]:
        """By stage and chunk."""
    def part_of(self, stage: int, chunk: int) -> int: ...
    def stage_of(self, part: int) -> int: ...
    def check(self, barriers: bool = False) -> None:
        """Raises ConfigError: two instructions that do not fit, or stages that wait for ever; `barriers`: all stages meet after each step."""
    def simulate(self, forward: float = 1, backward_input: float = 1, backward_weight: float = 1, message: float = 0, of_part: Sequence[float] = ...) -> PipelineTimeline: ...

def schedule_names() -> list[str]: ...
def make_schedule(name: str, stages: int, micro_batches: int, chunks: int = 1) -> PipelineSchedule: ...
def visits_schedule(stages: Sequence[int], micro_batches: int, active: int, times: Sequence[float] = ...) -> PipelineSchedule: ...
def data_parallel_schedule(micro_batches: int) -> PipelineSchedule: ...
def assemble_schedule(name: str, micro_batches: int, chunks: int, in_v: bool,
                      computations: Sequence[Sequence[tuple[str, int, int]]]) -> PipelineSchedule: ...
def schedule_from_buffers(name: str, micro_batches: int, streams: Sequence[Sequence[Sequence[tuple[str, int]]]],
                          buffers: Sequence[int]) -> PipelineSchedule: ...
def partition_uniform(layers: int, stages: int) -> list[int]: ...
def partition_balanced(weights: Sequence[int], stages: int) -> list[int]: ...
def partition_by_type(classes: Sequence[str], regex: str, stages: int) -> list[int]: ...
def partition_profiled(profiles: Sequence[tuple[float, int, int]], stages: int, chunks: int, memory_limit: int) -> list[int]:
    """By (seconds, bytes of parameters, bytes of activations) of each layer. Raises ConfigError."""
def ordered_partition(atoms: Sequence[tuple[str, int, int, int]], stages: int, limit_bytes: int) -> list[int]:
    """By (name, cost, bytes on its stage, bytes that cross behind it) of each atom. Raises ConfigError."""
def tree_partition(modules: Sequence[tuple[int, int]], stages: int) -> list[int]:
    """The stage of each (index of its parent, cost without children); -1: the root's parent. Raises ConfigError."""

# --- the engine -------------------------------------------------------------------------------------------------------

class ForwardContext:
    def __enter__(self) -> ForwardContext: ...
    def __exit__(self, *exception: Any) -> None: ...
    def input(self, tensor: Tensor) -> Tensor:
        """In the dtype that the model computes in, where the configuration casts inputs."""
    def look_at(self, input: Tensor) -> None:
        """Tells once of an input that has another number of samples than a micro-batch."""
    def explain(self, problem: str, inputs: Sequence[torch.dtype]) -> None:
        """Raises ShapeError where the forward failed by `problem` because of a dtype."""

class NoSyncContext:
    def __enter__(self) -> None: ...
    def __exit__(self, *exception: Any) -> None: ...

class CoalescedContext:
    def __enter__(self) -> None: ...
    def __exit__(self, *exception: Any) -> None:
        """Reduces what was accumulated, unless an exception leaves the scope. Collective."""

class _PartOptimizer(Protocol):
    """trireme.client_optimizer.PartOptimizer."""

    def groups(self) -> list[tuple[list[int], float]]: ...
    def step(self, rates: list[float]) -> list[int]: ...
    def state(self, part: int) -> dict[str, Any]: ...
    def set_state(self, part: int, values: dict[str, Any]) -> None: ...
    def drop_state(self, part: int) -> None: ...

def check_models(world: World, module: torch.nn.Module, config: Config, unmanaged: AbstractSet[str] = ...) -> None:
    """Collective. Raises ConfigError: the ranks' models differ, with the first parameter or buffer that does."""

ENGINE_GETTERS: tuple[tuple[str, bool, str], ...]
"""(Name, whether it is a method, docstring) of the getters of EngineBase that façades have, too."""
CORE_GETTERS: tuple[str, ...]
"""The names of its other getters."""

GROUP_HYPERPARAMETERS: dict[str, str]
"""What a parameter group may have of its own, by name: "number", "numbers" (two) or "flag"."""

class FileMonitor:
    """The files of a section of the configuration. Raises IoError."""

    def __init__(self, key: str, output_path: str, job_name: str) -> None: ...
    def write(self, events: list[tuple[str, float, int]]) -> None:
        """Events (name, value, x)."""

class EngineBase:
    """What all engines have, whoever runs their steps. trireme.DeepSpeedEngine says what the methods do."""

    # As the rows of src/python/engine_getters.cpp, which say what they mean.
    @property
    def loss_scale(self) -> float: ...
    def is_gradient_accumulation_boundary(self) -> bool: ...
    def was_step_applied(self) -> bool: ...
    def get_global_grad_norm(self) -> float | None: ...
    @property
    def global_steps(self) -> int: ...
    @property
    def micro_steps(self) -> int: ...
    @property
    def skipped_steps(self) -> int: ...
    @property
    def global_samples(self) -> int: ...
    def train_batch_size(self) -> int: ...
    def train_micro_batch_size_per_gpu(self) -> int: ...
    def gradient_accumulation_steps(self) -> int: ...
    @property
    def data_rank(self) -> int: ...
    @property
    def data_size(self) -> int: ...
    @property
    def copies_of_gradients(self) -> int: ...
    @property
    def group_count(self) -> int: ...
    @property
    def gradient_count(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def leaf_modules(self) -> list[str]: ...
    @property
    def optimizer_bytes(self) -> int: ...
    @property
    def has_slices(self) -> bool: ...
    @property
    def exchange_rows(self) -> list[tuple[str, str, str, int, int]]: ...
    def exchange_table(self) -> str: ...
    @property
    def step_times(self) -> tuple[int, float, float, float, float, float] | None: ...
    @property
    def failure(self) -> str: ...

    def count_exchanges(self, counts: bool) -> None: ...
    def is_part(self, tensor: Tensor) -> bool: ...
    def whole_sizes(self, tensor: Tensor) -> list[int] | None: ...
    @staticmethod
    def forget_sequence(tensors: type[Tensor]) -> None: ...
    @staticmethod
    def tells_wholes(tensor: Tensor) -> bool: ...
    @staticmethod
    def recorded_node(part: Tensor) -> object: ...
    @staticmethod
    def is_leaf(tensor: Tensor) -> bool: ...
    @staticmethod
    def run_backward(roots: list[Tensor], gradients: list[Tensor | None], keep_graph: bool, create_graph: bool, inputs: list[Tensor],
                     allow_unreachable: bool, accumulate_grad: bool) -> tuple[Tensor | None, ...]: ...
    @staticmethod
    def register_hook(part: Tensor, hook: object) -> int: ...
    @staticmethod
    def remove_hook(part: Tensor, place: int) -> None: ...
    @staticmethod
    def random_state_of_parts(device: torch.device) -> Tensor | None: ...
    @staticmethod
    def set_random_state_of_parts(device: torch.device, state: Tensor | None) -> None: ...
    def is_slice(self, tensor: Tensor) -> bool: ...
    def gather(self, tensor: Tensor) -> Tensor: ...
    def gather_like(self, tensor: Tensor, slice: Tensor) -> Tensor: ...
    def whole_of(self, part: Tensor) -> Tensor | None: ...
    def cut(self, input_ids: Tensor | None, labels: Tensor | None, position_ids: Tensor | None, attention_mask: Tensor | None,
            dim: int) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]: ...
    def take_step_events(self, lr: float | None) -> list[tuple[str, float, int]]:
        """(name, value, samples) of the last step, for monitors; empty where none is on, and but on rank 0."""
    def end_record(self, reason: str) -> None:
        """The record of the run ends early, because of `reason`."""
    def step_without_gradients(self) -> None:
        """Lets a client's optimizer change the weights between two windows."""
    def zero_grad(self) -> None: ...
    def reduce_gradients(self) -> None:
        """Completes the reductions of the backward passes so far. Collective."""
    def empty_partition_cache(self) -> None: ...
    def offload_states(self, include: Sequence[str], device: str) -> None: ...
    def reload_states(self) -> None: ...
    def destroy(self) -> None: ...

    def set_train_batch_size(self, train_batch_size: int) -> None: ...
    def set_train_micro_batch_size(self, micro_batch_size: int) -> None: ...
    def get_lr(self, group: int = 0) -> float: ...
    def get_mom(self, group: int = 0) -> tuple[float, float]: ...
    def hyperparameters(self, group: int) -> dict[str, Any]:
        """Those of GROUP_HYPERPARAMETERS that the group's optimizer has."""
    def known_hyperparameters(self, group: int) -> dict[str, Any]:
        """The same without waiting for a device: those after an earlier step where it has not told how many were applied."""
    def set_hyperparameters(self, group: int, values: Mapping[str, Any]) -> None:
        """Those that `values` has; the others stay."""

    def save_checkpoint(self, directory: str, tag: str, client_state: str, exclude_frozen_parameters: bool, save_latest: bool) -> None: ...
    def wait_for_checkpoint(self) -> None: ...
    def load_checkpoint(self, directory: str, tag: str, module: bool, module_strict: bool, optimizer_states: bool,
                        lr_scheduler_states: bool, module_only: bool) -> tuple[str, str] | None:
        """(tag, client state as JSON text), or None where there is no checkpoint."""
    def save_16bit_model(self, directory: str, name: str, exclude_frozen_parameters: bool) -> bool: ...

# --- layers that ranks share -------------------------------------------------------------------------------------------

def partition_text(facts: ModelFacts, parameters: Sequence[tuple[str, Sequence[int], Sequence[str]]], ranks: int, preset_model: str,
                   partition_config: Any) -> str:
    """How rules cut each of `parameters` (name, sizes, other names). `partition_config`: None: there is none. Raises ConfigError."""

class PartitionCall:
    """A call of an operator, of which some tensor argument is cut. While the rule runs."""

    @property
    def name(self) -> str: ...
    @property
    def results(self) -> int: ...
    @property
    def writes_first(self) -> bool: ...
    def __len__(self) -> int: ...
    def is_tensor(self, index: int) -> bool: ...
    def cut_dim(self, index: int) -> int: ...
    def sizes(self, index: int) -> list[int]: ...
    def value(self, index: int) -> bool | int | float | str | list[int] | list[float] | None: ...

def register_partition_rule(op: str, rule: Callable[[PartitionCall], tuple[dict[int, int], Sequence[int | str]] | None]) -> None: ...

class OperatorMeaning:
    """The meaning of an operator for tensors of one shape, no dim of which it names; see row.h."""

    is_each: bool
    is_alias: bool
    reads_first: bool
    reduction: str | None
def operator_meaning(name: str, overload: str) -> OperatorMeaning:
    """By the table of operators. `name`: "aten::add"."""

class WorkCount:
    """The multiply-adds of a model's operators, by the calls of its modules (trireme/observe/work_count.h)."""

    def __init__(self) -> None: ...
    def reset(self) -> None:
        """Forgets what was counted."""
    def start(self) -> None:
        """From here on operators of this thread are counted."""
    def stop(self) -> None:
        """On the same thread."""
    def enter(self, module: int) -> None:
        """A call of a module begins."""
    def leave(self, module: int) -> None:
        """It ends."""
    @property
    def is_running(self) -> bool: ...
    @property
    def calls(self) -> list[tuple[int, int, int, float, int, int, int]]:
        """(caller's index, module, calls, seconds, forward, backward, recomputed); the first is the root."""
    @property
    def uncounted(self) -> dict[str, int]:
        """Operators whose work is not known, and how often they ran."""

# --- zero.Init, and single parameters ---------------------------------------------------------------------------------

class Engine(EngineBase):
    """trireme::Engine over a Python module, which the caller keeps."""

    def __init__(self, world: World, module: torch.nn.Module, config: Config, groups: Sequence[Mapping[str, Any]],
                 make_client: Callable[[list[Tensor], list[str]], _PartOptimizer] | None, output: str, facts: ModelFacts | None = None,
                 unmanaged: AbstractSet[str] = ...) -> None:
        """`unmanaged`: names of parameters that stay the program's own: neither sharded, updated nor saved."""

    def forward_scope(self) -> ForwardContext: ...
    def backward(self, loss: Tensor, retain_graph: bool = False, create_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor: ...
    def scale(self, output: Tensor) -> Tensor: ...
    def step(self, changes: Sequence[tuple[int, Mapping[str, Any]]]) -> tuple[bool, bool | None]:
        """A step with the hyperparameters that changed, by group. (Whether it ended a window, whether the weights changed: None where
        a device has not told, for which nobody waits.)"""
    def check_same_inputs(self, values: list[int]) -> int | None: ...
    def set_optimizer(self, config: Config, groups: Sequence[Mapping[str, Any]], make_client: Callable[[list[Tensor], list[str]], _PartOptimizer] | None) -> None:
        """Of the next steps, where there is none yet. Collective."""
    def defer_reductions(self, on: bool) -> None:
        """no_sync() without a scope and without an optimizer."""
    def no_sync(self) -> NoSyncContext: ...
    def coalesce_grad_reduction(self) -> CoalescedContext: ...
    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...

class StageEngine(EngineBase):
    """trireme::PipelineEngine of the stage that a Python PipelineModule has here."""

    def __init__(self, world: World, topology: Topology, module: Module, config: Config, groups: Sequence[Any], make_client: Any,
                 output: str, loss: Callable[..., Tensor], tied: Mapping[str, Sequence[int]],
                 copies: Mapping[str, Mapping[int, Tensor]], parameters: Sequence[Sequence[Tensor]], schedule: str, chunks: int, dynamic_shapes: bool) -> None: ...
    def train_batch(self, next: Callable[[], Any], changes: Sequence[tuple[int, Mapping[str, Any]]]) -> tuple[Tensor, bool | None]:
        """A step with the hyperparameters that changed, as step(): (mean loss, whether the weights changed: None where a device has not
        told)."""
    def eval_batch(self, next: Callable[[], Any], micro_batches: int, computes_loss: bool, returns_outputs: bool) -> tuple[Tensor | None, list[Any]]:
        """(Mean loss or None, outputs by micro-batch.)"""
    def follow_owners(self) -> None: ...
    def reset_activation_shape(self) -> None: ...
    def set_schedule(self, make: Any) -> None: ...

class StepRegion:
    """A part of a step function, from begin_region() to end(), and its second runs: as a context."""
    def end(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *exception: Any) -> None: ...

class StepEngine(EngineBase):
    """trireme::StepEngine of the stage that owns these tensors of a Python module here."""

    def __init__(self, world: World, topology: Topology, module: Module, homes: Mapping[str, int], config: Config, groups: Sequence[Any],
                 make_client: Any, output: str, pipeline: str, active_micro_batches: int, facts: Any = None, beside: StepEngine | None = None) -> None:
        """`homes`: the stage of each parameter and persistent buffer, by every name that it has. `facts`: as Engine's.
        `beside`: an engine of another model, whose step functions use this one, too."""
    def leave_steps(self) -> None:
        """Steps are no longer this model's, which is used no more."""
    def step(self, micro_batches: int, program: Callable[[int], Sequence[Tensor]], name: str) -> list[list[Tensor]]:
        """Runs `program` for each micro-batch: what it returned, detached, with its numbers on every stage."""
    def backward(self, root: Tensor, gradient: Tensor | None = None) -> None: ...
    def destroy(self) -> None: ...
    def enter(self, stage: int) -> None:
        """Until leave(), operators of activations without parameters run on `stage`."""
    def leave(self) -> None: ...
    def begin_call(self, key: int, stage: int, inputs: Sequence[Tensor]) -> tuple[int, list[Tensor]] | bool | None:
        """Inside of a step, a call of a module of another stage: number and results of an earlier call that stands for
        it; True: it runs, until end_call() or drop_call(); None: it runs."""
    def end_call(self, results: Sequence[Tensor]) -> int:
        """The number of the call that ends, -1 where it stands for no other."""
    def drop_call(self) -> None: ...
    def begin_region(self) -> StepRegion:
        """Inside of a step: operators from here to its end() may run again in the backward pass."""
    def move(self, tensor: Tensor, stage: int) -> Tensor: ...
    def numbers_of(self, tensor: Tensor) -> Tensor:
        """A copy on the host with the numbers of a tensor of some stage, on every stage; itself where every stage has it. Inside of a step function."""
    def end_autocast(self) -> None: ...
    def changes_state(self, what: str) -> None:
        """Inside of a step function: its forward pass has changed `what`, which outlives it. Raises StateError: forward passes take turns."""
    def update(self, changes: Sequence[tuple[int, Mapping[str, Any]]]) -> bool | None:
        """The optimizer's step, with the hyperparameters that changed: whether the weights changed, None where a device has not told."""
    def set_optimizer(self, config: Config, groups: Sequence[Any], make_client: Any) -> None: ...
    def divide_gradients_by(self, divisor: int | None) -> None: ...
    def loss_scaler(self) -> tuple[float, int, int, int] | None:
        """Scale, steps, last overflow and hysteresis of the loss scale; None: there is none."""
    def set_loss_scaler(self, values: tuple[float, int, int, int]) -> None: ...
    def keep_buffers_apart(self) -> None:
        """Ranks that have the same stage keep their own buffers from here on. On all of them."""
    def home_of(self, tensor: Tensor) -> int | None: ...
    def counters(self) -> dict[str, int]: ...
    @property
    def stage(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def pipeline(self) -> str:
        """What the last step ran by."""

def is_init_open() -> bool: ...

class InitContext:
    """Shards the parameters of modules made inside. `config`: None: there is none."""

    def __init__(self, world: World, config: Any, dtype: torch.dtype | None, remote_device: str, enabled: bool) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *exception: Any) -> None: ...
    @property
    def peak_live_bytes(self) -> int: ...

class GatheredContext:
    """Whole parameters inside; what rank `modifier_rank` wrote to them becomes everybody's. Collective."""

    def __init__(self, parameters: Sequence[Tensor], modifier_rank: int | None) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *exception: Any) -> None: ...

def make_whole(tensor: Tensor, /) -> None: ...
def sum_of_this_rank(parameter: Tensor, /) -> Tensor | None:
    """The sum of this rank's gradients in the window, in fp32; None: there is none."""
def whole_tensor(tensor: Tensor, /) -> Tensor:
    """A copy of a parameter or buffer: of a sharded one, or of one that ranks have slices of, all of it. Collective."""

def safe_get_full_fp32_param(parameter: Tensor, /) -> Tensor | None: ...
def safe_get_full_optimizer_state(parameter: Tensor, state: str, /) -> Tensor | None: ...
def optimizer_state_names(parameter: Tensor, /) -> list[str]:
    """Of the library's own update; none with a client's optimizer."""
def step_count(parameter: Tensor, /) -> int: ...
def set_step_counts(parameters: Sequence[Tensor], counts: Sequence[int], /) -> None: ...
def is_managed(tensor: Tensor) -> bool: ...
def is_managed_storage(storage: torch.UntypedStorage) -> bool: ...
def gradient_part(parameter: Tensor, /) -> Tensor | None:
    """After reduce_gradients(): this rank's elements, the memory that the next step reads; None: no rank had a gradient."""
def has_gradient(parameter: Tensor, /) -> bool:
    """Before reduce_gradients() whether this rank has a gradient, after it whether any has. Local."""
def gradient_written(parameter: Tensor, /) -> None:
    """That memory was written, on every rank."""
def own_weight(parameter: Tensor, /) -> Tensor:
    """A copy of the elements that this rank updates. Collective."""
def own_part(parameter: Tensor, whole: Tensor, /) -> Tensor:
    """Of `whole`, in the parameter's shape: a copy of the elements that this rank updates, [n]. Local."""
def whole_of_parts(parameter: Tensor, own: Tensor, /) -> Tensor:
    """The whole of which ranks have the elements `own` that they update, fp32. Collective."""
def digest(value: Tensor | str, /) -> int:
    """Of its bytes, never 0; waits for a tensor's device. Local."""
def owned_numel(parameter: Tensor, /) -> int: ...
def safe_get_full_grad(parameter: Tensor, /) -> Tensor | None: ...
def safe_set_full_fp32_param(parameter: Tensor, value: Tensor, /) -> None: ...
def safe_set_full_optimizer_state(parameter: Tensor, value: Tensor, state: str, /) -> None: ...
def safe_set_full_grad(parameter: Tensor, value: Tensor, /) -> None: ...
def safe_get_local_fp32_param(parameter: Tensor, /) -> Tensor | None: ...
def safe_get_local_optimizer_state(parameter: Tensor, state: str, /) -> Tensor | None: ...
def safe_get_local_grad(parameter: Tensor, /) -> Tensor | None: ...
def safe_set_local_fp32_param(parameter: Tensor, value: Tensor, /) -> None: ...
def safe_set_local_optimizer_state(parameter: Tensor, value: Tensor, state: str, /) -> None: ...
def safe_set_local_grad(parameter: Tensor, value: Tensor, /) -> None: ...
def safe_update_full_grad_vectorized(parameters: Sequence[Tensor], update: Callable[[Tensor, Tensor], Tensor], /) -> None:
    """safe_set_full_grad(p, update(safe_get_full_grad(p), p)) for each, with the reductions done once. Collective."""

# --- checkpoints without an engine ------------------------------------------------------------------------------------

def latest_tag(directory: str) -> str | None: ...
def fp32_state_dict(path: str, tag: str, exclude_frozen_parameters: bool) -> dict[str, Tensor]:
    """Weights and buffers by name; floating-point ones in fp32, from the masters where there are any."""

def consolidate(path: str, folder: str, tag: str, file_name: str, max_shard_size: str, exclude_frozen_parameters: bool) -> list[str]:
    """Writes the weights as safetensors files; returns their paths."""
def size_of(module: Any, /) -> tuple[int, int]:
    """(all parameters, those of the largest module itself)."""
def zero2_mem_needs(total_params: int, gpus_per_node: int, nodes: int, factor: float, /) -> str: ...
def zero3_mem_needs(total_params: int, largest_layer_params: int, gpus_per_node: int, nodes: int, factor: float, /) -> str: ...
