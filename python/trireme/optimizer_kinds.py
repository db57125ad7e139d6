"""DeepSpeed's classes of optimizers: what initialize() returns is one of them for isinstance()."""


class DeepSpeedOptimizer:
    """The base of DeepSpeed's optimizers that wrap another, for isinstance()."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """The base of those that shard states, or keep masters of bf16 weights."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """That of stages 1 and 2."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # pylint: disable=invalid-name
    """That of stage 3."""
