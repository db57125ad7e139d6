"""DeepSpeed's names of a pipeline under DualPipeV: a PipelineModule of schedule="dualpipe-v", whose ranks have two
parts each."""
from ....errors import ConfigError, PipelineSpecError
from ...missing import names_of
from .engine import PipelineEngine
from .module import PipelineModule

__getattr__ = names_of(__name__)


class DualPipeVModule(PipelineModule):
    """PipelineModule(schedule="dualpipe-v", chunks=2): rank r of a pipeline has parts r and 2 · num_stages − 1 − r of
    the model.

    Arguments are PipelineModule's. Raises  PipelineSpecError: another schedule or number of chunks. As PipelineModule.
    """

    def __init__(self, *args, schedule="dualpipe-v", chunks=2, **options):
        if (schedule, chunks) != ("dualpipe-v", 2):
            raise PipelineSpecError(f"DualPipeVModule: schedule={schedule!r}, chunks={chunks}; leave them out, or use PipelineModule")
        super().__init__(*args, schedule=schedule, chunks=chunks, **options)
        self.active_phase = 0

    def activate_phase(self, phase):
        """forward() is that of phase 0, the part on the way out, or 1, the part on the way back. Raises ConfigError:
        another phase."""
        if phase not in (0, 1):
            raise ConfigError(f"activate_phase: {phase!r}; use 0 (on the way out) or 1 (on the way back)")
        self.active_phase = phase

    def forward(self, forward_input, chunk=None):
        """The layers of the active phase, or of part `chunk` of this stage."""
        return super().forward(forward_input, self.active_phase if chunk is None else chunk)


class DualPipeVEngine(PipelineEngine):
    """The PipelineEngine of a DualPipeVModule, which initialize() makes."""

    # pylint: disable=abstract-method
