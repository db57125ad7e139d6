"""smp.init(): reads the configuration and joins the ranks."""
from .. import agreement, ranks as world_ranks
from .._native import core
from ..errors import StateError
from ..log import logger
from . import config, messages
from .config import state

# Variables of smp's own transport, which is not the library's.
_OF_TRANSPORT = ("SMP_NCCL_THROTTLE_LIMIT", "SMP_DISABLE_D2D", "SMP_D2D_GPU_BUFFER_SIZE_BYTES")


def init(cfg_dict=None):
    """Reads the configuration and joins the ranks. Collective.

    cfg_dict    smp's keys; those of the variable SM_HP_MP_PARAMETERS, in JSON, are taken instead of those here

    Raises  ConfigError, UnsupportedError: a key, its value, or a combination; the text names the fix. StateError: a
            second call with another configuration.
    """
    options = config.checked(config.given(cfg_dict))
    world_ranks.join("nccl" if options.get("ddp_dist_backend") == "nccl" else "gloo")
    world = world_ranks.world()
    cfg = config.resolved(options, world.size)
    agreement.check(world, vars(cfg), "smp.init")
    if state.is_initialized:
        if vars(state.cfg) != vars(cfg):
            different = ", ".join(f"`{key}` ({vars(state.cfg)[key]!r}, now {value!r})" for key, value in vars(cfg).items() if vars(state.cfg)[key] != value)
            raise StateError(f"smp.init: it was called before with another {different}; a process has one configuration: call it once")
        return
    topology = core.place(cfg.placement_strategy, world.size // (cfg.pipeline_parallel_degree * cfg.tensor_parallel_degree),
                          cfg.pipeline_parallel_degree, cfg.tensor_parallel_degree)
    state.set(cfg=cfg, world=world, topology=topology, place={axis: topology.position_of(world.rank, axis) for axis in ("data", "pipe", "tensor")})
    messages.make_groups()
    if world.rank == 0 and (given := [name for name in _OF_TRANSPORT if core.environment(name) is not None]):
        logger.info("smp.init: %s of the environment, for smp's own transport, change%s nothing: a stage sends what the next one needs, as soon as it has it",
                    ", ".join(given), "s" if len(given) == 1 else "")
