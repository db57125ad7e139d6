"""Which instructions a stage executes when. TrainSchedule and its kin are views of trireme::pipeline::Schedule; a
subclass of PipeSchedule becomes one with of_all_stages(), to be checked, simulated and executed."""
import abc
import functools

from ...._native import core
from ....errors import ConfigError
from ...missing import names_of
from ..utils import call_to_str

__getattr__ = names_of(__name__)


class PipeInstruction:
    """One instruction; its keyword arguments are members."""

    def __init__(self, **kwargs):
        self.name = type(self).__name__
        self.kwargs = kwargs
        self.__dict__.update(kwargs)

    def __repr__(self):
        return call_to_str(self.name, **self.kwargs)


class OptimizerStep(PipeInstruction):
    """A step with the optimizer, and gradients of zero. After ReduceGrads and ReduceTiedGrads."""


class ReduceGrads(PipeInstruction):
    """Gradients are reduced over the copies of a stage."""


class ReduceTiedGrads(PipeInstruction):
    """Gradients of tied weights are added over the stages that have them."""


class BufferOpInstruction(PipeInstruction):
    """An instruction about the micro-batch in a buffer."""

    def __init__(self, buffer_id, **kwargs):
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """The next micro-batch comes into the buffer: inputs on the first stage, labels on the last one."""


class ForwardPass(BufferOpInstruction):
    """outputs = forward(inputs)"""


class BackwardPass(BufferOpInstruction):
    """Gradients of the inputs and of the weights, from those of the outputs."""


class BackwardInput(BufferOpInstruction):
    """Gradients of the inputs alone, for which the stage before waits."""


class BackwardWeight(BufferOpInstruction):
    """Gradients of the weights, after BackwardInput."""


class SendActivation(BufferOpInstruction):
    """Outputs go to the next stage, which has a RecvActivation for them."""


class RecvActivation(BufferOpInstruction):
    """Inputs come from the stage before."""


class SendGrad(BufferOpInstruction):
    """Gradients of received inputs go to the stage before; None for an input that needs none."""


class RecvGrad(BufferOpInstruction):
    """Gradients of sent outputs come from the next stage."""


class CommitP2P(PipeInstruction):
    """Accepted, and does nothing: messages leave as soon as they are sent, and what receives waits for its own."""


_INSTRUCTIONS = {kind.__name__: kind for kind in (
    OptimizerStep, ReduceGrads, ReduceTiedGrads, LoadMicroBatch, ForwardPass, BackwardPass, BackwardInput, BackwardWeight, SendActivation,
    RecvActivation, SendGrad, RecvGrad)}


def _kind_of(instruction):
    for kind in type(instruction).__mro__:
        if _INSTRUCTIONS.get(kind.__name__) is kind:
            return kind.__name__
    raise ConfigError(f"schedule: {instruction!r} is no instruction of a pipeline; derive its class from one of {', '.join(_INSTRUCTIONS)}")


class PipeSchedule(abc.ABC):
    """Iterates over the steps of one stage. A subclass implements steps(), and num_pipe_buffers() to save memory.

    micro_batches  of one optimizer step; stages  of the pipeline; stage_id  whose steps these are.
    Each step is a list of instructions; between two steps all stages may wait for each other.
    Raises  ConfigError: an argument out of its range.
    """

    def __init__(self, micro_batches, stages, stage_id):
        for name, value in (("micro_batches", micro_batches), ("stages", stages)):
            if value < 1:
                raise ConfigError(f"{type(self).__name__}: {name}={value}; use 1 or more")
        if not 0 <= stage_id < stages:
            raise ConfigError(f"{type(self).__name__}: stage_id={stage_id}; with {stages} stages use 0 to {stages - 1}")
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self._iterator = None

    @abc.abstractmethod
    def steps(self):
        """Yields lists of instructions."""

    def num_pipe_buffers(self):
        """How many micro-batches this stage keeps at once."""
        return self.micro_batches

    @classmethod
    def of_all_stages(cls, micro_batches, stages):
        """The schedule of all stages as a trireme.pipe.Schedule, for check() and simulate().

        Which micro-batch an instruction is about follows from buffers: load n is of micro-batch n, messages carry it
        on.
        Raises  ConfigError: an instruction whose buffer is empty, or that receives what nobody sends.
        """
        schedules = [cls(micro_batches, stages, stage) for stage in range(stages)]
        streams = [[[(_kind_of(instruction), getattr(instruction, "buffer_id", -1)) for instruction in step
                     if not isinstance(instruction, CommitP2P)] for step in each.steps()] for each in schedules]
        return core.schedule_from_buffers(cls.__name__, micro_batches, streams, [each.num_pipe_buffers() for each in schedules])

    @property
    def stage(self):
        """The stage whose steps these are."""
        return self.stage_id

    @property
    def num_stages(self):
        """The number of stages."""
        return self.stages

    @property
    def num_micro_batches(self):
        """The number of micro-batches."""
        return self.micro_batches

    @property
    def is_first_stage(self):
        """Whether the stage is the first one."""
        return self.stage_id == 0

    @property
    def is_last_stage(self):
        """Whether the stage is the last one."""
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id):
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id):
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id):
        assert self._valid_micro_batch(micro_batch_id)
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self):
        self._iterator = None
        return self

    def __next__(self):
        if self._iterator is None:
            self._iterator = self.steps()
        return next(self._iterator)


_made = functools.lru_cache(maxsize=16)(core.make_schedule)


class _View(PipeSchedule):
    """One stage of a schedule of the library."""

    _whole = None  # trireme.pipe.Schedule
    _row = property(lambda self: self.stage_id)  # of `_whole`

    def steps(self):
        for step in self._whole.streams[self._row]:
            yield [_INSTRUCTIONS[each.name](**({} if each.buffer < 0 else {"buffer_id": each.buffer})) for each in step]

    def num_pipe_buffers(self):
        return self._whole.buffers[self._row][0]


class TrainSchedule(_View):
    """One forward, one backward (1F1B). Its results are those of accumulating gradients over the micro-batches."""

    _whole = property(lambda self: _made("1f1b", self.stages, self.micro_batches))


class InferenceSchedule(_View):
    """Forwards alone, in two buffers."""

    _whole = property(lambda self: _made("inference", self.stages, self.micro_batches))


class DualPipeVSchedule(_View):
    """DualPipeV: each stage has two parts of the model, which instructions name as `phase`, 0 on the way out and 1 on
    the way back.

    A buffer is phase · micro_batches + micro_batch. Backward passes are split, as in its paper; DeepSpeed's are not.

    forward_only  without backward passes. Raises ConfigError: fewer than 2 · stages micro-batches.
    """

    _whole = property(lambda self: _made("dualpipe-v", self.stages, self.micro_batches, 2))
    _OF_FORWARD = ("LoadMicroBatch", "ForwardPass", "SendActivation", "RecvActivation")

    def __init__(self, micro_batches, stages, stage_id, forward_only=False):
        super().__init__(micro_batches, stages, stage_id)
        if micro_batches < 2 * stages:
            raise ConfigError(f"DualPipeVSchedule: micro_batches={micro_batches}; DualPipeV of {stages} stages needs {2 * stages} or more")
        self.forward_only = forward_only

    def steps(self):
        for step in self._whole.streams[self._row]:
            made = [_INSTRUCTIONS[each.name](**self._arguments_of(each)) for each in step if not self.forward_only or each.name in self._OF_FORWARD]
            if made:
                yield made

    def _arguments_of(self, instruction):
        if instruction.buffer < 0:
            return {}
        phase = {} if instruction.name == "LoadMicroBatch" else {"phase": instruction.chunk}
        return {"buffer_id": instruction.chunk * self.micro_batches + instruction.micro_batch, **phase}

    def num_pipe_buffers(self):
        return 2 * self.micro_batches

    @classmethod
    def of_all_stages(cls, micro_batches, stages):
        return _made("dualpipe-v", stages, micro_batches, 2)


class DataParallelSchedule(_View):
    """Gradients accumulated on every rank by itself, as without a pipeline."""

    _whole = property(lambda self: core.data_parallel_schedule(self.micro_batches))
    _row = 0
