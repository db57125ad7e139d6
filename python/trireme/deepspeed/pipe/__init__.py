"""Pipelines of layers: their specification, and schedules as values.

    schedule = trireme.pipe.make_schedule("zb-h1", stages=4, micro_batches=8)
    timeline = schedule.simulate(forward=1, backward_input=1, backward_weight=0.5, message=0.1)
    print(timeline.text(0.5), timeline.bubble_share, timeline.peak_activations)
"""
from ..._native import core
from ...errors import ConfigError
from ..missing import names_of
from ..runtime.pipe.dualpipev import DualPipeVModule
from ..runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec

__getattr__ = names_of(__name__)

Instruction, Schedule, Timeline = core.PipelineInstruction, core.PipelineSchedule, core.PipelineTimeline
make_schedule, schedule_names = core.make_schedule, core.schedule_names


def assemble(name, micro_batches, computations, *, chunks=1, placement="loop"):
    """A schedule of one's own, of which loads, messages, buffers and the optimizer step are added.

    computations  for each stage a list of (instruction, chunk, micro_batch) in order, such as ("ForwardPass", 0, 3);
                  the instructions are ForwardPass, and BackwardPass or its halves BackwardInput and BackwardWeight.
    placement     "loop": chunk c of stage s is part c · stages + s of the model; "v": of two chunks the second one runs
                  back.
    Raises  ConfigError: a computation that is missing, or is there twice.
    """
    if placement not in ("loop", "v"):
        raise ConfigError(f"assemble: placement={placement!r}; use \"loop\" or \"v\"")
    return core.assemble_schedule(name, micro_batches, chunks, placement == "v", computations)
