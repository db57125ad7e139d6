"""Window: the gradients of a tree from one step to the next, which are what parameter.grad is."""
from .._native import core
from ..errors import StateError, UnsupportedError
from .gradients import Gradient, PartGradient


class Window:
    """Which parameters have a gradient, and whose memory a step will read; when backward passes reduce."""

    def __init__(self, tree):
        self._tree = tree
        self.number = 0  # of windows that have ended
        self._reduced = None  # the engine's count of gradients when they were reduced last
        self._gradients = {}  # Gradient by parameter
        self._standing = set()  # parameters whose gradient of the last step the program has not dropped
        self._dropped = set()  # and those of this window that it has
        self._wants_sync, self._wants_all_reduce, self._defers = True, True, False

    def set_sync(self, is_on):
        """Whether backward passes reduce gradients."""
        self._wants_sync = is_on
        self.follow_sync()

    def set_all_reduce(self, is_on):
        """Whether they do it over replicas. Here they reduce over all ranks or over none, which gives the same sum in
        the end."""
        self._wants_all_reduce = is_on
        self.follow_sync()

    def follow_sync(self):
        """The engine, once it is there, does what was set."""
        defers = not (self._wants_sync and self._wants_all_reduce)
        if not self._tree.is_sharded or self._defers == defers:
            return
        self._defers = defers
        # Autograd adds up in the dtype of the weights; gradients that are reduced at once are added up in fp32
        if not self._tree.dtypes.rounds:
            self._tree.engine.core.defer_reductions(self._defers)

    def _count(self):
        """The number of gradients that backward passes have given."""
        return self._tree.engine.core.gradient_count if self._tree.is_sharded else 0

    def reduce(self):
        """Reduces what backward passes have given. Collective where there is some."""
        count = self._count()
        if count != self._reduced:
            self._tree.engine.core.reduce_gradients()
            self._reduced = count

    def gradient_of(self, parameter):
        """parameter.grad. Collective where this rank's backward passes gave none."""
        if not self._tree.is_sharded or not parameter.requires_grad or (self._dropped and parameter in self._dropped):
            return None
        if self._standing and parameter in self._standing:
            raise StateError(f"parameter.grad of '{self._tree.name(parameter)}': optimizer.step() has taken this gradient; read it before the step, or call "
                             "optimizer.zero_grad() after it")
        count = self._count()
        if self._defers:
            if self._reduced not in (None, count):
                raise StateError(f"parameter.grad of '{self._tree.name(parameter)}': set_requires_gradient_sync(False) is on and later backward passes have "
                                 "added to it; read it after a backward pass with True")
            return self._gradients.get(parameter) if self._reduced else None
        if count == 0:
            return None
        if count != self._reduced and not core.has_gradient(parameter):
            self.reduce()  # another rank may have one
        if not core.has_gradient(parameter):
            return None
        if parameter not in self._gradients or self._gradients[parameter].is_past:
            kind = PartGradient if self._tree.module.fsdp_has_parts else Gradient
            self._gradients[parameter] = kind(parameter, None, self.pass_number(), self._tree.dtypes.gradient)
        return self._gradients[parameter]

    def reduced_part(self, parameter):
        """This rank's elements of a gradient, the memory that the step reads. Collective when first called after a
        backward pass."""
        self.reduce()
        # one dtype on all ranks, also on those that have no elements of it
        own = core.gradient_part(parameter)
        return own if own.numel() else own.to(self._tree.dtypes.gradient)

    def pass_number(self):
        """Changes with every step, zero_grad() and gradient of a backward pass."""
        return self.number, self._count()

    def set_gradient(self, parameter, value):
        """parameter.grad = value."""
        if value is None:
            self._drop(parameter)
            return
        now = self.gradient_of(parameter)
        if now is None:
            raise UnsupportedError(f"parameter.grad = …: '{self._tree.name(parameter)}' has no gradient before a backward pass; to have an optimizer's states without a "
                                   "step, leave this out: optimizer.load_state_dict() takes them as they are")
        if not isinstance(value, Gradient) or value.parameter is not parameter:
            raise UnsupportedError(f"parameter.grad = …: '{self._tree.name(parameter)}' takes a gradient that was computed of its own parameter.grad, or None; "
                                   "write into parameter.grad in place")
        if value is not now:
            now.copy_(value)

    def _drop(self, parameter):
        self._standing.discard(parameter)
        if self._count() == 0:
            return
        self._dropped.add(parameter)
        if all(p in self._dropped for p in self._tree.trained() if self.gradient_of(p) is not None):
            self.zero_grad()

    def zero_grad(self):
        """Drops all gradients. Collective where there are some."""
        if self._count():
            self._tree.engine.zero_grad()
        self.forget()

    def forget(self):
        """The engine has no gradients any more."""
        self._reduced, self._gradients, self.number = None, {}, self.number + 1
        self._standing.clear()
        self._dropped.clear()

    def end(self):
        """A step has taken the gradients."""
        self.forget()
        self._standing.update(self._tree.trained())

    def require_complete(self):
        """Raises StateError, UnsupportedError: a step would not get the gradients that the program means."""
        if self._defers:
            raise StateError("optimizer.step(): set_requires_gradient_sync(False) is on, so that gradients are not reduced; set it to True before the last backward pass")
        if self._standing:
            raise StateError("optimizer.step(): gradients of the step before were not dropped; call optimizer.zero_grad() after each step: those "
                             "gradients have gone, so they cannot be added to")
        if self._dropped:
            raise UnsupportedError("optimizer.step(): parameter.grad = None was set for some parameters but not for all; drop all of them by zero_grad(), "
                                   "or keep those out of training by requires_grad_(False)")
