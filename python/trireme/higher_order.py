"""Lets Python's higher-order operators (vmap, torch.func, flex attention, checkpoint wrappers) run while operators are
intercepted.

The library sees operators through a dispatch key that is on for the whole thread. A higher-order operator is
implemented in Python, per key, and knows nothing of that one: it is told to pass it by. What it calls inside is seen as
usual.
"""
import torch
from torch import _ops

_KEY = torch._C._dispatch_key_parse("TESTING_ONLY_GenericMode")  # pylint: disable=protected-access


def pass_by():
    """For the operators that exist, and those that will be made."""
    for operator in list(_ops._higher_order_ops.values()):  # pylint: disable=protected-access
        operator.fallthrough(_KEY)
    _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_KEY)  # pylint: disable=protected-access
