"""Marks on parameters that the program has cut over ranks itself, as Megatron's layers set them."""
from ..errors import ConfigError

_NAMES = ("tensor_model_parallel", "model_parallel")


def marked(module):
    """{name: the mark} of the parameters of `module` that have one."""
    found = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        for mark in _NAMES:
            if getattr(parameter, mark, False):
                found.setdefault(name, mark)
    return found


def check_none(world, module, ranks):
    """Collective. Raises ConfigError, on every rank, where one has a marked parameter: rules that cut layers over
    `ranks` ranks would cut a slice once more, and take that of the first rank for the whole."""
    problem = ""
    if found := marked(module):
        name, mark = next(iter(found.items()))
        problem = (f"tensor_parallel.autotp_size={ranks} cuts whole layers, and parameter '{name}' has {mark} = True, so the program has cut it itself; leave "
                   f"tensor_parallel out, or set {mark} = False where a rank has the whole")
    if problem := next(filter(None, world.gather(problem)), ""):
        raise ConfigError(problem)
