"""Where modules begin and end: what a module of one stage does before its first parameter is computed there, so that
one tensor crosses in place of several."""
import contextlib

from . import program


def stages_of_modules(homes):
    """{name: stages} of the modules that have tensors with homes."""
    of_module = {}
    for tensor, stage in homes.items():
        parts = tensor.split(".")[:-1]
        for length in range(len(parts) + 1):
            of_module.setdefault(".".join(parts[:length]), set()).add(stage)
    return of_module


def outermost(module, homes):
    """{name: stage} of the outermost modules in `module` that lie wholly on one stage and have tensors with homes."""
    of_module = stages_of_modules(homes)
    names = dict(module.named_modules(remove_duplicate=False))
    return {name: min(stages) for name, stages in of_module.items()
            if name in names and len(stages) == 1 and (not name or len(of_module[name.rpartition(".")[0]]) > 1)}


def watch(module, engine):
    """From here on, inside of step functions, what a module of one stage computes without parameters is computed there.
    Returns what ends that when it is closed.
    """
    core, hooks = engine.core, contextlib.ExitStack()
    modules = dict(module.named_modules(remove_duplicate=False))

    def leave(*_):
        if program.running() is not None:
            core.leave()

    for name, stage in outermost(module, engine.homes).items():
        def enter(*_, stage=stage):
            if program.running() is not None:
                core.enter(stage)

        hooks.callback(modules[name].register_forward_pre_hook(enter, prepend=True).remove)
        hooks.callback(modules[name].register_forward_hook(leave, always_call=True).remove)
    return hooks
