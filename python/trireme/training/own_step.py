"""step() of a program's optimizer object, where the library takes steps in its place."""
import functools
import itertools
import types

from torch.optim import optimizer as torchs


def set_step(optimizer, step):
    """`optimizer.step()` is `step(optimizer, …)` from here on, between the hooks that a program has registered, as
    torch's. A scheduler that has wrapped the one before finds its mark again; the library tells it of steps."""
    def step_between_hooks(self, *args, **kwargs):
        before = itertools.chain(torchs._global_optimizer_pre_hooks.values(), self._optimizer_step_pre_hooks.values())  # pylint: disable=protected-access
        args = (self, *args)
        for hook in list(before):
            changed = hook(self, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        result = step(*args, **kwargs)
        after = itertools.chain(self._optimizer_step_post_hooks.values(), torchs._global_optimizer_post_hooks.values())  # pylint: disable=protected-access
        for hook in list(after):
            hook(self, args, kwargs)
        return result

    if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer.step = types.MethodType(step_between_hooks, optimizer)
        return
    optimizer.step = functools.partial(step_between_hooks, optimizer)
    optimizer.step._wrapped_by_lr_sched = True  # pylint: disable=protected-access
