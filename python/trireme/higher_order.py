"""Lets Python's higher-order operators (vmap, torch.func, flex attention, checkpoint wrappers) run while operators are
intercepted.

The library sees operators through a dispatch key that is on for the whole thread. A higher-order operator is
implemented in Python, per key, and knows nothing of that one: it is told to pass it by. What it calls inside is seen as
usual.
"""
import torch
from torch import _ops

from . import ranks
from .patches import Added, Patches

_KEY = torch._C._dispatch_key_parse("TESTING_ONLY_GenericMode")  # pylint: disable=protected-access


def _pass_by(keys):
    """For the operators that exist, and by `keys` for those that will be made."""
    for operator in _operators():
        operator.fallthrough(_KEY)
    keys.append(_KEY)

    def undo():
        keys.remove(_KEY)
        for operator in _operators():
            operator.non_fallthrough_keys = operator.non_fallthrough_keys.add(_KEY)

    return undo


def _operators():
    return list(_ops._higher_order_ops.values())  # pylint: disable=protected-access


PATCHES = Patches(__name__, "an engine is made, or `zero.Init` is entered", [
    Added("torch._ops", "_HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS",
          "`vmap`, flex attention and other operators of higher order let the key pass by which sees operators", _pass_by),
], ranks.living)
