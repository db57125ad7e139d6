"""The meaning of operators: answers of the library's one table (src/operators), of torch's schemas and tags."""
import functools

import torch

from ._native import core


@functools.cache
def meaning(func):
    """core.OperatorMeaning of an overload, such as torch.ops.aten.add.Tensor."""
    return core.operator_meaning(func._schema.name, func._schema.overload_name)  # pylint: disable=protected-access


def fills_at_random(func):
    """Whether it writes random numbers, or gives new ones, whatever its first argument has had."""
    return torch.Tag.nondeterministic_seeded in func.tags and not meaning(func).reads_first


def gives_views(func):
    """Whether results are views of an argument."""
    schema = func._schema  # pylint: disable=protected-access
    return not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)
