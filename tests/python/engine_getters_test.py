"""A value that an engine tells without arguments is a row of src/python/engine_getters.cpp: neither the binding nor a
façade has such a member beside it."""
import ast
import pathlib
import re

import trireme
from harness import Case, main
from trireme._native import core

PACKAGE = pathlib.Path(trireme.__file__).parent
OF_FACADES = {name: (is_method, doc) for name, is_method, doc in core.ENGINE_GETTERS}
GETTERS = {*OF_FACADES, *core.CORE_GETTERS}


def told(owner, name):
    """The type, as a stub writes it, of a value that the member tells without arguments; None: it tells none."""
    member = vars(owner)[name]
    doc = (member.fget if isinstance(member, property) else member).__doc__ or ""
    found = re.match(r"\w*\(\w+: trireme\._core\.\w+\) -> (.+)", doc)
    if found is None or found[1] in ("None", *(f"trireme._core.{made}" for made in vars(core))):
        return None
    return re.sub(r"Optional\[(.*)\]", r"\1 | None", found[1]).replace("List[", "list[").replace("Tuple[", "tuple[")


def forwards(package):
    """file:line of members that only ask the core for a getter."""
    asked = re.compile(r"(?:return |lambda self: )self\.core\.(\w+)(?:\(\))?")
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name, text = None, ""
            if isinstance(node, ast.FunctionDef):
                name, text = node.name, ast.unparse(node.body[-1]) if len(node.body) == 1 + bool(ast.get_docstring(node)) else ""
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
                name, text = ast.unparse(node.targets[0]), ast.unparse(node.value.args[0])
            if (found := asked.fullmatch(text)) and found[1] == name and name in OF_FACADES:
                yield f"{path.relative_to(package)}:{node.lineno}: {name}"


class Getters(Case):
    def test_the_binding_has_none_beside_the_table(self):
        owners = (core.EngineBase, core.Engine, core.StageEngine)
        self.assertEqual({name for owner in owners for name in vars(owner) if not name.startswith("_") and told(owner, name)}, GETTERS)

    def test_no_facade_writes_one_again(self):
        self.assertEqual(list(forwards(PACKAGE)), [])

    def test_deepspeeds_engine_has_those_of_facades(self):
        for name, (is_method, doc) in OF_FACADES.items():
            with self.subTest(name):
                member = vars(trireme.DeepSpeedEngine)[name]
                self.assertEqual((callable(member), member.__doc__), (is_method, doc))

    def test_the_stub_has_their_types(self):
        stub = ast.parse((PACKAGE / "_core.pyi").read_text())
        engine = next(node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "EngineBase")
        types = {node.name: ast.unparse(node.returns) for node in engine.body if isinstance(node, ast.FunctionDef) and node.name in GETTERS}
        self.assertEqual(types, {name: told(core.EngineBase, name) for name in GETTERS})


if __name__ == "__main__":
    main()
