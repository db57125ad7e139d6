"""Changes of other packages that this one makes: a table of patches, which are put in place when a feature first needs
them, and which remove_all() takes off again.

    python -m trireme.patches      prints docs/patches.md

A room has its rows beside the code that they bring in, as `PATCHES = Patches(…)`, and calls PATCHES.apply(). What stood
in a place, who stands there now and in which order is known here alone.
"""
import collections.abc
import dataclasses
import functools
import gc
import importlib
import inspect
import sys
import types

import torch

from .errors import InternalError, StateError, UnsupportedError
from .late import when_imported

#: The modules of this package that have rows. Where several wrap one name, the first stands innermost, whichever
#: feature a program uses first.
ROOMS = ("uncaught", "higher_order", "watch.clipping", "watch.beside", "watch.late_parameters", "watch.shared_memory", "activations.wholes", "activations.eager", "activations.streams",
         "sequences.batches", "smp.inside", "smp.readers", "fsdp.optimizers", "fsdp.tensors", "fsdp.dcp", "as_fsdp", "fsdp.accelerate", "as_deepspeed", "as_smp")
_ABSENT = object()


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One change. `owner` is a module, and `name` a name in it, which may go through a class: "Tensor.size". `also` are
    other names that it reaches, written out, which some versions of the package lack."""

    owner: str
    name: str
    why: str
    also: tuple = dataclasses.field(default=(), kw_only=True)

    def names(self):
        """[(module, name in it)] of all that it reaches."""
        return [(self.owner, self.name), *(tuple(name.rsplit(".", 1)) for name in self.also)]


@dataclasses.dataclass(frozen=True, eq=False)
class Wrapped(Row):
    """`wrap(what stood there)` stands there, of the same kind.

    wrap() gets a function: of a property its getter, of a static method what it calls; of a class method the
    descriptor. It is called anew where a wrapper of another room comes below.
    """

    wrap: collections.abc.Callable


@dataclasses.dataclass(frozen=True, eq=False)
class Exchanged(Row):
    """`value()` stands there instead, in `also`, too."""

    value: collections.abc.Callable


@dataclasses.dataclass(frozen=True, eq=False)
class Added(Row):
    """`put(what stands there)` changes it, and returns a function that changes it back.

    `holds(what stands there)`: whether the change is still there; a program may have begun that list anew.
    """

    put: collections.abc.Callable
    holds: collections.abc.Callable = lambda found: True


class Entry(Added):
    """A dict whose value of `key` becomes wrap(the value that it had)."""

    def __init__(self, owner, name, key, why, wrap):
        made = []

        def put(found):
            before = found[key]
            made.append(wrap(before))
            found[key] = made[-1]
            return lambda: found.update({key: before}) if found.get(key) is made[-1] else None

        super().__init__(owner, name, why, put, lambda found: key not in found or any(found[key] is one for one in made))


class _Place:
    """One name of an object, and what stands there: the wrappers of all rooms around what stood there before."""

    def __init__(self, owner, name, dotted):
        self._owner, self._name, self.dotted = owner, name, dotted
        self._before = vars(owner).get(name, _ABSENT)
        self._found = inspect.getattr_static(owner, name)  # which a base class may have
        self._rows, self._scripted = [], []
        self.made = []  # all that ever stood here

    def is_of(self, owner, name):
        """Whether it is this name of this object."""
        return self._owner is owner and self._name == name

    def holds(self, later=()):
        """Whether what was made here still stands here; where one of the `later` places is of the same name, whether it
        stood here then."""
        above = next((place for place in later if place.is_of(self._owner, self._name)), None)
        return (vars(self._owner).get(self._name, _ABSENT) if above is None else above._before) is self.made[-1]

    def add(self, number, row):
        """Wraps it by `row` of the room `number`, too."""
        if any(one is row for _, one in self._rows):
            return
        self._rows = sorted([*self._rows, (number, row)], key=lambda one: one[0])
        self._forget_scripted()
        standing = self._found
        for _, one in self._rows:
            standing = self._around(one, standing)
        self.made.append(standing)
        setattr(self._owner, self._name, standing)

    def take_off(self):
        """Puts back what stood there before."""
        self._forget_scripted()
        if self._before is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)

    def copied(self):
        """{what modules may have imported by name from here: what stood here}."""
        is_function = isinstance(self._owner, types.ModuleType) and all(isinstance(row, Wrapped) for _, row in self._rows)
        return {id(one): self._before for one in self.made} if is_function else {}

    def _around(self, row, standing):
        if isinstance(row, Exchanged):
            return row.value()
        given, kind = standing, None
        if isinstance(self._owner, type):
            if isinstance(standing, staticmethod):
                given, kind = standing.__func__, staticmethod
            elif isinstance(standing, (classmethod, types.ClassMethodDescriptorType)):
                kind = classmethod
            elif inspect.isdatadescriptor(standing):
                return property(row.wrap(standing.__get__))
        made = row.wrap(given)
        if isinstance(made, (classmethod, staticmethod)):
            return made
        made = functools.wraps(given)(made)
        if (builtin := torch.jit._builtins._find_builtin(given)) is not None:  # pylint: disable=protected-access
            torch.jit._builtins._register_builtin(made, builtin)  # TorchScript knows functions by identity
            self._scripted.append(made)
        return made if kind is None else kind(made)

    def _forget_scripted(self):
        for made in self._scripted:
            torch.jit._builtins._get_builtin_table().pop(id(made), None)  # pylint: disable=protected-access
        self._scripted = []


class _Changes:
    """All that is in place."""

    places = []  # in order: another package may have put something between two of one name
    added = {}  # Added: what changes it back
    waits = {}  # row: what gives up its wait for a module
    rooms = []


class Patches:
    """The rows of a room. `when` says what first needs them; `users()` gives the living objects that need them."""

    def __init__(self, module, when, rows, users=lambda: ()):
        self.room = module.removeprefix("trireme.")
        self.when, self.rows, self.users = when, tuple(rows), users

    def apply(self):
        """Puts what is not there yet in place; rows of modules that nobody has imported when somebody does."""
        if self.room not in ROOMS:
            raise InternalError(f"patches: the room {self.room} is not in ROOMS")
        if not any(room is self for room in _Changes.rooms):
            for row in self.rows:
                if row not in _Changes.waits:
                    _Changes.waits[row] = when_imported(row.owner, functools.partial(_put, ROOMS.index(self.room), row))
            _Changes.rooms.append(self)
            return
        for row, found in [(row, _Changes.added[row][0]) for row in self.rows if row in _Changes.added]:
            if not row.holds(found):
                _Changes.added[row] = (found, row.put(found))


def _owner_of(module, name):
    """(the object that has the name, its last part), of a module that is there."""
    *classes, last = name.split(".")
    try:
        owner = functools.reduce(getattr, classes, module)
        inspect.getattr_static(owner, last)
    except AttributeError:
        raise UnsupportedError(f"{module.__name__}.{name}, which trireme replaces, is not there in this version of {module.__name__.partition('.')[0]}; "
                               "install one that docs/torch.md or docs/fsdp.md names") from None
    return owner, last


def _put(number, row, module):
    if isinstance(row, Added):
        found = getattr(*_owner_of(module, row.name))
        _Changes.added[row] = (found, row.put(found))
        return
    for place, name in row.names():
        if place in sys.modules and ((place, name) == (row.owner, row.name) or hasattr(sys.modules[place], name)):
            _put_at(number, row, *_owner_of(sys.modules[place], name), f"{place}.{name}")


def _put_at(number, row, owner, name, dotted):
    standing = inspect.getattr_static(owner, name)
    if isinstance(row, Wrapped) and any(standing is made and not place.is_of(owner, name) for place in _Changes.places for made in place.made):
        return  # it was imported by name from a place that is wrapped already
    there = next((place for place in reversed(_Changes.places) if place.is_of(owner, name)), None)
    if there is None or not there.holds():  # another package may have wrapped it since
        there = _Place(owner, name, dotted)
        _Changes.places.append(there)
    there.add(number, row)


def applied():
    """The rows that are in place, or wait for a module, by room: {room: [Row]}, in the order in which they came."""
    return {room.room: list(room.rows) for room in _Changes.rooms}


def remove_all():
    """Takes all of it off: every name has again what it had, also where a module has meanwhile imported one of these
    functions by name. The next engine, or whatever needs them, puts them in place again.

    Raises  StateError: an engine or a wrapped module that needs them lives, or another package has replaced a name
            since; nothing is taken off.
    """
    if any(any(room.users()) for room in _Changes.rooms):
        gc.collect()  # modules refer to themselves
    for room in _Changes.rooms:
        if living := [type(one).__name__ for one in room.users()]:
            raise StateError(f"patches.remove_all(): {len(living)} objects that need them live ({living[0]}, for {room.room}); end engines by destroy(), those of "
                             "fully_shard() and FullyShardedDataParallel() by: for engine in trireme.ranks.living(): engine.destroy()")
    if covered := _covered():
        raise StateError(f"patches.remove_all(): {', '.join(covered)} got another value since trireme has replaced it; take that off first")
    for give_up in _Changes.waits.values():
        give_up()
    copied = {}
    for place in reversed(_Changes.places):
        place.take_off()
        copied.update(place.copied())
    for _, put_back in reversed(_Changes.added.values()):
        put_back()
    for module in [one for one in list(sys.modules.values()) if isinstance(one, types.ModuleType)]:
        for name, value in list(vars(module).items()):
            if id(value) in copied:
                setattr(module, name, copied[id(value)])
    for held in (_Changes.places, _Changes.added, _Changes.waits, _Changes.rooms):
        held.clear()


def _covered():
    """Names where something else stands than this package has put there last."""
    return [place.dotted for index, place in enumerate(_Changes.places) if not place.holds(_Changes.places[index + 1:])]


# --- the page ---

_HEAD = """\
# patches: what this package changes in your torch

`import trireme` alone changes nothing in torch, nor in any other package; it sets `sys.excepthook`, as the first row
says. A feature that needs to be seen in torch's own names puts its rows in place when a program first uses it, and no
others. This page is printed by `python -m trireme.patches`, from the rows that are applied.

```python
from trireme import patches
patches.applied()     # {room: rows} that are in place in this process
patches.remove_all()  # every name has again what it had; the next engine puts in place what it needs
```

- `remove_all()` is refused by name while an engine or a wrapped module lives (`for engine in trireme.ranks.living():
  engine.destroy()` ends them; collective), and where another package has replaced a name since: taking ours off would
  take theirs with it.
- A name that two rooms wrap has one chain of wrappers, in the order of this page, whichever feature came first.
- Rows of a module that nobody has imported wait for its import.
- A wrapper asks whether an engine or a parameter of this package is concerned, and else calls what stood there.

Nothing here is about objects that a program gives: a module that is sharded gets another class, its optimizer other
methods, and they keep them. While a `with` lasts, `zero.Init` looks at new parameters, `smp.partition` at new modules,
and `OnDevice` sets the default dtype; a step function of smp looks at attributes of the model's modules, at
parameters that `torch.func.functional_call()` sets, and at the cache of `torch.nn.utils.parametrize`. `trireme` finds
its own modules under DeepSpeed's names (`sys.meta_path`), and at the end of Python leaves the job (`atexit`); `RANK`
and its kin are set in `os.environ` where ranks join without them. What is relied on below Python is in
[torch](torch.md#what-is-relied-on).
"""


def table():
    """The Patches of all rooms, in their order."""
    return [importlib.import_module(f"trireme.{room}").PATCHES for room in ROOMS]


def page():
    """docs/patches.md."""
    parts = [_HEAD]
    for room in table():
        rows = [f"| {', '.join(f'`{owner}.{name}`' for owner, name in row.names())} | {row.why} |" for row in room.rows]
        parts.append("\n".join([f"## {room.room}", "", f"When: {room.when}.", "", "| name | why |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    from trireme.patches import page as _page  # not this copy of the module, which is called __main__
    sys.stdout.write(_page())
