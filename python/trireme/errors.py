"""The exceptions of this package. Each is also of the built-in type that DeepSpeed raises in its place."""


class Error(Exception):
    """Base of all of them."""


class ConfigError(Error, ValueError, AssertionError):
    """A configuration key, its value or their combination; the text names the fix."""


class BatchSizeError(ConfigError):
    """The batch triple does not multiply out."""


class PipelineSpecError(ConfigError, RuntimeError):
    """Layers, stages or a partition of a pipeline that do not fit each other."""


class UnsupportedError(ConfigError, NotImplementedError):
    """Known, but not there yet."""


class ShapeError(Error, ValueError, RuntimeError, AssertionError):
    """An argument of the wrong shape, dtype or layout."""


class StateError(Error, ValueError, RuntimeError, AssertionError):
    """A call at the wrong moment, such as step() without a gradient."""


class PipelineError(StateError):
    """A call that an engine of a pipeline does not take: forward(), backward() or step()."""


class DataError(Error, ValueError):
    """A data set that cannot be read or is empty."""


class IoError(Error, OSError):
    """A file or folder."""


class CheckpointError(Error, RuntimeError, AssertionError):
    """A checkpoint that does not match or is damaged."""


class TornLoadError(CheckpointError):
    """A load that ended half-way: what it was to fill is a mixture."""


class CommError(Error, RuntimeError):
    """Ranks lost each other; the group cannot be used any more."""


class PeerLostError(CommError):
    """A rank died, left or raised."""


class CommTimeoutError(CommError, TimeoutError):
    """A rank did not arrive in time."""


class DivergedError(CommError):
    """Ranks called different operations at the same point."""


class InternalError(Error, RuntimeError):
    """A bug of this package."""
