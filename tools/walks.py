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
contracts.

A walk misses what libtorch calls back (such functions are listed as beginnings), calls through std::function,
operators, macros, arguments of templates, and Python. It takes in every override, also those that cannot run there.
A type or a file counts once, a type where it is named or where one of its functions is called.
"""
import collections
import posixpath
import re

TOKEN = re.compile(r"[A-Za-z_]\w*|->|::|\d[\w.]*|\S")
WORD = re.compile(r"[A-Za-z_]\w*$")
_OPEN, _CLOSE = "([{", ")]}"
# Members by which pointers, optionals and containers give what they hold.
_PASSED_ON = {"get", "value", "value_or", "front", "back", "at", "begin", "end", "find", "first", "second", "lock", "data", "release", "emplace",
              "emplace_back", "extract", "top", "reset", "insert", "rbegin", "size", "exchange", "move", "forward", "as_const", "ref", "cref"}
_MAKERS = {"make_unique", "make_shared", "emplace", "emplace_back", "optional", "in_place_type"}

LOWEST = ("base", "topology", "intercept", "device", "operators", "comm")


def room_of(file):
    """The first folder below src or include/trireme: "pager"; of include/trireme/topology.h: "topology"."""
    return re.sub(r"^(?:src|include/trireme)/", "", file).split("/")[0].removesuffix(".h")


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

    def walk(self, beginnings):
        """From the functions `beginnings` to the end."""
        found, new = Walk(), [(function, 0) for function in beginnings]
        while new:
            function, at = new.pop(0)
            if function in found.depth_of:
                continue
            found.depth_of[function] = at
            found.files.add(function.file)
            types, calls = _Reader(self, function).read() if room_of(function.file) not in LOWEST else ([], [])
            types += [function.owner] if function.owner else []
            found.types |= {made.name for made in types}
            found.files |= {made.file for made in types}
            new += [(called, at + 1) for called in calls]
        return found

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


class _Reader:
    """Reads one function."""

    def __init__(self, walker, function):
        self._walker, self._function = walker, function
        self._tokens = TOKEN.findall(function.text)
        self._files = {function.file} | ({function.owner.file} if function.owner else set())
        self._scope = function.owner.name if function.owner else function.scope
        self._types, self._calls, self._variables = [], [], {}
        self._partner = self._brackets()
        self._begin = self._end_of_parameters()

    def _brackets(self):
        partner, stack = {}, []
        for index, token in enumerate(self._tokens):
            if token in _OPEN:
                stack.append(index)
            elif token in _CLOSE and stack:
                begin = stack.pop()
                partner[begin] = index
                partner[index] = begin
        return partner

    def _at(self, index):
        return self._tokens[index] if 0 <= index < len(self._tokens) else ""

    def read(self):
        """(types that are met, functions that are called)"""
        for index, token in enumerate(self._tokens):
            if WORD.match(token) and self._at(index - 1) not in (".", "->", "::"):
                self._read_name(index)
        return self._types, self._calls

    def _end_of_parameters(self):
        """The index of the parenthesis that ends the function's parameters. Before it nothing is called."""
        for index, token in enumerate(self._tokens):
            if token == "(" and (self._at(index - 1) == self._function.name or self._function.name.startswith("operator") and "operator" in self._tokens[:index]):
                if self._function.name == "operator()" and self._at(index + 1) == ")" and self._at(index + 2) == "(":
                    continue
                return self._partner.get(index, index)
        return 0

    def _read_name(self, index):
        """The name in the postfix expression or the declaration that begins at `index`."""
        path, after = self._path(index)
        if path == "auto":
            self._declare_auto(after)
        elif path in self._variables or not (made := self._walker.types_in(path, self._files, self._scope)):
            self._chain(self._primary(path, index, after), self._after_call(after))
        else:
            self._types += made
            name = path.rsplit("::", 1)[-1]
            if "::" in path and not any(one.name.rsplit("::", 1)[-1] == name for one in made) and self._walker.methods(made[-1], name):
                if index > self._begin:  # Class::method(...)
                    self._chain(self._call(made[-1:], name), self._after_call(after))
                return
            self._declare(made, index, after)
            if self._at(after) in ("(", "{"):
                self._chain(made, after)

    def _path(self, index):
        """("A::B", the index after it)."""
        path = self._tokens[index]
        while self._at(index + 1) == "::" and WORD.match(self._at(index + 2)):
            path += "::" + self._tokens[index + 2]
            index += 2
        return path, index + 1

    def _after_template(self, index):
        """The index after the template arguments that begin at `index`; `index` where there are none."""
        depth, at = 0, index
        while self._at(index) == "<":
            token = self._at(at)
            depth += (token == "<") - (token == ">")
            if depth == 0:
                return at + 1
            if token in ("", ";", "{") or at > index + 80:
                break
            at += 1
        return index

    def _after_call(self, index):
        return self._partner.get(index, index) + 1 if self._at(index) == "(" else index

    def _construct(self, made, with_destructor):
        for one in made:
            for name in (one.name.rsplit("::", 1)[-1], *(("~" + one.name.rsplit("::", 1)[-1],) if with_destructor else ())):
                self._calls += self._walker.own_methods.get((one.name, name), [])

    def _declare(self, made, index, after):
        """A variable of the types `made`, or an object that is made by their name, which stands at `index`."""
        at = self._after_template(after)
        closing = 0
        while self._at(at) == ">":
            at, closing = at + 1, closing + 1
        is_borrowed = False
        while self._at(at) in ("const", "&", "*"):
            is_borrowed |= self._at(at) != "const"
            at += 1
        if WORD.match(self._at(at)) and self._at(at + 1) in ("(", "{", "=", ";", ",", ")", ":", "["):
            self._variables[self._at(at)] = self._variables.get(self._at(at), []) + made
            if index > self._begin and not is_borrowed and not closing and self._at(at + 1) in ("(", "{", ";"):
                self._construct(made, True)
        elif index > self._begin and self._at(at) in ("(", "{") and not is_borrowed and (not closing or self._wrapper(index) in _MAKERS):
            self._construct(made, False)

    def _wrapper(self, index):
        """X of X<A>, where A stands at `index`."""
        return self._at(index - 2) if self._at(index - 1) == "<" else ""

    def _declare_auto(self, index):
        while self._at(index) in ("const", "&", "*"):
            index += 1
        names = [self._at(index)]
        if names == ["["]:
            end = self._partner.get(index, index)
            names, index = [token for token in self._tokens[index:end] if WORD.match(token)], end
        begin = index + 2
        if self._at(index + 1) not in ("=", ":") or not all(map(WORD.match, names)):
            return
        while self._at(begin) in ("*", "&", "("):
            begin += 1
        if not WORD.match(self._at(begin)):
            return
        types, calls = list(self._types), list(self._calls)
        path, after = self._path(begin)
        made = [] if path in self._variables else self._walker.types_in(path, self._files, self._scope)
        value = self._chain(made or self._primary(path, begin, after), self._after_call(after))
        self._types, self._calls = types, calls  # read() comes to them
        for name in names:
            self._variables[name] = value

    def _primary(self, path, index, after):
        """The types of a variable, a member or a function's result."""
        walker, owner = self._walker, self._function.owner
        called = self._at(self._after_template(after)) == "("
        name = path.rsplit("::", 1)[-1]
        if path == "this":
            return [owner] if owner else []
        if path in self._variables:
            return self._variables[path]
        if "::" in path and path.split("::")[0] in ("std", "at", "c10", "torch"):
            inner = self._after_template(after) + 1
            if name in _PASSED_ON and WORD.match(self._at(inner)):
                inner_path, inner_after = self._path(inner)
                return self._chain(self._primary(inner_path, inner, inner_after), self._after_call(inner_after))
            return []
        if "::" in path:
            made = walker.types_in(path.rpartition("::")[0], self._files, self._scope)
            if made:
                return self._call(made[-1:], name)
        elif (found := self._member(owner, name, called and index > self._begin)) is not None:
            return found
        definitions, results = walker.free_functions(name, self._function.file)
        is_handed_on = self._at(index - 1) in ("(", ",", "&", "=")
        if definitions and index > self._begin and (called or is_handed_on):
            self._calls += definitions
            return results
        return results if called else []

    def _member(self, owner, name, is_called):
        """The types of a member, or of a method's result, of `owner` or of a class around it; None: there is none."""
        walker = self._walker
        while owner:
            if found := walker.methods(owner, name):
                text = owner.types_of.get(name)
                types = walker.types_in(text, {owner.file} | self._files, owner.name) if text else found[1]
                is_constructor = self._function.name == owner.name.rsplit("::", 1)[-1]
                if is_called and found[0]:
                    self._calls += found[0]
                elif is_called and is_constructor and text and not re.search(r"[<*&]", text):
                    self._construct(types, False)
                return types
            owner = walker.tree.classes.get(owner.name.rpartition("::")[0])
        return None

    def _call(self, made, name):
        """The types of `name` of an object of one of the classes `made`; its definitions are called."""
        for one in made:
            if found := self._walker.methods(one, name):
                self._types += [one]
                self._calls += found[0]
                owner = next(base for base in self._walker.lineage(one) if name in base.types_of or (base.name, name) in self._walker.own_methods)
                return self._walker.types_in(owner.types_of.get(name, ""), {owner.file} | self._files, owner.name) or found[1]
        return made if name in _PASSED_ON else []

    def _chain(self, made, index):
        """The types of the postfix expression that goes on at `index`, after an object of the types `made`."""
        while True:
            token = self._at(index)
            if token in ("(", "[", "{") and (token != "{" or self._at(self._partner.get(index, index) + 1) == "."):
                index = self._partner.get(index, len(self._tokens)) + 1
            elif token in (".", "->") and WORD.match(self._at(index + 1)):
                name = self._at(index + 1)
                if not made and "_" in name.strip("_") and self._at(index + 2) == "(":
                    only = self._walker.only_class_with(name, self._function.file)
                    made = [only] if only else []
                made = self._call(made, name)
                index = self._after_template(index + 2)
            else:
                return made
