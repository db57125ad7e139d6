"""The order of parameters, which all ranks have alike: that in which models have got them."""
import itertools
import weakref

from .activations import wholes

# Storage: (number, parameter), since a tensor of state_dict() is not the parameter itself
_numbers, _known = itertools.count(), {}


def number(_module, _name, parameter):
    """Gives a parameter its place in the order in which all ranks gather: that in which models have got their
    parameters.

    Programs pass parameters in sets, whose order differs by rank.
    """
    if parameter is not None:
        key = _storage_of(parameter)
        if key not in _known:
            weakref.finalize(parameter, _known.pop, key, None)
        _known[key] = (next(_numbers), weakref.ref(parameter))


def is_numbered(parameter):
    """Whether it has a place: an engine knows it, or zero.Init."""
    return _storage_of(parameter) in _known


def in_order(tensors):
    """Sorted; those without a place come first."""
    return sorted(tensors, key=lambda tensor: _known.get(_storage_of(tensor), (-1,))[0])


def numbered(tensor):
    """The parameter that has this storage; None: none has a place."""
    return _known[_storage_of(tensor)][1]() if is_numbered(tensor) else None


def _storage_of(tensor):
    return wholes.storage_of(tensor)._cdata  # pylint: disable=protected-access
