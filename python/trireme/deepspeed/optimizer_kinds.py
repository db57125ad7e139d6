"""DeepSpeed's classes of optimizers: what initialize() returns is one of them for isinstance()."""
import torch

from ..training.optimizers import EngineOptimizer


class DeepSpeedOptimizer:
    """The base of DeepSpeed's optimizers that wrap another, for isinstance()."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """The base of those that shard states, or keep masters of bf16 weights."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """That of stages 1 and 2."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # pylint: disable=invalid-name
    """That of stage 3."""


class SteeringOptimizer(EngineOptimizer):
    """An EngineOptimizer with the members that DeepSpeed's optimizers have."""

    def backward(self, loss, retain_graph=False):
        """The engine's backward()."""
        self._engine.backward(loss, retain_graph=retain_graph)

    def needs_scaler(self):
        """Whether backward() is to be called on a loss that was scaled: fp16 with a loss scale that follows
        overflows."""
        return self._engine.dynamic_loss_scale() or self._engine.torch_autocast_dtype() is torch.float16

    @property
    def overflow(self):
        """Whether the last step was skipped because a gradient was not finite."""
        return self._engine.global_steps > 0 and not self._engine.was_step_applied()

    @property
    def loss_scale(self):
        """The factor of losses."""
        return self._engine.core.loss_scale

    cur_scale = loss_scale

    @property
    def optimizer(self):
        """The optimizer that initialize() was given, or this one."""
        return self._client or self


class _ProgramsOwn(SteeringOptimizer):
    """Passes isinstance() as the program's own optimizer."""

    __class__ = property(lambda self: type(self) if self.__dict__.get("_client") is None else type(self._client))


def engine_optimizer(engine, groups, client):
    """The SteeringOptimizer of an engine. For isinstance() it is what DeepSpeed returns: below ZeRO and in fp32 the
    program's own optimizer, else one of DeepSpeed's."""
    stage = engine.zero_optimization_stage()
    if stage > 0:
        like = DeepSpeedZeroOptimizer_Stage3 if stage == 3 else DeepSpeedZeroOptimizer
    elif engine.bfloat16_enabled():
        like = ZeROOptimizer
    elif engine.fp16_enabled():
        like = DeepSpeedOptimizer
    else:
        return SteeringOptimizer(engine, groups) if client is None else _ProgramsOwn(engine, groups, client)
    kind = type(like.__name__, (SteeringOptimizer, like), {"__doc__": EngineOptimizer.__doc__, "__module__": __name__})
    return kind(engine, groups, client)
