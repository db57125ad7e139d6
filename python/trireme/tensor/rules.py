"""How operators of a program's own run on slices of layers that ranks share."""
import torch

from .._native import core
from ..errors import ConfigError


def register_partition_rule(op, rule):
    """From now on `rule` says how the operator `op` ("mine::product", or one overload, "mine::product.out") runs on
    slices of layers.

    `rule(call)` gives None, and the operator runs on whole tensors, which are gathered; or ({argument: dim}, results):
    the dim in which each tensor argument is cut for the operator, others being whole, and for each result the dim in
    which it is cut, or "sum" where ranks add their results up. It is the same on all ranks that share layers:
    call.name, call.cut_dim(i) (-1: whole), call.sizes(i) (the whole's), call.is_tensor(i), call.value(i) of what is no
    tensor, len(call).

    Raises  ConfigError: no name of an operator's form, or no function. In a run, StateError: a rule's answer is not
            what the operator gives.
    """
    core.register_partition_rule(op, rule)


def works_by_element(function):
    """Says of a torch.autograd.Function that its forward() and backward() compute each element of the result of those
    at the same place: it runs on slices of layers then. Returns it, so that it may stand above the class.

    Raises  ConfigError: no subclass of torch.autograd.Function.
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise ConfigError(f"works_by_element: {function!r} is no subclass of torch.autograd.Function")
    function.trireme_works_by_element = True
    return function
