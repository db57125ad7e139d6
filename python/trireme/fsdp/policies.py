"""The arguments of fully_shard(), and the configuration of the engine that they ask for."""
import dataclasses
import re

import torch

from ..errors import ConfigError, UnsupportedError


_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
LOW = (torch.bfloat16, torch.float16)  # in which modules compute with rounded weights
# A program scales the loss itself; of a fixed scale of 1 the engine takes any loss.
_MODULES_IN = {torch.bfloat16: {"bf16": {"enabled": True}}, torch.float16: {"fp16": {"enabled": True, "loss_scale": 1.0}}}


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a module's computation and of its gradients' reduction."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """Dtypes in which the modules of a tree compute, and in which its optimizer steps."""

    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    is_low: bool = False  # the optimizer steps weights in bf16 themselves

    rounds = property(lambda self: self.policy.param_dtype in LOW and not self.is_low,
                      doc="Whether modules compute with rounded weights; their fp32 values are the optimizer's then.")
    gradient = property(lambda self: torch.bfloat16 if self.is_low else torch.float32, doc="The dtype of reduced gradients.")


@dataclasses.dataclass
class OffloadPolicy:
    """No offloading."""


@dataclasses.dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Shards and optimizer states stand in host memory."""

    pin_memory: bool = True


@dataclasses.dataclass(frozen=True)
class Choice:
    """The arguments of one call of fully_shard(), or of FullyShardedDataParallel()."""

    mesh: object = None
    reshard_after_forward: bool | int | None = None
    precision: MixedPrecisionPolicy = MixedPrecisionPolicy()
    offload: OffloadPolicy = dataclasses.field(default_factory=OffloadPolicy)
    stochastic_rounding: bool = False  # ours: of updates in bf16
    # Fields of FullyShardedDataParallel alone.
    is_replicated: bool = False  # every rank has all parameters, gradients and states
    casts_root_inputs: bool | None = None  # None: as precision says
    buffer_dtype: torch.dtype = torch.float32


def choice_of(mesh, reshard_after_forward, mp_policy, offload_policy, stochastic_rounding=False):
    """A Choice. Raises UnsupportedError, ConfigError: what no engine can do; names the argument."""
    if mesh is not None and mesh.ndim > 2:
        raise UnsupportedError(f"fully_shard(mesh=…): the mesh has {mesh.ndim} dims; give it one (shards), or two (replicas, shards): other axes are "
                               "not there yet in FSDP programs")
    if not isinstance(reshard_after_forward, (bool, int, type(None))):
        raise ConfigError(f"fully_shard(reshard_after_forward={reshard_after_forward!r}): expected True, False, None or a number of ranks")
    if mp_policy.param_dtype not in (None, torch.float32, *LOW):
        raise UnsupportedError(f"fully_shard(mp_policy={mp_policy}): param_dtype is torch.bfloat16, torch.float16, torch.float32 or None")
    # 16-bit gradients are summed in more digits than asked for
    if mp_policy.reduce_dtype not in (None, torch.float32, *LOW):
        raise UnsupportedError(f"fully_shard(mp_policy={mp_policy}): gradients are summed in float32; leave reduce_dtype out")
    return Choice(mesh, reshard_after_forward, mp_policy, offload_policy, stochastic_rounding)


def updates_in_bf16(parameters, precision):
    """Whether all of {name: parameter} are in bf16, which makes gradients, states and the step bf16 too, as in PyTorch.

    Raises  UnsupportedError: trained parameters in another 16-bit dtype, or in bf16 beside other dtypes; names one.
    """
    dtypes = {parameter.dtype for parameter in parameters.values()}
    if dtypes == {torch.bfloat16} and precision.param_dtype in (None, torch.bfloat16):
        return True
    for name, parameter in parameters.items():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise UnsupportedError(f"fully_shard: parameter '{name}' is in {parameter.dtype}, and would be updated in torch.float32; call model.float() and compute in "
                                   "16 bits by mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), or model.to(torch.bfloat16), which steps in bf16, "
                                   "without a param_dtype")
    return False


def configuration(choices, world_size, is_low):
    """The library's configuration for {name of a wrapped module: Choice}; the root's name is "".

    is_low  updates_in_bf16()

    Raises  UnsupportedError, ConfigError: modules that want different things, or a mesh of other ranks.
    """
    root = choices[""]
    stage = 0 if root.is_replicated else 2 if _keeps_parameters(choices) else 3
    zero = {"stage": stage, **_mesh_options(root.mesh, world_size)}
    for name, choice in choices.items():
        for field in ("mesh", "precision", "offload", "is_replicated", "stochastic_rounding"):
            if getattr(choice, field) != getattr(root, field):
                raise UnsupportedError(f"fully_shard: '{name}' and the root have different {field} arguments; give every call the same")
    groups = {choice.reshard_after_forward for choice in choices.values() if _is_group(choice)}
    if len(groups) > 1:
        raise UnsupportedError(f"fully_shard(reshard_after_forward=…): modules ask for groups of {sorted(groups)} ranks; give every call the same number")
    if groups and world_size > 1:
        zero["zero_hpz_partition_size"] = groups.pop()
    if isinstance(root.offload, CPUOffloadPolicy) and stage > 0:
        zero["offload_optimizer"] = {"device": "cpu"}
        if zero["stage"] == 3:
            zero["offload_param"] = {"device": "cpu"}
    dtypes = dict(_MODULES_IN.get(root.precision.param_dtype, {}))
    if dtypes:
        dtypes["data_types"] = {"buffer_dtype": _SHORT[root.buffer_dtype]}
    if dtypes and root.precision.reduce_dtype is torch.float32:
        dtypes["communication_data_type"] = "fp32"
    own = {}
    if root.stochastic_rounding:
        if not is_low:
            raise ConfigError("fully_shard(stochastic_rounding=True): it is for models whose parameters are all in bf16; call model.to(torch.bfloat16), or leave it out")
        own["stochastic_rounding"] = True
    if is_low:
        dtypes = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    inner = sorted((name for name in choices if name), key=lambda name: -name.count("."))
    if inner:
        own["unit_patterns"] = [f"^{re.sub('[.]', '[.]', name)}[.]" for name in inner]
    return {"zero_optimization": zero, "managed_gradient_accumulation": False, "gradient_clipping": 0.0, "train_micro_batch_size_per_gpu": 1, "trireme": own, **dtypes}


def _is_group(choice):
    return isinstance(choice.reshard_after_forward, int) and not isinstance(choice.reshard_after_forward, bool)


def _keeps_parameters(choices):
    """Whether every module is to stay whole from forward to backward; the root alone always may."""
    inner = [choice.reshard_after_forward for name, choice in choices.items() if name] or [choices[""].reshard_after_forward]
    return all(reshard is False for reshard in inner)


def _mesh_options(mesh, world_size):
    if mesh is None:
        return {}
    if mesh.mesh.flatten().tolist() != list(range(world_size)):
        raise UnsupportedError(f"fully_shard(mesh=…): the mesh has the ranks {mesh.mesh.flatten().tolist()} of {world_size}; give it all ranks in "
                               "order: other axes are not there yet in FSDP programs")
    return {"mics_shard_size": mesh.size(1)} if mesh.ndim == 2 and mesh.size(0) > 1 else {}
