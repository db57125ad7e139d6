"""Lists, tuples, sets and dicts that programs give and get."""
import collections.abc
import copy


def rebuilt(container, elements):
    """A container of the class of `container`, with what else it has, of these elements; of a dict a dict of the same
    keys."""
    if isinstance(container, collections.abc.MutableMapping):
        made = copy.copy(container)
        if isinstance(made, collections.UserDict) and made.data is container.data:
            made.data = dict(container.data)
        for key, value in elements.items():
            made[key] = value  # not by update(), which outputs of transformers refuse
        return made
    if hasattr(container, "_make"):  # a namedtuple
        return container._make(elements)
    return type(container)(elements)
