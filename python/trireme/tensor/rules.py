"""How operators of a program's own run on slices of layers that ranks share."""
from .._native import core


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
