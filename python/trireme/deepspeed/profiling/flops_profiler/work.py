"""Counted multiply-adds, by the places of modules in a model."""
import dataclasses

from ...._native import core


@dataclasses.dataclass
class Numbers:
    """The numbers of a module, with all modules inside of it and all that it calls."""
    params: int
    forward: int  # multiply-adds, as the next two
    backward: int
    recomputed: int
    seconds: float  # of forward

    macs = property(lambda self: self.forward)


class Place:
    """A module under one of its names in the model."""

    def __init__(self, name, module, depth):
        self.name, self.module, self.depth = name, module, depth
        self.inner = [Place(inner, child, depth + 1) for inner, child in module.named_children()]

    def all(self):
        """This one and those inside, outermost first."""
        yield self
        for inner in self.inner:
            yield from inner.all()


class Work:
    """Counts the work of a model's modules from start() to stop().

    A module has what its operators do and those of all modules that it calls, whoever owns these, and of the modules
    inside of it, whoever calls these. So the model has everything, and a module that is used twice has both.
    """

    def __init__(self, model):
        self.model = model
        self._count = core.WorkCount()
        self._modules = list(model.modules())
        self._numbers = {id(module): number for number, module in enumerate(self._modules)}
        self._hooks = []
        self._synchronizes = None

    is_running = property(lambda self: self._count.is_running)
    uncounted = property(lambda self: self._count.uncounted, doc="{operator whose work is not known: how often it ran}.")

    def start(self, ignored, synchronize):
        """`ignored`: classes of modules whose work is their caller's. `synchronize` waits for the device."""
        self._synchronizes = synchronize
        for number, module in enumerate(self._modules):
            if type(module) not in ignored:
                self._hooks += [module.register_forward_pre_hook(self._entering(number), prepend=True),
                                module.register_forward_hook(self._leaving(number), always_call=True)]
        self._count.start()

    def _entering(self, number):
        def enter(module, inputs):  # pylint: disable=unused-argument
            self._synchronizes()
            self._count.enter(number)

        return enter

    def _leaving(self, number):
        def leave(module, inputs, output):  # pylint: disable=unused-argument
            self._synchronizes()
            self._count.leave(number)

        return leave

    def stop(self):
        """The numbers stay."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._count.stop()

    def reset(self):
        """Forgets what was counted."""
        self._count.reset()

    def tree(self):
        """(the model's Place, {Place: Numbers})."""
        calls = self._count.calls
        within = self._calls_within(calls)
        root = Place("", self.model, 0)
        found = {}
        for place in reversed(list(root.all())):
            mine = within.get(self._numbers[id(place.module)], set()).union(*(found[inner][0] for inner in place.inner))
            if place is root:
                mine = set(range(len(calls)))
            found[place] = mine, self._numbers_of(place, mine, calls)
        return root, {place: numbers for place, (_, numbers) in found.items()}

    @staticmethod
    def _calls_within(calls):
        """{module: indices of its calls and of all calls inside of these}."""
        within, chains = {}, []
        for index, (caller, module, *_) in enumerate(calls):
            chains.append((chains[caller] if caller >= 0 else frozenset()) | {module})
            for outer in chains[index]:
                within.setdefault(outer, set()).add(index)
        return within

    @staticmethod
    def _numbers_of(place, mine, calls):
        sums = [sum(calls[index][column] for index in mine) for column in (4, 5, 6)]
        outermost = (index for index in mine if index > 0 and (calls[index][0] == 0 or calls[index][0] not in mine))
        return Numbers(sum(parameter.numel() for parameter in place.module.parameters()), *sums, sum(calls[index][3] for index in outermost))
