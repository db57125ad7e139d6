"""FSDP1's FullyShardedDataParallel on the same Root as fully_shard()."""
import contextlib
import dataclasses
import functools
import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (BackwardPrefetch, FullOptimStateDictConfig, FullStateDictConfig, LocalOptimStateDictConfig, LocalStateDictConfig,
                                    ShardedOptimStateDictConfig, ShardedStateDictConfig, ShardingStrategy, StateDictSettings, StateDictType)
from torch.distributed.fsdp._wrap_utils import _auto_wrap
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType
from torch.nn.utils import clip_grad

from .. import ranks
from .._native import core
from ..errors import ConfigError, ShapeError, StateError, UnsupportedError
from . import local
from .modules import Wrapped, parameters_of, remade, wrap
from .policies import LOW, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, choice_of
from .tensors import as_shown
from .tree import managed_parameters
from .values import Value

_KEPT = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)  # pylint: disable=protected-access
_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)  # pylint: disable=protected-access
# Settings of a kind of state dict where a program gives none: (of models, of optimizers).
_CONFIGS = {StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
            StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
            StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig)}
_OWN_NAMES = ("check_is_root", "clip_grad_norm_", "fsdp_modules", "module", "no_sync", "optim_state_dict", "optim_state_dict_to_load",
              "set_state_dict_type", "state_dict_type", "summon_full_params")


def _policy_of(precision, module):
    """(MixedPrecisionPolicy, the buffers' dtype) of a MixedPrecision."""
    if precision is None:
        return MixedPrecisionPolicy(), torch.float32
    if precision.keep_low_precision_grads:
        raise UnsupportedError("FullyShardedDataParallel(mixed_precision=…): keep_low_precision_grads=True is not there, gradients are fp32; leave it out")
    if precision.buffer_dtype not in (None, torch.float32) and (precision.buffer_dtype not in LOW or precision.buffer_dtype is not precision.param_dtype):
        raise UnsupportedError(f"FullyShardedDataParallel(mixed_precision=…): buffer_dtype={precision.buffer_dtype} beside param_dtype={precision.param_dtype} is not "
                               "there; leave it out")
    kept = tuple(precision._module_classes_to_ignore)  # pylint: disable=protected-access
    if precision.param_dtype not in (None, torch.float32) and (names := [name for name, part in module.named_modules() if isinstance(part, kept)]):
        raise UnsupportedError(f"FullyShardedDataParallel(mixed_precision=…): '{names[0]}' is to stay in fp32, and every module here has one dtype; compute under "
                               "torch.autocast instead")
    return MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype, None, precision.cast_forward_inputs), precision.buffer_dtype or torch.float32


def _mesh_of(strategy, process_group, device_mesh):
    """A mesh (replicas, shards), or None: all ranks shard. Raises UnsupportedError: some of the ranks."""
    if device_mesh is not None:
        return device_mesh
    if isinstance(process_group, (list, tuple)):
        raise UnsupportedError("FullyShardedDataParallel(process_group=(…, …)): give it device_mesh=init_device_mesh(…, (replicas, shards)) instead")
    if process_group is not None and dist.get_process_group_ranks(process_group) != list(range(ranks.world().size)):
        raise UnsupportedError("FullyShardedDataParallel(process_group=…): a group of some of the ranks is not there; leave it out")
    world = ranks.world() if strategy in _HYBRID else None
    if world is None or world.size == world.local_size:
        return None
    if world.size % world.local_size:
        raise ConfigError(f"FullyShardedDataParallel(sharding_strategy={strategy.name}): {world.size} ranks are not a multiple of the {world.local_size} of this host; give "
                          "it device_mesh")
    return _mesh_of_hosts(world.size, world.local_size)


@functools.lru_cache
def _mesh_of_hosts(size, local_size):
    """(hosts, ranks of a host): one for all modules, since each makes process groups."""
    return DeviceMesh("cpu", torch.arange(size).view(-1, local_size))


def _fill_meta(module, param_init_fn, ignored):
    """Gives modules whose parameters are on the device "meta" memory and values."""
    for part in module.modules():
        if part in ignored or not any(tensor.is_meta for tensor in itertools.chain(part.parameters(recurse=False), part.buffers(recurse=False))):
            continue
        if param_init_fn is not None:
            param_init_fn(part)
            continue
        part.to_empty(device="cpu", recurse=False)
        if not hasattr(part, "reset_parameters"):
            raise ConfigError(f"FullyShardedDataParallel: {type(part).__name__} is on the device \"meta\" and has no reset_parameters(); give param_init_fn")
        part.reset_parameters()


class FullyShardedDataParallel(Wrapped):
    """FSDP(module, …) gives `module` itself back: its class has this one before its own, and `.module` is what it was
    before."""

    def __new__(cls, *args, **kwargs):
        """The module. Of a class that was made here: another module of the original one, as slices of an nn.Sequential
        are made."""
        if cls is not FullyShardedDataParallel:
            return remade(cls, *args, **kwargs)
        module = args[0] if args else kwargs.pop("module", None)
        _enter(module, *args[1:], **kwargs)
        return module

    def __init__(self, *args, **kwargs):  # pylint: disable=super-init-not-called
        """__new__() has done everything."""

    @property
    def module(self):
        """The module before it was wrapped: another object over the same attributes."""
        if "fsdp_before" not in self.__dict__:
            kind = type(self).__mro__[type(self).__mro__.index(Wrapped) + 1]
            before = object.__new__(kind)
            object.__setattr__(before, "__dict__", self.__dict__)
            self.__dict__["fsdp_before"] = before
        return self.__dict__["fsdp_before"]

    fsdp_has_parts = True
    _fsdp_wrapped_module = module
    _has_params = False  # no flat ones

    def _no_flat(self):
        raise UnsupportedError("FullyShardedDataParallel: there are no flat parameters, with use_orig_params=False neither; take the model's own: "
                               "named_parameters(), state_dict()")

    _flat_param = _handle = property(_no_flat)

    def check_is_root(self):
        """Whether it is the outermost wrapped module."""
        return self.fsdp_wrap.outer is None

    def _require_root(self, call):
        if not self.check_is_root():
            raise StateError(f"{call}: call it on the outermost FullyShardedDataParallel")

    @staticmethod
    def fsdp_modules(module, root_only=False):
        """Wrapped modules inside of `module`, itself included."""
        return [part for part in module.modules() if isinstance(part, FullyShardedDataParallel) and (not root_only or part.check_is_root())]

    def apply(self, fn):
        """As the module's; what is sharded is whole meanwhile, and rank 0's values become everybody's. Collective
        then."""
        if not self._fsdp_root().tree.is_sharded or not self.check_is_root():
            return super().apply(fn)
        with self.summon_full_params(self):
            return super().apply(fn)

    @contextlib.contextmanager
    def no_sync(self):
        """Backward passes inside reduce nothing; gradients add up."""
        self._require_root("no_sync()")
        root = self._fsdp_root()
        root.window.set_sync(False)
        try:
            yield
        finally:
            root.window.set_sync(True)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Clips by the norm of all gradients, which it returns. Collective."""
        self._require_root("clip_grad_norm_()")
        root = self._fsdp_root()
        root.engine()
        ignored = root.tree.ignored()
        # in one order on every rank
        kept = [parameter for parameter in self.parameters() if parameter in ignored and parameter.grad is not None]
        sharded = managed_parameters(self)
        if not kept:
            return torch.nn.utils.clip_grad_norm_(sharded, max_norm, norm_type).as_subclass(torch.Tensor)
        norms = torch.stack([clip_grad._get_total_norm([p.grad for p in sharded if p.grad is not None], norm_type).as_subclass(torch.Tensor),
                             _norm_of_kept(kept, norm_type)])
        norm = torch.linalg.vector_norm(norms, float(norm_type))
        for parameters in (sharded, kept):
            clip_grad._clip_grads_with_norm_(parameters, max_norm, norm)  # pylint: disable=protected-access
        return norm

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(module, recurse=True, writeback=True, rank0_only=False, offload_to_cpu=False, with_grads=False):  # pylint: disable=unused-argument
        """Parameters are whole inside; with `writeback` those of rank 0 become everybody's at the end. Collective."""
        if with_grads:
            raise UnsupportedError("summon_full_params(with_grads=True): take parameter.grad.full_tensor()")
        if rank0_only and writeback:
            raise NotImplementedError("summon_full_params: writeback=True and rank0_only=True; set writeback=False")
        roots = {part.fsdp_wrap.root() for part in FullyShardedDataParallel.fsdp_modules(module)}
        for root in roots:
            root.engine()
            root.exact.require_in_parameters("summon_full_params()", "take state_dict(), and write by load_state_dict()")
        managed = set(managed_parameters(module))
        parameters = [parameter for parameter in module.parameters(recurse) if parameter in managed]
        with core.GatheredContext(parameters, 0 if writeback else None) if parameters else contextlib.nullcontext():
            try:
                yield
            except StateError as error:
                if writeback or "without modifier_rank" not in str(error):
                    raise
                which = str(error).partition(" was written")[0]
                raise StateError(f"summon_full_params(writeback=False): {which} was written inside, which would leave each rank its own values; set "
                                 "writeback=True, with which rank 0's become everybody's, or write a clone()") from None

    # --- state dicts -------------------------------------------------------------------------------------------------

    @staticmethod
    def set_state_dict_type(module, state_dict_type, state_dict_config=None, optim_state_dict_config=None):
        """Sets the form of state_dict() and optim_state_dict() of `module` from here on. Returns the settings
        before."""
        of_model, of_optimizer = _CONFIGS[state_dict_type]
        settings = StateDictSettings(state_dict_type, state_dict_config or of_model(), optim_state_dict_config or of_optimizer())
        for config, kind in ((settings.state_dict_config, of_model), (settings.optim_state_dict_config, of_optimizer)):
            if not isinstance(config, kind):
                raise ConfigError(f"set_state_dict_type: {state_dict_type} takes a {kind.__name__}, got {type(config).__name__}")
        found = FullyShardedDataParallel.fsdp_modules(module)
        if not found:
            raise StateError("set_state_dict_type: there is no FullyShardedDataParallel in this module")
        before = _settings_of(found[0])
        for part in found:
            part.__dict__["fsdp_settings"] = settings
        return before

    @staticmethod
    def get_state_dict_type(module):
        """The settings in force."""
        return _settings_of(next(iter(FullyShardedDataParallel.fsdp_modules(module)), module))

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(module, state_dict_type, state_dict_config=None, optim_state_dict_config=None):
        """set_state_dict_type() for a while."""
        before = FullyShardedDataParallel.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            FullyShardedDataParallel.set_state_dict_type(module, before.state_dict_type, before.state_dict_config, before.optim_state_dict_config)

    def state_dict(self, *args, **kwargs):
        """FULL: whole plain copies, with rank0_only elsewhere none. SHARDED: tensors that torch.distributed.checkpoint
        reads and writes. LOCAL: this rank's elements, by names of parameters, which it alone loads again.
        Collective."""
        self._fsdp_root().engine()
        state = as_shown(super().state_dict(*args, **kwargs))
        settings = _settings_of(self)
        if args or "destination" in kwargs or settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
            return state
        if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            return local.of(self, state, settings.state_dict_config.offload_to_cpu)
        wholes = {name: _plain(value) for name, value in state.items()}
        return _for_this_rank(state, wholes, settings.state_dict_config)

    def load_state_dict(self, state_dict, *args, **kwargs):
        """Loads what state_dict() gives under the type in force. Collective. Raises StateError: of LOCAL_STATE_DICT,
        another rank's."""
        if _settings_of(self).state_dict_type is StateDictType.LOCAL_STATE_DICT:
            self._fsdp_root().engine()
            state_dict = local.wholes(self, state_dict)
        return super().load_state_dict(state_dict, *args, **kwargs)

    @staticmethod
    def optim_state_dict(model, optim, optim_state_dict=None, group=None):  # pylint: disable=unused-argument
        """The optimizer's state_dict() by names of parameters. Collective."""
        state = optim.state_dict() if optim_state_dict is None else optim_state_dict
        names = _names_of(model, optim)
        by_name = {"state": {names[id_]: value for id_, value in state["state"].items()},
                   "param_groups": [{**one, "params": [names[id_] for id_ in one["params"]]} for one in state["param_groups"]]}
        return _for_this_rank({}, by_name, _settings_of(model).optim_state_dict_config)

    @staticmethod
    def optim_state_dict_to_load(model, optim, optim_state_dict, is_named_optimizer=False, load_directly=False, group=None):  # pylint: disable=unused-argument
        """The argument of the optimizer's load_state_dict(), from an optim_state_dict(): with rank0_only from rank 0's.
        Collective then."""
        if is_named_optimizer:
            raise UnsupportedError("optim_state_dict_to_load(is_named_optimizer=True) is not there; use an optimizer of torch.optim")
        if getattr(_settings_of(model).optim_state_dict_config, "rank0_only", False):
            optim_state_dict = _from_rank_0(optim_state_dict)
        ids = {name: id_ for id_, name in _names_of(model, optim).items()}
        strangers = sorted({str(name) for name in optim_state_dict["state"]} - set(ids))
        if strangers:
            raise StateError(f"optim_state_dict_to_load: '{strangers[0]}' is no parameter of the optimizer; load what was saved of this model")
        groups = _groups_in_order(optim, optim_state_dict["param_groups"], ids)
        state = {"state": {ids[name]: value for name, value in optim_state_dict["state"].items()}, "param_groups": groups}
        if load_directly:
            optim.load_state_dict(state)
        return state

    @staticmethod
    def full_optim_state_dict(model, optim, optim_input=None, rank0_only=True, group=None):  # pylint: disable=unused-argument
        """optim_state_dict() of FULL_STATE_DICT. Collective."""
        config = FullOptimStateDictConfig(rank0_only=rank0_only)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
            return FullyShardedDataParallel.optim_state_dict(model, optim)

    @staticmethod
    def shard_full_optim_state_dict(full_optim_state_dict, model, optim_input=None, optim=None):  # pylint: disable=unused-argument
        """The argument of the optimizer's load_state_dict(); every rank has the whole."""
        return _to_load(model, optim, full_optim_state_dict, rank0_only=False)

    @staticmethod
    def scatter_full_optim_state_dict(full_optim_state_dict, model, optim_input=None, optim=None, group=None):  # pylint: disable=unused-argument
        """Likewise, of rank 0's. Collective."""
        return _to_load(model, optim, full_optim_state_dict, rank0_only=True)

    @staticmethod
    def sharded_optim_state_dict(model, optim, group=None):  # pylint: disable=unused-argument
        """optim_state_dict() of SHARDED_STATE_DICT. Collective."""
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return FullyShardedDataParallel.optim_state_dict(model, optim)

    @staticmethod
    def flatten_sharded_optim_state_dict(sharded_optim_state_dict, model, optim):
        """The argument of the optimizer's load_state_dict()."""
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return FullyShardedDataParallel.optim_state_dict_to_load(model, optim, sharded_optim_state_dict)

    @staticmethod
    def rekey_optim_state_dict(optim_state_dict, optim_state_key_type, model, optim_input=None, optim=None):  # pylint: disable=unused-argument
        """The same with positions of parameters in the place of names, or names in that of positions."""
        if optim is None:
            raise ConfigError("rekey_optim_state_dict: give optim=")
        names = _names_of(model, optim)
        to_names = optim_state_key_type is OptimStateKeyType.PARAM_NAME
        keys = names if to_names else {name: id_ for id_, name in names.items()}
        if set(optim_state_dict["state"]) <= set(keys.values()):  # as it is to be
            return optim_state_dict
        if strangers := sorted(map(str, set(optim_state_dict["state"]) - set(keys))):
            raise StateError(f"rekey_optim_state_dict: '{strangers[0]}' is no parameter of the optimizer; give it what was saved of this model")
        return {"state": {keys[key]: value for key, value in optim_state_dict["state"].items()},
                "param_groups": [{**one, "params": sorted(keys[key] for key in one["params"])} for one in optim_state_dict["param_groups"]]}

    def register_comm_hook(self, state, hook):
        """Raises UnsupportedError."""
        raise UnsupportedError("FullyShardedDataParallel.register_comm_hook() is not there; leave it out")


def _enter(module, process_group=None, sharding_strategy=None, cpu_offload=None, auto_wrap_policy=None,  # pylint: disable=too-many-arguments,too-many-locals
           backward_prefetch=BackwardPrefetch.BACKWARD_PRE, mixed_precision=None, ignored_modules=None, param_init_fn=None, device_id=None,
           sync_module_states=False, forward_prefetch=False, limit_all_gathers=True, use_orig_params=False, ignored_states=None, device_mesh=None):
    """`module` becomes a FullyShardedDataParallel, and what a policy chooses inside of it.

    Raises  ShapeError: no module. StateError: wrapped already. UnsupportedError: an argument that is not there yet.
    """
    if not isinstance(module, torch.nn.Module):
        raise ShapeError(f"FullyShardedDataParallel: expected a torch.nn.Module, got {type(module).__name__}")
    if isinstance(module, Wrapped):
        raise StateError(f"FullyShardedDataParallel: this {type(module).__name__} was wrapped already")
    parts, ignored = _ignored(module, ignored_modules, ignored_states)
    policy, buffers = _policy_of(mixed_precision, module)
    strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
    mesh = _mesh_of(strategy, process_group, device_mesh)
    given = {"process_group": process_group, "sharding_strategy": sharding_strategy, "cpu_offload": cpu_offload, "mixed_precision": mixed_precision,
             "param_init_fn": param_init_fn, "use_orig_params": use_orig_params, "device_mesh": device_mesh, "ignored_states": ignored}
    if auto_wrap_policy is not None:
        if mixed_precision is not None:  # _policy_of() has refused models with modules of these classes
            given["mixed_precision"] = dataclasses.replace(mixed_precision, _module_classes_to_ignore=())
        _auto_wrap(module, auto_wrap_policy, parts, ignored, given, FullyShardedDataParallel)
    _fill_meta(module, param_init_fn, parts)
    if clashes := [name for name in _OWN_NAMES if hasattr(module, name)]:
        raise UnsupportedError(f"FullyShardedDataParallel: {type(module).__name__} has a member '{clashes[0]}', which means another thing of a wrapped module here; "
                               "rename it")
    offload = CPUOffloadPolicy() if cpu_offload is not None and cpu_offload.offload_params else OffloadPolicy()
    choice = choice_of(mesh, strategy not in _KEPT, policy, offload)
    root_inputs = mixed_precision.cast_root_forward_inputs if mixed_precision is not None else None
    choice = dataclasses.replace(choice, is_replicated=strategy is ShardingStrategy.NO_SHARD, casts_root_inputs=root_inputs, buffer_dtype=buffers)
    wrap(module, choice, FullyShardedDataParallel, ignored)


def _ignored(module, modules, states):
    """(modules, parameters) that the program keeps, by ignored_modules or ignored_states.

    Raises  ConfigError: both arguments. ShapeError, StateError: what they hold.
    """
    if modules is not None and states is not None:
        raise ConfigError("FullyShardedDataParallel: ignored_modules and ignored_states were given together; leave ignored_modules out")
    name, values = ("ignored_modules", modules) if states is None else ("ignored_states", states)
    values = set(values or ())
    if states is not None and not any(isinstance(one, torch.nn.Module) for one in values):
        return set(), parameters_of("FullyShardedDataParallel(ignored_states=…)", values)
    for one in values:
        if not isinstance(one, torch.nn.Module):
            raise ShapeError(f"FullyShardedDataParallel({name}=…): expected modules, got a {type(one).__name__}; give it modules, or ignored_states parameters alone")
        if isinstance(one, Wrapped):
            raise StateError(f"FullyShardedDataParallel({name}=…): a {type(one).__name__} among them was wrapped already; leave it unwrapped")
    parts = {part for one in values for part in one.modules() if not isinstance(part, Wrapped)}
    if module in parts:
        raise ConfigError(f"FullyShardedDataParallel({name}=…): the module itself is among them, so nothing would be sharded; leave it out")
    parameters = {parameter for part in parts for parameter in part.parameters(recurse=False)}
    return parts, parameters_of(f"FullyShardedDataParallel({name}=…)", parameters)


def _norm_of_kept(parameters, norm_type):
    """The norm of gradients that no rank shares. Collective. Raises UnsupportedError on every rank: another rank has
    another one, so each would clip by its own factor."""
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters], norm_type).nan_to_num(torch.inf)
    least, most = norm.clone(), norm.clone()
    ranks.world().all_reduce(least, "min")
    ranks.world().all_reduce(most, "max")
    if least != most and most.isfinite():
        raise UnsupportedError(f"clip_grad_norm_(): gradients of ignored parameters have the norms {least.item():.6g} to {most.item():.6g} on the ranks, so that each would "
                               "clip by another factor; average these gradients over the ranks first")
    return most


def _settings_of(module):
    return module.__dict__.get("fsdp_settings") or StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())


def _plain(value):
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Value):
        return value.full_tensor()
    return core.whole_tensor(value) if core.is_managed(value) else value.detach().as_subclass(torch.Tensor).clone()


def _for_this_rank(empty, values, config):
    """`values`, or with rank0_only nothing on the others."""
    if getattr(config, "rank0_only", False) and ranks.world().rank != 0:
        empty.clear()
        return empty
    to_host = (lambda one: one.cpu() if isinstance(one, torch.Tensor) else one) if config.offload_to_cpu else lambda one: one
    values = torch.utils._pytree.tree_map(to_host, values)  # pylint: disable=protected-access
    empty.update(values)  # of a model's state_dict(): its own class, with its metadata
    return empty


def _names_of(model, optimizer):
    """{position among the optimizer's parameters: name in the model's state_dict()}."""
    names = {}
    for name, value in torch.nn.Module.state_dict(model, keep_vars=True).items():
        names.setdefault(value, name)
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return {index: names[parameter] for index, parameter in enumerate(parameters)}


def _groups_in_order(optimizer, saved, ids):
    """Saved groups with positions in place of names. Raises StateError: other groups than the optimizer's."""
    groups = [{**one, "params": [ids.get(name, name) for name in one["params"]]} for one in saved]
    start = 0
    for group, one in zip(optimizer.param_groups, groups):
        own = list(range(start, start + len(group["params"])))
        start += len(own)
        if sorted(map(str, one["params"])) != sorted(map(str, own)):
            raise StateError(f"optim_state_dict_to_load: a saved group has the parameters {one['params'][:3]} …, and the optimizer's {own[:3]} …; make the optimizer's groups "
                             "as they were when it was saved")
        one["params"] = own
    return groups


def _from_rank_0(values):
    box = [values if ranks.world().rank == 0 else None]
    if ranks.world().size > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def _to_load(model, optimizer, values, rank0_only):
    if optimizer is None:
        raise ConfigError("shard_full_optim_state_dict, scatter_full_optim_state_dict: give optim=")
    config = FullOptimStateDictConfig(rank0_only=rank0_only)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
        return FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, values)
