"""Results of a step function, as each micro-batch has them."""
import torch

from ..errors import ShapeError
from .containers import rebuilt


class StepOutput:
    """A tensor that a step function returned, as each micro-batch has it, in their order.

    shares      what part of the batch's samples each micro-batch has; None: all have as many
    """

    def __init__(self, outputs, shares=None):
        self._outputs, self._shares = list(outputs), shares

    @property
    def outputs(self):
        """The list of tensors."""
        return self._outputs

    def reduce_sum(self):
        """Their sum."""
        return self._sum("reduce_sum")

    def reduce_mean(self):
        """Their mean; each counts by its samples."""
        if self._shares is None:
            return self._sum("reduce_mean") / len(self._outputs)
        return StepOutput([output * share for output, share in zip(self._outputs, self._shares)])._sum("reduce_mean")

    def concat(self):
        """One tensor, joined along dim 0: that of the samples."""
        if any(output.dim() == 0 for output in self._outputs):
            raise ShapeError("StepOutput.concat(): the outputs have no dims to join along; use stack(), reduce_mean() or reduce_sum()")
        self._check_shapes("concat", first=1)
        return torch.cat(self._outputs)

    def stack(self):
        """One tensor with a new dim 0, of the micro-batches."""
        self._check_shapes("stack")
        return torch.stack(self._outputs)

    def __repr__(self):
        return f"StepOutput({self._outputs})"

    def _sum(self, name):
        self._check_shapes(name)
        total = self._outputs[0]
        for output in self._outputs[1:]:
            total = total + output
        return total

    def _check_shapes(self, name, first=0):
        shapes = [tuple(output.shape) for output in self._outputs]
        if len({shape[first:] for shape in shapes}) > 1:
            raise ShapeError(f"StepOutput.{name}(): micro-batches have outputs of the shapes {shapes}; read .outputs")


def merged(results, shares=None):
    """The result of a step, of the function's results for each micro-batch: a StepOutput in the place of each tensor,
    also within tuples, lists and dicts, and a list of all values in the place of anything else. `shares`: StepOutput's.

    Raises  ShapeError: tensors in containers that differ between micro-batches.
    """
    return _merged(list(results), "the result", shares)


def _merged(results, path, shares):
    first = results[0]
    if all(isinstance(result, torch.Tensor) for result in results):
        return StepOutput(results, shares)
    if all(type(result) is type(first) for result in results):
        if isinstance(first, dict) and all(list(result) == list(first) for result in results):
            return rebuilt(first, {key: _merged([result[key] for result in results], f"{path}[{key!r}]", shares) for key in first})
        if isinstance(first, (list, tuple)) and all(len(result) == len(first) for result in results):
            return rebuilt(first, [_merged([result[index] for result in results], f"{path}[{index}]", shares) for index in range(len(first))])
    if any(_holds_tensors(result) for result in results):
        raise ShapeError(f"smp.step: {path} has tensors in one micro-batch and something else in another ({', '.join(map(_named, results))}); return the same "
                         "structure for each, or numbers by .item()")
    return results


def _holds_tensors(value):
    """Whether `value` is a tensor, or a list, tuple, set or dict with one in it."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, torch.Tensor) or isinstance(value, (list, tuple, set, frozenset)) and any(map(_holds_tensors, value))


def _named(value):
    return f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") and not isinstance(value, torch.Tensor) else type(value).__name__
