"""The cost of importing the package, what it refuses to be imported with, and its types for type checkers."""
import ast
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import statistics
import sys
import unittest

from harness import Case, PROGRAM, main, run

# Measured: 14 ms. Of the processor's time, so that what else the machine does counts little.
ADDED_S = 0.1


def names_of_stub(path):
    """{name of a class: its public members, "": the functions and classes} of a stub file."""
    def members(body):
        names = set()
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign):
                names.add(node.target.id)
        return public(names)

    tree = ast.parse(path.read_text())
    return {"": members(tree.body), **{node.name: members(node.body) for node in tree.body
                                       if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}}


def public(names):
    return {name for name in names if not name.startswith("_")}


class Package(Case):
    def test_its_import_adds_little_to_that_of_torch(self):
        added_s = [self.on_ranks(0, """
            import sys, time, torch
            sys.pycache_prefix, sys.dont_write_bytecode = folder, False  # compiled, as pip leaves it
            assert "trireme" not in sys.modules
            before = time.process_time()
            import trireme
            result = time.process_time() - before
        """) for _ in range(6)]
        self.assertLessEqual(statistics.median(added_s[1:]), ADDED_S, added_s)

    def test_another_torch_is_refused_by_its_version(self):
        self.write("sitecustomize.py", "import torch; torch.__version__ = '9.8.7+cpu'\n")
        path = f"{self.folder}{os.pathsep}{os.environ['PYTHONPATH']}"
        status, _, err = run([sys.executable, "-c", "import trireme"], environment={"PYTHONPATH": path})
        self.assertEqual(status, 1)
        self.assertRegex(err, r"ImportError: trireme: built against torch \d+\.\d+\.\d+, but torch 9\.8\.7\+cpu is installed; install torch==")

    def test_a_package_without_its_extension_says_why(self):
        package = self.folder / "trireme"
        shutil.copytree(pathlib.Path(importlib.util.find_spec("trireme").origin).parent, package,
                        ignore=shutil.ignore_patterns("_core.*.so", "__pycache__"))
        for made, said in ((None, "is not built yet; run `make build`"), ("_core.cpython-39.so", r"another Python \(_core.cpython-39.so\)")):
            if made:
                (package / made).touch()
            status, _, err = run([sys.executable, "-c", "import trireme"], environment={"PYTHONPATH": str(self.folder)})
            self.assertEqual(status, 1)
            self.assertRegex(err, f"ImportError: trireme: the extension .*{said}")

    def test_a_device_that_is_not_there_is_refused_by_the_variable_that_asked_for_it(self):
        asked = "from trireme import accelerator; accelerator.local_device()"
        status, _, err = run([sys.executable, "-c", asked], environment={"TRIREME_DEVICE": "gpu"})
        self.assertEqual(status, 1)
        self.assertIn('ConfigError: TRIREME_DEVICE: device "gpu" is none of auto, cpu', err)

    def test_as_a_module_it_is_the_command_under_this_python(self):
        def said(*words):
            return run([sys.executable, "-m", "trireme", *words])

        self.assertEqual(said("--version"), run([PROGRAM, "--version"]))
        self.assertEqual(said("no-such-command"), run([PROGRAM, "no-such-command"]))
        status, out, err = said("env", "--json")
        self.assertEqual(status, 0, err)
        self.assertEqual(json.loads(out)["versions"]["python"], f"{platform.python_version()} ({sys.executable})")

    def test_the_stub_has_the_names_of_the_extension(self):
        from trireme._native import core  # pylint: disable=import-outside-toplevel
        import trireme  # pylint: disable=import-outside-toplevel
        stub = names_of_stub(pathlib.Path(trireme.__file__).parent / "_core.pyi")
        self.assertEqual(stub.pop(""), public(vars(core)))
        for name, members in stub.items():
            with self.subTest(name):
                self.assertEqual(members, public(vars(getattr(core, name))))

    def test_every_public_function_and_method_has_a_docstring(self):
        import trireme  # pylint: disable=import-outside-toplevel
        without = []
        for path in sorted(pathlib.Path(trireme.__file__).parent.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                for one in getattr(node, "body", []) if isinstance(node, (ast.Module, ast.ClassDef)) else []:
                    if not isinstance(one, (ast.FunctionDef, ast.ClassDef)) or not public([one.name]) or ast.get_docstring(one):
                        continue
                    # Names that importlib asks for are described there; the accelerator's one-line answers say all that
                    # there is to say.
                    is_answer = path.name == "accelerator.py" and len(one.body) == 1 and isinstance(node, ast.ClassDef)
                    if one.name not in ("find_spec", "create_module", "exec_module") and not is_answer:
                        without.append(f"{path.name}:{one.lineno}: {one.name}")
        self.assertEqual(without, [])


if __name__ == "__main__":
    main()
