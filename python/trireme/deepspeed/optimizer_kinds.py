"""DeepSpeed's classes of optimizers: what initialize() returns is one of them for isinstance()."""
from ..training.optimizers import EngineOptimizer


class DeepSpeedOptimizer:
    """The base of DeepSpeed's optimizers that wrap another, for isinstance()."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """The base of those that shard states, or keep masters of bf16 weights."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """That of stages 1 and 2."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # pylint: disable=invalid-name
    """That of stage 3."""


class _ProgramsOwn(EngineOptimizer):
    """Passes isinstance() as the program's own optimizer."""

    __class__ = property(lambda self: type(self) if self.__dict__.get("_client") is None else type(self._client))


def engine_optimizer(engine, groups, client):
    """The EngineOptimizer of an engine. For isinstance() it is what DeepSpeed returns: below ZeRO and in fp32 the program's own
    optimizer, else one of DeepSpeed's."""
    stage = engine.zero_optimization_stage()
    if stage > 0:
        like = DeepSpeedZeroOptimizer_Stage3 if stage == 3 else DeepSpeedZeroOptimizer
    elif engine.bfloat16_enabled():
        like = ZeROOptimizer
    elif engine.fp16_enabled():
        like = DeepSpeedOptimizer
    else:
        return EngineOptimizer(engine, groups) if client is None else _ProgramsOwn(engine, groups, client)
    kind = type(like.__name__, (EngineOptimizer, like), {"__doc__": EngineOptimizer.__doc__, "__module__": __name__})
    return kind(engine, groups, client)
