"""Where modules begin: what comes from another stage is moved to the module's before its first operator, so that one
tensor crosses in place of several."""
import collections.abc

import torch

from . import program
from .containers import rebuilt


def outermost(module, homes):
    """{name: stage} of the outermost modules in `module` that lie wholly on one stage and have tensors with homes."""
    of_module = {}
    for tensor, stage in homes.items():
        parts = tensor.split(".")[:-1]
        for length in range(len(parts) + 1):
            of_module.setdefault(".".join(parts[:length]), set()).add(stage)
    names = dict(module.named_modules(remove_duplicate=False))
    return {name: min(stages) for name, stages in of_module.items()
            if name in names and len(stages) == 1 and (not name or len(of_module[name.rpartition(".")[0]]) > 1)}


def watch(module, engine):
    """Modules of `module` move their arguments from here on, inside of step functions."""
    modules = dict(module.named_modules(remove_duplicate=False))
    for name, stage in outermost(module, engine.homes).items():
        modules[name].register_forward_pre_hook(_mover(engine.core, stage), with_kwargs=True)


def _mover(core, stage):
    def move(_module, args, kwargs):
        if program.running() is None:
            return None
        return _moved(core, args, stage), _moved(core, kwargs, stage)

    return move


def _moved(core, value, stage):
    """`value` with its tensors on `stage`; the same object where none moves."""
    if isinstance(value, torch.Tensor):
        return value if core.home_of(value) in (None, stage) else core.move(value, stage)
    if isinstance(value, collections.abc.MutableMapping):
        moved = {key: _moved(core, inner, stage) for key, inner in value.items()}
        return value if all(moved[key] is inner for key, inner in value.items()) else rebuilt(value, moved)
    if isinstance(value, (list, tuple)):
        moved = [_moved(core, inner, stage) for inner in value]
        return value if all(one is inner for one, inner in zip(moved, value)) else rebuilt(value, moved)
    return value
