"""Which stage has which tensor: by hand, or by a cut of what a trace tells."""
import contextlib

import torch

from .._native import core
from ..errors import ConfigError
from ..log import logger
from . import delayed, trace
from .config import state
from .marks import Marks

_homes_by_hand = Marks("_smp_partition")  # the stage that the program has placed a module on


@contextlib.contextmanager
def partition(index):
    """Modules that are made inside are on stage `index`; of nested ones the innermost holds. Without effect where
    `auto_partition` is true.

    Raises  ConfigError: there is no such stage.
    """
    index = _checked(index, "smp.partition")
    if state.cfg.auto_partition:
        yield
        return
    with _homes_by_hand.inside(index):
        yield


def set_partition(module, index):
    """Places `module`, and all modules in it, on stage `index`; without effect where `auto_partition` is true.

    Raises  ConfigError: there is no such stage.
    """
    index = _checked(index, "smp.set_partition")
    if state.cfg.auto_partition:
        return
    _homes_by_hand.put(module, index)


def register_parameter(module, p):
    """Accepted: a parameter may be used outside of its module anyway. Raises ConfigError: it is none, or `module`."""
    if not isinstance(module, torch.nn.Module) or not isinstance(p, torch.nn.Parameter):
        raise ConfigError(f"smp.register_parameter({type(module).__name__}, {type(p).__name__}): expected a torch.nn.Module and a torch.nn.Parameter")


def homes_of(module, args=(), kwargs=None, *, limit_bytes, times=False, memory=False, is_called=True):
    """{name of a parameter or persistent buffer: its stage}; tied ones stand under their first name. Rank 0 logs it.

    By the program's placement where `auto_partition` is false; else by a trace of module(*args, **kwargs).

    limit_bytes     the memory of a rank
    times, memory   whether seconds of operators, and what a backward pass needs, are measured
    is_called       False: the arguments are those of no call, and the order of registration stands for a trace

    Raises  ConfigError: no cut stays within the memory of a rank, or the trace needs numbers that tensors get with
            their stages; what the module itself raises.
    """
    cfg = state.cfg
    if not cfg.auto_partition:
        homes = placed_homes(module, cfg.default_partition)
    elif cfg.pipeline_parallel_degree == 1:
        homes = dict.fromkeys(trace.homed_tensors(module), 0)
    else:
        if not is_called and (times or memory):
            raise ConfigError("smp.DistributedModel(trace_execution_times or trace_memory_usage): of several models the one that the first step function calls first is "
                              "measured; leave it out of the others")
        found = trace.by_registration(module) if cfg.skip_tracing or not is_called else _traced(module, args, kwargs or {}, times, memory)
        homes = cut(module, found, limit_bytes)
    if state.world.rank == 0:
        logger.info(assignments_text(module, homes, cfg.pipeline_parallel_degree))
    return homes


def _traced(module, args, kwargs, times, memory):
    try:
        return trace.traced(module, args, kwargs, times=times, memory=memory)
    except RuntimeError as error:
        if delayed.WITHOUT_NUMBERS not in str(error):
            raise
        has_none = "a tensor that was made inside of delay_param_initialization() or model_creation() has no numbers before the model's tensors get their stages"
        if times or memory:
            raise ConfigError(f"smp.DistributedModel(trace_execution_times={times}, trace_memory_usage={memory}): the model runs with values on rank 0, and {has_none}; leave "
                              "both out, or make the model outside of it") from error
        raise ConfigError(f"smp.init: `skip_tracing` = false: the model's forward is traced for the partition, reads values (as item() or `if tensor:` do), and {has_none}; set "
                          "`skip_tracing` to true, by which the partition goes by the order of registration, or `auto_partition` to false and use smp.partition()") from error


def placed_homes(module, default):
    """The stage of each tensor by smp.partition() and set_partition(); of modules that they did not place,
    `default`."""
    modules = dict(module.named_modules())
    return {name: _homes_by_hand.of(modules[name.rpartition(".")[0]], default) for name in trace.homed_tensors(module)}


def cut(module, found, limit_bytes):
    """The stage of each tensor by the atoms that were found, for the resolved configuration."""
    cfg = state.cfg
    costs = found.costs(cfg.memory_weight, cfg.active_microbatches)
    if cfg.partition_method == "tree":
        stages = _by_tree(module, found, costs)
    else:
        stages = _in_order(found.atoms, costs, limit_bytes)
    return {tensor: stage for atom, stage in zip(found.atoms, stages) for tensor in atom.tensors}


def _in_order(atoms, costs, limit_bytes):
    """The stage of each atom by the ordered cut, between atoms that the program leaves for good: stages that come back
    to each other do not run ahead. Between any atoms where that makes a stage heavier by more than a quarter, as with a
    tied head, which comes back over each boundary."""
    single = [[index] for index in range(len(atoms))]
    left_for_good = [[]]
    for index, atom in enumerate(atoms):
        left_for_good[-1].append(index)
        if atom.is_left_for_good and index + 1 < len(atoms):
            left_for_good.append([])
    if len(left_for_good) < state.cfg.pipeline_parallel_degree:
        return _cut_between(single, atoms, costs, limit_bytes)
    heaviest = lambda stages: max(sum(cost for cost, home in zip(costs, stages) if home == stage) for stage in set(stages))
    anywhere = _cut_between(single, atoms, costs, limit_bytes)
    try:
        found = _cut_between(left_for_good, atoms, costs, limit_bytes)
    except ConfigError:  # one of these takes more than a rank has
        return anywhere
    return found if heaviest(found) <= 1.25 * heaviest(anywhere) else anywhere


def _cut_between(groups, atoms, costs, limit_bytes):
    """The stage of each atom, those of a group together."""
    cfg = state.cfg
    joined = [(" and ".join(dict.fromkeys(atoms[index].name for index in group)), sum(costs[index] for index in group),
               sum(atoms[index].bytes(cfg.active_microbatches) for index in group), atoms[group[-1]].crossing_bytes) for group in groups]
    bounds = core.ordered_partition(joined, cfg.pipeline_parallel_degree, limit_bytes)
    return [stage for stage in range(cfg.pipeline_parallel_degree) for group in groups[bounds[stage]:bounds[stage + 1]] for _ in group]


def _by_tree(module, found, costs):
    """The stage of each atom by the published algorithm over the modules that have atoms, or modules with atoms, in
    them."""
    firsts, own = {}, {}  # by module: the first atom in it; the costs of its own atoms
    for index, (atom, cost) in enumerate(zip(found.atoms, costs)):
        own[atom.module] = own.get(atom.module, 0) + cost
        for name in _path_of(atom.module):
            firsts.setdefault(name, index)
    # A parent comes before its children, and these in the order of their first atoms.
    order = sorted(firsts, key=lambda name: (name.count(".") + bool(name), firsts[name]))
    place = {name: index for index, name in enumerate(order)}
    tree = [(place[name.rpartition(".")[0]] if name else -1, own.get(name, 0)) for name in order]
    homes = core.tree_partition(tree, state.cfg.pipeline_parallel_degree)
    return [homes[place[atom.module]] for atom in found.atoms]


def _path_of(name):
    """The names of a module and of all around it; the root's is ""."""
    parts = name.split(".") if name else []
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]


def assignments_text(module, homes, stages):
    """`Partition assignments:` and a line for each stage: its modules, the outermost that lie wholly on it."""
    of_module = {}
    for tensor, stage in homes.items():
        for name in _path_of(tensor.rpartition(".")[0]):
            of_module.setdefault(name, set()).add(stage)
    sizes = {name: tensor.numel() for name, tensor in trace.homed_tensors(module).items()}
    lines = ["Partition assignments:"]
    for stage in range(stages):
        names = [name for name, found in of_module.items() if found == {stage} and (not name or len(of_module[name.rpartition(".")[0]]) > 1)]
        own = [tensor for tensor, home in homes.items() if home == stage and len(of_module[tensor.rpartition(".")[0]]) > 1]
        elements = sum(sizes[tensor] for tensor, home in homes.items() if home == stage)
        lines.append(f"  stage {stage}: {elements} elements; {', '.join(name or 'the whole model' for name in [*names, *own]) or 'nothing'}")
    return "\n".join(lines)


def _checked(index, call):
    stages = state.cfg.pipeline_parallel_degree
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < stages:
        raise ConfigError(f"{call}({index!r}): there are {stages} partitions; give 0 to {stages - 1}, or another `pipeline_parallel_degree`")
    return index
