"""Accelerate's FSDP: its branch on hosts, and its places that need a GPU or PyTorch's own shards.

Accelerate takes its FSDP branch on devices alone: on a host `state.py` stays at MULTI_CPU, and a plugin is passed over
without a word.
"""
import importlib.metadata
import sys

import torch
from torch.distributed.fsdp import StateDictType

from ..errors import UnsupportedError
from ..log import logger
from ..patches import Patches, Wrapped
from . import optimizers, registry
from .wrapper import FullyShardedDataParallel

_KNOWN = ("1.15.0",)
_OTHER_AXES = ("tp", "cp", "sp")
# which import them from accelerate.utils.fsdp_utils
_PLACES_OF_FILES = ("accelerate.accelerator", "accelerate.utils", "transformers.trainer")
_NO_DEVICE = "no available devices found"  # what a plugin says on a host


def _choosing(make):
    def make_and_choose(self, *args, **kwargs):
        was_there = self.__class__._shared_state != {}  # pylint: disable=protected-access
        make(self, *args, **kwargs)
        plugin, module = kwargs.get("fsdp_plugin"), sys.modules["accelerate.accelerator"]
        kinds = module.DistributedType
        if not was_there and plugin is not None and self.distributed_type in (kinds.MULTI_CPU, kinds.FSDP):
            _check(self, plugin)
            _choose_fsdp(module, self, plugin)

    return make_and_choose


def _check(state, plugin):
    version = importlib.metadata.version("accelerate")
    if version not in _KNOWN:
        raise UnsupportedError(f"accelerate {version}: its FSDP is known to train here in version {', '.join(_KNOWN)}; install that, or call fully_shard()")
    if plugin.fsdp_version not in (1, 2):
        raise UnsupportedError(f"accelerate: fsdp_version={plugin.fsdp_version} is not there; set it to 2 or 1")
    if state.mixed_precision == "fp16" and state.device.type == "cpu":
        raise UnsupportedError("accelerate: mixed_precision fp16 needs a loss scale, which Accelerate has on devices alone; set it to bf16")
    axes = state.parallelism_config
    if _is_fsdp1(plugin):
        _check_fsdp1(plugin, axes)
    others = [name for name in _OTHER_AXES if axes is not None and getattr(axes, f"{name}_size") > 1]
    if others:
        raise UnsupportedError(f"accelerate: ParallelismConfig({others[0]}_size={getattr(axes, others[0] + '_size')}) with FSDP is not there; leave it out, or give "
                               "the axis to DeepSpeed's configuration")


def _is_fsdp1(plugin):
    return plugin is not None and plugin.fsdp_version == 1


def _check_fsdp1(plugin, axes):
    if plugin.ignored_modules:
        raise UnsupportedError("accelerate: ignored_modules with fsdp_version 1 is not there yet; leave it out, or call FullyShardedDataParallel(ignored_modules=…) yourself")
    if axes is not None and axes.dp_replicate_size > 1:
        raise UnsupportedError(f"accelerate: ParallelismConfig(dp_replicate_size={axes.dp_replicate_size}) says nothing to fsdp_version 1, which would shard over all "
                               "ranks; set fsdp_version to 2, or take sharding_strategy HYBRID_SHARD without dp_replicate_size")


def _choose_fsdp(module, state, plugin):
    """As the last lines of AcceleratorState.__init__ do on devices."""
    kinds = module.DistributedType
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    state.fsdp_plugin = plugin
    state.distributed_type = kinds.FSDP
    module.PartialState._shared_state["distributed_type"] = kinds.FSDP  # pylint: disable=protected-access


def _without_meta(prepare):
    """Rank 0's values become everybody's at the first use, so nobody moves to the device "meta" and back for that."""
    def prepare_whole(accelerator, model):
        plugin = accelerator.state.fsdp_plugin
        kept, plugin.cpu_ram_efficient_loading = plugin.cpu_ram_efficient_loading, False
        try:
            return prepare(accelerator, model)
        finally:
            plugin.cpu_ram_efficient_loading = kept

    return prepare_whole


def _attaching(switch):
    """Parameters stay the same objects here: those that come back into the groups are of a wrapped module now."""
    def switch_and_attach(optimizer, mapping):
        switch(optimizer, mapping)
        _attach(optimizer)

    return switch_and_attach


def _attach(optimizer):
    own = getattr(optimizer, "optimizer", optimizer)
    for group in own.param_groups:
        optimizers.attach(own, group["params"])
    if getattr(optimizer, "scaler", None) is not None:  # Accelerate's has kept the step() that was there
        optimizer._optimizer_original_step_method = own.step  # pylint: disable=protected-access
        optimizer._optimizer_patched_step_method = sys.modules["accelerate.optimizer"].patch_optimizer_step(optimizer, own.step)  # pylint: disable=protected-access


# --- fsdp_version 1 --------------------------------------------------------------------------------------------------


def _fsdp1_of(accelerator):
    """The plugin where an Accelerator wraps by FullyShardedDataParallel; None: it does not."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return plugin if accelerator.distributed_type == "FSDP" and _is_fsdp1(plugin) else None


def _on_hosts(post_init):
    """sync_module_states, which cpu_ram_efficient_loading asks for, without the GPU that a plugin wants memory of."""
    def make(self):
        try:
            post_init(self)
        except RuntimeError as error:  # raised after everything else was set
            if _NO_DEVICE not in str(error):
                raise
            self.param_init_fn = lambda part: part.to_empty(device="cpu", recurse=False)

    return make


def _with_optimizers(prepare):
    """Parameters stay the same objects here, so an optimizer that was made before its model was wrapped steps them."""
    def prepare_and_attach(self, *args, **kwargs):
        made = prepare(self, *args, **kwargs)
        for optimizer in self._optimizers if _fsdp1_of(self) else []:  # pylint: disable=protected-access
            if registry.attached(optimizer) is None:
                _attach(optimizer)
        return made

    return prepare_and_attach


def _in_fp32(prepare_model):
    """With mixed precision Accelerate keeps what is trained in fp32, by flat parameters; here by the parameters of each
    wrapped module."""
    def prepare_in_fp32(self, *args, **kwargs):
        model = prepare_model(self, *args, **kwargs)
        if _fsdp1_of(self) and self.mixed_precision != "no":
            low = [parameter for part in FullyShardedDataParallel.fsdp_modules(model) for parameter in _trained_with(part)
                   if parameter.is_floating_point() and parameter.dtype != torch.float32]
            if low and self.is_main_process:
                logger.warning("accelerate: %d parameters of the model are in fp32 from here on, since mixed_precision is %s", len(low), self.mixed_precision)
            for parameter in low:
                parameter.data = parameter.data.to(torch.float32)
        return model

    return prepare_in_fp32


def _trained_with(part):
    """The parameters of a wrapped module's unit; none where all of them are frozen."""
    inside = {parameter for inner in FullyShardedDataParallel.fsdp_modules(part) if inner is not part for parameter in inner.parameters()}
    own = [parameter for parameter in part.parameters() if parameter not in inside]
    return own if any(parameter.requires_grad for parameter in own) else []


class _Reader:
    """An Accelerator that is told that it is rank 0 of one: every rank reads a full state dict, as for a model whose
    class is FSDP1's own, and asks the model for one, whose names peft wants.
    """

    process_index = 0
    num_processes = 1

    def __init__(self, accelerator):
        self._accelerator = accelerator

    def __getattr__(self, name):
        return getattr(self._accelerator, name)


def _on_every_rank(load_model):
    def load(fsdp_plugin, accelerator, *args, **kwargs):
        is_full = fsdp_plugin.state_dict_type is StateDictType.FULL_STATE_DICT
        return load_model(fsdp_plugin, _Reader(accelerator) if _is_fsdp1(fsdp_plugin) and is_full else accelerator, *args, **kwargs)

    return load


def _with_states(function):
    """A sharded state dict is read into states that are there, so they are before the first step."""
    def call(fsdp_plugin, accelerator, optimizer, *args, **kwargs):
        own = registry.attached(optimizer)
        if _is_fsdp1(fsdp_plugin) and own is not None and fsdp_plugin.state_dict_type is not StateDictType.FULL_STATE_DICT:
            registry.root_of(own).begin(own)
        return function(fsdp_plugin, accelerator, optimizer, *args, **kwargs)

    return call


def _of_files(name, why, wrap):
    return Wrapped("accelerate.utils.fsdp_utils", name, why, wrap, also=tuple(f"{place}.{name}" for place in _PLACES_OF_FILES))


_MODULE = "accelerate.accelerator"
PATCHES = Patches(__name__, "`trireme launch --as-fsdp`, `python -m trireme.as_fsdp` or `as_fsdp.install()`", [
    Wrapped(_MODULE, "AcceleratorState.__init__", "an Accelerator on hosts that asks for FSDP takes its branch of FSDP", _choosing),
    Wrapped(_MODULE, "fsdp2_prepare_model", "nobody moves to the device \"meta\" and back", _without_meta),
    Wrapped(_MODULE, "fsdp2_switch_optimizer_parameters", "an optimizer gets the parameters of the wrapped module", _attaching),
    Wrapped(_MODULE, "FullyShardedDataParallelPlugin.__post_init__", "a plugin is made without a GPU", _on_hosts),
    Wrapped(_MODULE, "Accelerator.prepare_model", "an optimizer that was made before its model was wrapped steps it; mixed precision keeps fp32",
            lambda prepare: _with_optimizers(_in_fp32(prepare))),
    Wrapped(_MODULE, "Accelerator.prepare_optimizer", "an optimizer that was made before its model was wrapped steps it", _with_optimizers),
    _of_files("load_fsdp_model", "every rank reads a full state dict", _on_every_rank),
    _of_files("load_fsdp_optimizer", "states are there before the first step", _with_states),
    _of_files("save_fsdp_optimizer", "states are there before the first step", _with_states),
])
