"""model.register_comm_hook(): the program's own way to join the gradients of data-parallel ranks."""
import torch

from .._native import core
from ..errors import ConfigError, ShapeError, StateError, UnsupportedError
from . import ranks
from .config import state

_CALL = "DistributedModel.register_comm_hook()"
_ELEMENTS = 25 * 2**18  # of a bucket: 25 MiB, as DDP's


class Bucket:
    """Gradients of several parameters of this rank, as torch.distributed.GradBucket has them."""

    def __init__(self, index, parameters, buffer):
        self._index, self._parameters, self._buffer = index, parameters, buffer
        self.last = False

    def index(self):
        """Its number; gradients that are there first come first."""
        return self._index

    def buffer(self):
        """All of them, [n], in fp32."""
        return self._buffer

    def set_buffer(self, tensor):
        """`tensor` is the buffer from here on."""
        self._buffer = tensor

    def is_last(self):
        """Whether no bucket follows."""
        return self.last

    def parameters(self):
        """The parameters, in order."""
        return list(self._parameters)

    def gradients(self):
        """Views of the buffer, each shaped as its parameter."""
        parts = self._buffer.split([parameter.numel() for parameter in self._parameters])
        return [part.as_strided(parameter.size(), parameter.stride(), part.storage_offset()) for part, parameter in zip(parts, self._parameters)]


class CommHook:
    """`function(given, bucket)` gives a future of the buffer that the optimizer takes."""

    def __init__(self, given, function):
        if not callable(function):
            raise ConfigError(f"{_CALL}: {type(function).__name__} cannot be called; give a function of (state, bucket)")
        if not state.cfg.ddp:
            raise ConfigError(f"{_CALL} needs `ddp` = true in smp.init(); give it")
        for key, is_there in (("shard_optimizer_state", state.cfg.shard_optimizer_state), ("sharded_data_parallel_degree", state.cfg.sharded_data_parallel_degree > 1),
                              ("tensor_parallel_degree", ranks.tp_size() > 1), (state.cfg.half, state.cfg.half is not None)):
            if is_there:
                raise UnsupportedError(f"{_CALL}: beside `{key}` no rank has whole gradients of its own samples in fp32 for a hook; leave one of them out")
        self._given, self._function = given, function
        self._has_run = False

    def begin(self):
        """The gradients that were there are used up."""
        self._has_run = False

    def refuse_late(self):
        """Raises StateError: a backward pass came after reduce()."""
        if self._has_run:
            raise StateError(f"{_CALL}: a backward pass has added to gradients that the hook has joined already; call clip_master_grads() when the last step function before "
                             "optimizer.step() has run")

    def reduce(self, engine):
        """Lets the hook join gradients, once for each step. Collective."""
        if self._has_run:
            return
        own = [parameter for name, parameter in engine.module.named_parameters() if engine.homes[name] == engine.stage and parameter.requires_grad]
        sums = {parameter: core.sum_of_this_rank(parameter) for parameter in own if core.has_gradient(parameter)}
        if any(found is None for found in sums.values()):
            raise UnsupportedError(f"{_CALL}: gradients of this engine are joined in each backward pass; leave out what makes them so (a deterministic order, offloading)")
        for found in sums.values():
            found.mul_(engine.divisor)  # sums are divided already
        engine.core.reduce_gradients()  # also tells which parameters have one on some rank
        self._has_run = True
        parts = {parameter: part for parameter in reversed(own) if (part := core.gradient_part(parameter)) is not None}
        with torch.no_grad():
            buckets = _buckets(parts, sums)
            for bucket, result in [(bucket, self._function(self._given, bucket)) for bucket in buckets]:
                for part, gradient in zip((parts[parameter] for parameter in bucket.parameters()), _joined(bucket, result)):
                    part.copy_(gradient)
        for parameter in parts:
            core.gradient_written(parameter)


def _buckets(parts, sums):
    """The buckets of the gradients of these parameters, zeros where this rank has none."""
    groups, room = [], 0
    for parameter, part in parts.items():
        if not groups or room < part.numel():
            groups.append([])
            room = _ELEMENTS
        groups[-1].append(parameter)
        room -= part.numel()
    made = []
    for index, parameters in enumerate(groups):
        buffer = torch.cat([sums[one] if one in sums else torch.zeros(one.numel(), device=one.device) for one in parameters])
        made.append(Bucket(index, parameters, buffer))
    if made:
        made[-1].last = True
    return made


def _joined(bucket, result):
    """The flat gradients of a bucket, of the hook's result."""
    if not isinstance(result, torch._C.Future):  # pylint: disable=protected-access
        raise ShapeError(f"{_CALL}: the hook returned {type(result).__name__}; expected a torch.futures.Future of the bucket's buffer")
    found = result.wait()
    if isinstance(found, (list, tuple)) and len(found) == 1:
        found = found[0]
    count = sum(parameter.numel() for parameter in bucket.parameters())
    if not isinstance(found, torch.Tensor) or found.numel() != count:
        raise ShapeError(f"{_CALL}: the hook's future has {list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__}; expected {count} elements, those of "
                         "the bucket's buffer")
    return found.flatten().split([parameter.numel() for parameter in bucket.parameters()])
