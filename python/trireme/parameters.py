"""The order of parameters, which all ranks have alike: that in which models have got them."""
import itertools
import weakref

from .activations import wholes

# By storage, since a tensor of state_dict() is not the parameter itself: (number, parameter)
_numbers, _known = itertools.count(), {}


def number(_module, _name, parameter):
    """Gives a parameter its place in the order in which all ranks gather: that in which models have got their
    parameters.

    Programs pass parameters in sets, whose order differs by rank.
    """
    if parameter is not None:
        key = _storage_of(parameter)
        reference = weakref.ref(parameter)  # the same object each time
        if numbered(parameter) is not parameter:
            weakref.finalize(parameter, _forget, key, reference)
        _known[key] = (next(_numbers), reference)


def is_numbered(parameter):
    """Whether it has a place: an engine knows it, or zero.Init."""
    return _place_at(_storage_of(parameter)) is not None


def in_order(tensors):
    """Sorted; those without a place come first."""
    return sorted(tensors, key=lambda tensor: (_place_at(_storage_of(tensor)) or (-1,))[0])


def numbered(tensor):
    """The parameter that has this storage; None: none has a place."""
    place = _place_at(_storage_of(tensor))
    return None if place is None else place[1]()


def _place_at(key):
    """(number, parameter) of the parameter that has the storage `key` now. One that has got another storage since, as
    at the end of an engine, has left an address that may be another parameter's by now: on some ranks alone."""
    place = _known.get(key)
    parameter = None if place is None else place[1]()
    return None if parameter is None or _storage_of(parameter) != key else place


def _forget(key, reference):
    """The parameter of `reference` has gone."""
    if key in _known and _known[key][1] is reference:
        del _known[key]


def _storage_of(tensor):
    return None if wholes.tells_wholes(tensor) else wholes.storage_of(tensor)._cdata  # pylint: disable=protected-access
