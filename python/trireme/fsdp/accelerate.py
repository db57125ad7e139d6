"""Accelerate's FSDP: its branch on hosts, and its two places that need PyTorch's own shards.

Accelerate takes its FSDP branch on devices alone: on a host `state.py` stays at MULTI_CPU, and a plugin is passed over without a word.
"""
import functools
import importlib.metadata

from ..errors import UnsupportedError
from . import optimizers
from .late import when_imported

_KNOWN = ("1.15.0",)
_OTHER_AXES = ("tp", "cp", "sp")


def install():
    """From here on an Accelerator that asks for FSDP gets Trireme's."""
    when_imported("accelerate.accelerator", _change)


def _change(module):
    make = module.AcceleratorState.__init__

    @functools.wraps(make)
    def make_and_choose(self, *args, **kwargs):
        was_there = self.__class__._shared_state != {}  # pylint: disable=protected-access
        make(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        kinds = module.DistributedType
        if not was_there and plugin is not None and self.distributed_type in (kinds.MULTI_CPU, kinds.FSDP):
            _check(self, plugin)
            _choose_fsdp(module, self, plugin)

    module.AcceleratorState.__init__ = make_and_choose
    module.fsdp2_prepare_model = _without_meta(module.fsdp2_prepare_model)
    module.fsdp2_switch_optimizer_parameters = _attaching(module.fsdp2_switch_optimizer_parameters)


def _check(state, plugin):
    version = importlib.metadata.version("accelerate")
    if version not in _KNOWN:
        raise UnsupportedError(f"accelerate {version}: its FSDP is known to train here in version {', '.join(_KNOWN)}; install that, or call fully_shard()")
    if plugin.fsdp_version != 2:
        raise UnsupportedError(f"accelerate: fsdp_version={plugin.fsdp_version} is not there; set it to 2, which trains the same. Programs that call "
                               "FullyShardedDataParallel themselves have FSDP1")
    axes = state.parallelism_config
    others = [name for name in _OTHER_AXES if axes is not None and getattr(axes, f"{name}_size") > 1]
    if others:
        raise UnsupportedError(f"accelerate: ParallelismConfig({others[0]}_size={getattr(axes, others[0] + '_size')}) with FSDP is not there; leave it out, or give "
                               "the axis to DeepSpeed's configuration")


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
    @functools.wraps(prepare)
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
    @functools.wraps(switch)
    def switch_and_attach(optimizer, mapping):
        switch(optimizer, mapping)
        own = getattr(optimizer, "optimizer", optimizer)
        for group in own.param_groups:
            optimizers.attach(own, group["params"])

    return switch_and_attach
