"""The classes of the Python package with their methods, and its functions, by their syntax alone. Used by
count_concepts.

A method is a name that the body of a class defines by a function, a lambda, a property or another method's name; or
that its module sets on it: `Class.name = ...` and `setattr(Class, name, ...)`, in loops over constants of the module,
which are computed, too, or over the binding's table of an engine's getters. Those of the classes of the package that it
inherits from are its own, too; a name counts once. Methods that functions, decorators and metaclasses set while the
program runs are not seen.
"""
import ast
import re
import types

PACKAGE = "trireme"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_MAKERS = {"property", "classmethod", "staticmethod", "partialmethod", "cached_property"}
_LOOPED_OVER = (dict, list, tuple, set, frozenset, str, range, zip, enumerate, type({}.items()), type({}.keys()), type({}.values()))
# Names that a module's constants may use. None does anything but compute.
_PURE = {made.__name__: made for made in (dict, list, tuple, set, frozenset, str, int, len, sorted, range, zip, enumerate)}


class Class:
    """A class as its definition shows it. `bases`: dotted names as its module knows them."""

    def __init__(self, module, name, bases):
        self.module, self.name, self.bases, self.methods = module, name, bases, set()


class Function:
    """The definition of a function, its decorators not counted."""

    def __init__(self, name, node):
        self.name, self.lines = name, node.end_lineno - node.lineno + 1


class PythonTree:
    """The classes and functions of python/trireme."""

    def __init__(self, root):
        self.classes = {}    # by full name: "trireme.fsdp.root.Root"
        self.functions = []
        self.unknown = []    # "file:line" of loops that set methods of which the text does not tell the names
        self._imports = {}   # of a module: {its name: the full name}
        self.core = types.SimpleNamespace(ENGINE_GETTERS=_engine_getters(root))  # what is known of the binding
        for path in sorted((root / "python" / PACKAGE).rglob("*.py")):
            file = path.relative_to(root / "python")
            module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
            _ModuleReader(self, module, path.relative_to(root).as_posix(), path.name == "__init__.py").read(path.read_text())

    def note_imports(self, module, imports):
        self._imports[module] = imports

    def methods(self, name):
        """The names of the methods of a class, with those that it inherits from classes of the package."""
        found, new, seen = set(), [self.classes[name]], set()
        while new:
            one = new.pop()
            if one not in seen:
                seen.add(one)
                found |= one.methods
                new += [base for base in (self._resolve(one.module, base) for base in one.bases) if base]
        return found

    def _resolve(self, module, name):
        """The class that `name` means in `module`; None: it is not of the package."""
        for _ in range(8):  # from one package that hands it on to the next
            if f"{module}.{name}" in self.classes:
                return self.classes[f"{module}.{name}"]
            first, dot, rest = name.partition(".")
            meant = self._imports.get(module, {}).get(first)
            if meant is None:
                return None
            full = meant + dot + rest
            module = next((full[:end] for end in reversed([match.start() for match in re.finditer(r"\.", full)]) if full[:end] in self._imports), None)
            if module is None:
                return None
            name = full[len(module) + 1:]
        return None


class _ModuleReader:
    """Reads one module into a tree."""

    def __init__(self, tree, module, file, is_package):
        self._tree, self._module, self._file = tree, module, file
        self._package = module if is_package else module.rpartition(".")[0]
        self._constants = {"__builtins__": _PURE, "core": tree.core}  # by name

    def read(self, text):
        statements = list(_flat(ast.parse(text).body))
        self._tree.note_imports(self._module, dict(self._imported(statements)))
        self._read_definitions(statements, self._module)
        for statement in statements:
            self._read_statement(statement)

    def _imported(self, statements):
        """(a name of the module, the full name of what it imports by it)"""
        for statement in statements:
            if isinstance(statement, ast.Import):
                yield from ((alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2 for alias in statement.names)
            elif isinstance(statement, ast.ImportFrom):
                spaces = self._package.split(".")
                above = spaces[:len(spaces) - statement.level + 1] if statement.level else []
                place = ".".join([*above, *([statement.module] if statement.module else [])])
                yield from ((alias.asname or alias.name, f"{place}.{alias.name}") for alias in statement.names)

    def _read_definitions(self, statements, scope):
        """Classes and functions, also those inside of others."""
        for statement in statements:
            if isinstance(statement, _FUNCTIONS):
                self._tree.functions.append(Function(f"{self._file}:{statement.lineno}: {statement.name}", statement))
            elif isinstance(statement, ast.ClassDef):
                made = Class(self._module, f"{scope}.{statement.name}", [ast.unparse(base) for base in statement.bases])
                self._tree.classes[made.name] = made
                made.methods.update(_methods_of_body(statement))
            else:
                continue
            self._read_definitions(_flat(statement.body), f"{scope}.{statement.name}")

    def _read_statement(self, statement):
        """Computes a constant, or notes the methods that a statement of the module sets."""
        if isinstance(statement, ast.For):
            self._read_loop(statement)
        elif isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call) and ast.unparse(call.func) == "setattr":
            if owner := self._class_of(call.args[0]):
                name = self._value(call.args[1])
                if isinstance(name, str):
                    owner.methods.add(name)
                else:
                    self._tree.unknown.append(f"{self._file}:{call.lineno}")
        elif isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Attribute):
            if (owner := self._class_of(target.value)) and not isinstance(statement.value, ast.Constant):
                owner.methods.add(target.attr)
        elif isinstance(statement, (ast.Assign, ast.AugAssign)):
            self._compute(statement)

    def _read_loop(self, loop):
        """Runs a loop over what is known; of another one the body is read once."""
        values = self._value(loop.iter)
        for value in values if isinstance(values, _LOOPED_OVER) else (None,):
            self._constants["_each"] = value
            self._compute(ast.Assign([loop.target], ast.Name("_each", ast.Load())))
            for statement in _flat(loop.body):
                self._read_statement(statement)

    def _compute(self, assignment):
        """Binds names to what needs nothing but constants; other names are not known any more."""
        names = [node.id for node in ast.walk(assignment) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        try:
            exec(compile(ast.fix_missing_locations(ast.Module([assignment], [])), self._file, "exec"), self._constants)  # pylint: disable=exec-used
        except Exception:  # pylint: disable=broad-except
            for name in names:
                self._constants.pop(name, None)

    def _value(self, expression):
        """The value of `expression`, or None where it needs more than constants."""
        try:
            return eval(compile(ast.Expression(expression), self._file, "eval"), self._constants)  # pylint: disable=eval-used
        except Exception:  # pylint: disable=broad-except
            return None

    def _class_of(self, node):
        return self._tree.classes.get(f"{self._module}.{ast.unparse(node)}")


def _engine_getters(root):
    """The rows of core.ENGINE_GETTERS."""
    table = root / "src/python/engine_getters.cpp"
    rows = re.findall(r'Getter\{"(\w+)", Facade::k(Property|Method)', table.read_text()) if table.exists() else ()
    return tuple((name, facade == "Method", "") for name, facade in rows)


def _flat(statements):
    """`statements` with those inside of if, try and with; loops stay whole."""
    for statement in statements:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "handlers", "finalbody"):
                for one in getattr(statement, part, ()):
                    yield from _flat(one.body if isinstance(one, ast.ExceptHandler) else [one])


def _methods_of_body(definition):
    """The names that the body of a class defines as methods."""
    found = set()
    for statement in _flat(definition.body):
        if isinstance(statement, _FUNCTIONS):
            found.add(statement.name)
        elif isinstance(statement, ast.Assign):
            value = statement.value
            is_made = isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in _MAKERS
            if is_made or isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in found):
                found.update(target.id for target in statement.targets if isinstance(target, ast.Name))
    return found
