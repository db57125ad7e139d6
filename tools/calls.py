"""The types that a function of C++ names and the functions that it calls, as far as its text shows them. Used by walks.
"""
import re

_TOKEN = re.compile(r"[A-Za-z_]\w*|->|::|\d[\w.]*|\S")
_WORD = re.compile(r"[A-Za-z_]\w*$")
_OPEN, _CLOSE = "([{", ")]}"
# Members by which pointers, optionals and containers give what they hold.
_PASSED_ON = {"get", "value", "value_or", "front", "back", "at", "begin", "end", "find", "first", "second", "lock", "data", "release", "emplace",
              "emplace_back", "extract", "top", "reset", "insert", "rbegin", "size", "exchange", "move", "forward", "as_const", "ref", "cref"}
_MAKERS = {"make_unique", "make_shared", "emplace", "emplace_back", "optional", "in_place_type"}


class Reader:
    """Reads one function."""

    def __init__(self, walker, function):
        self._walker, self._function = walker, function
        self._tokens = _TOKEN.findall(function.text)
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
            if _WORD.match(token) and self._at(index - 1) not in (".", "->", "::"):
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
        while self._at(index + 1) == "::" and _WORD.match(self._at(index + 2)):
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
        if _WORD.match(self._at(at)) and self._at(at + 1) in ("(", "{", "=", ";", ",", ")", ":", "["):
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
            names, index = [token for token in self._tokens[index:end] if _WORD.match(token)], end
        begin = index + 2
        if self._at(index + 1) not in ("=", ":") or not all(map(_WORD.match, names)):
            return
        while self._at(begin) in ("*", "&", "("):
            begin += 1
        if not _WORD.match(self._at(begin)):
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
            if name in _PASSED_ON and _WORD.match(self._at(inner)):
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
            elif token in (".", "->") and _WORD.match(self._at(index + 1)):
                name = self._at(index + 1)
                if not made and "_" in name.strip("_") and self._at(index + 2) == "(":
                    only = self._walker.only_class_with(name, self._function.file)
                    made = [only] if only else []
                made = self._call(made, name)
                index = self._after_template(index + 2)
            else:
                return made
