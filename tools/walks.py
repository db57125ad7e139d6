"""Walks: the functions, files and types that a reader meets who follows a function of the library to its end.

A walk begins with named functions. It follows the calls in their bodies, lambdas included, as far as the text shows
where they go:

- a function without an object: the one of that name in the same file, or one that an included header declares;
- a method: that of the object's class or of a base, and every override in a derived class. The class is known from the
  declaration of a variable, parameter, data member or result, through smart pointers, containers and `auto`;
- a method of an object whose class is not known: only where one included class alone has a method of that name, and the
  name has an underscore (short names are often those of std and libtorch);
- constructors of objects that are made, and destructors of variables;
- every type that is named.

Functions of the lowest rooms (LOWEST) count, but their bodies are not followed: a reader needs no more than their
contracts. A second figure of each walk follows them, too, so that what moves down there does not leave the count.

A walk misses what libtorch calls back (such functions are listed as beginnings), calls through std::function,
operators, macros, arguments of templates, and Python. It takes in every override, also those that cannot run there.
A type or a file counts once, a type where it is named or where one of its functions is called.
"""
import collections
import posixpath
import re

from calls import Reader
from rooms import room_of

LOWEST = ("base", "topology", "intercept", "device", "operators", "comm")


def _spaces(name):
    """The parts of "a::B::", without unnamed namespaces."""
    return [part for part in name.split("::") if part and not part.startswith("(")]


class Walk:
    """The result of a walk: functions with the number of calls that lead there, files, types."""

    def __init__(self):
        self.depth_of, self.files, self.types = {}, set(), set()


class Walker:
    """Walks through a Tree."""

    def __init__(self, tree):
        self.tree = tree
        self._seen_from = {}
        self._classes = collections.defaultdict(list)    # by the last part of the name
        self._functions = collections.defaultdict(list)  # likewise: free functions
        self.own_methods = collections.defaultdict(list)    # by (the class's full name, name)
        self._with_method = collections.defaultdict(set)  # the classes by a method's name
        for made in tree.classes.values():
            self._classes[made.name.rsplit("::", 1)[-1]].append(made)
            for name in made.types_of:
                self._with_method[name].add(made.name)
        for function in tree.functions:
            if function.owner:
                self.own_methods[function.owner.name, function.name].append(function)
                self._with_method[function.name].add(function.owner.name)
            else:
                self._functions[function.name].append(function)
        self._readings = {}  # (types, calls) by function
        self._bases, self._derived = {}, collections.defaultdict(list)
        for made in tree.classes.values():
            self._bases[made.name] = [base for base in self.types_in(made.bases, {made.file}, made.name) if base is not made]
            for base in self._bases[made.name]:
                self._derived[base.name].append(made)

    # -- names

    def files_seen_from(self, file):
        """`file` and what it includes, directly or not."""
        if file not in self._seen_from:
            seen, new = set(), [file]
            while new:
                one = new.pop()
                if one in seen or one not in self.tree.includes:
                    continue
                seen.add(one)
                for name in self.tree.includes[one]:
                    new += [f"include/{name}", f"src/{name}", posixpath.join(posixpath.dirname(one), name)]
            self._seen_from[file] = seen
        return self._seen_from[file]

    def _class_of(self, path, files, scope):
        """The class that `path` ("A::B") names in `scope`, among those that `files` see; None: there is none."""
        here = _spaces(scope)

        def nearness(made):
            spaces = _spaces(made.name.removesuffix(path))
            shared = next((n for n, (one, other) in enumerate(zip(spaces, here)) if one != other), min(len(spaces), len(here)))
            return shared == len(spaces), shared

        candidates = [made for made in self._classes.get(path.rsplit("::", 1)[-1], ())
                      if f"::{made.name}".endswith(f"::{path}") and any(made.file in self.files_seen_from(file) for file in files)]
        return max(candidates, key=nearness, default=None)

    def types_in(self, text, files, scope, depth=0):
        """The project's classes that the type `text` names, those behind aliases too."""
        found = []
        for path in re.findall(r"[A-Za-z_]\w*(?:::\w+)*", text):
            made = self._class_of(path, files, scope)
            while not made and "::" in path:  # Class::kValue, Class::Alias
                path = path.rsplit("::", 1)[0]
                made = self._class_of(path, files, scope)
            if made:
                found.append(made)
            elif depth < 3:
                for file, meaning in self.tree.aliases.get(path, {}).items():
                    if any(file in self.files_seen_from(one) for one in files):
                        found += self.types_in(meaning, {file}, scope, depth + 1)
        return found

    def lineage(self, made):
        """`made` and its bases."""
        found, new = [], [made]
        while new:
            one = new.pop(0)
            if one not in found:
                found.append(one)
                new += self._bases[one.name]
        return found

    def _heirs(self, made):
        found, new = [], [made]
        while new:
            one = new.pop(0)
            found.append(one)
            new += [heir for heir in self._derived[one.name] if heir not in found]
        return found

    def methods(self, made, name):
        """(definitions that a call of `name` on a `made` may run, types of its result); None: it has no such method."""
        for one in self.lineage(made):
            if name in one.types_of or (one.name, name) in self.own_methods:
                own = self.own_methods.get((one.name, name), [])
                overrides = [function for heir in self._heirs(made) if heir is not one for function in self.own_methods.get((heir.name, name), [])]
                text = one.types_of.get(name) or next((function.text.split(name + "(")[0] for function in own), "")
                return own + overrides, self.types_in(text, {one.file}, one.name)
        return None

    def find(self, name):
        """The functions that "function" or "Class::method" names."""
        owner, _, last = name.rpartition("::")
        if not owner:
            return self._functions.get(last, [])
        return [function for made in self._classes.get(owner.rsplit("::", 1)[-1], ()) if made.name.endswith(owner)
                for function in (self.methods(made, last) or [[]])[0]]

    # -- the walk

    def walk(self, beginnings, follows_lowest=False):
        """From the functions `beginnings` to the end; `follows_lowest`: through the lowest rooms."""
        found, new = Walk(), [(function, 0) for function in beginnings]
        while new:
            function, at = new.pop(0)
            if function in found.depth_of:
                continue
            found.depth_of[function] = at
            found.files.add(function.file)
            types, calls = self._read(function) if follows_lowest or room_of(function.file) not in LOWEST else ([], [])
            types = types + [function.owner] if function.owner else types
            found.types |= {made.name for made in types}
            found.files |= {made.file for made in types}
            new += [(called, at + 1) for called in calls]
        return found

    def _read(self, function):
        if function not in self._readings:
            self._readings[function] = Reader(self, function).read()
        return self._readings[function]

    def free_functions(self, name, file):
        """(definitions, types of the result) of a function without an object that `file` can call."""
        own = [function for function in self._functions.get(name, ()) if function.file == file]
        seen = self.files_seen_from(file)
        texts = {one: text for one, text in self.tree.results.get(name, {}).items() if one in seen}
        if not own and texts:
            own = [function for function in self._functions.get(name, ())
                   if function.file in seen or (f"({function.file})" not in function.scope and texts.keys() & self.files_seen_from(function.file))]
        return own, [made for one, text in texts.items() for made in self.types_in(text, {one}, "trireme")]

    def only_class_with(self, name, file):
        """The one class with a method `name` that `file` sees, or the base of all of them; None: none, or several."""
        seen = self.files_seen_from(file)
        made = {full for full in self._with_method.get(name, ()) if self.tree.classes[full].file in seen}
        roots = {self.lineage(self.tree.classes[full])[-1].name for full in made}
        return self.tree.classes[min(made, key=lambda full: len(self.lineage(self.tree.classes[full])))] if len(roots) == 1 else None
