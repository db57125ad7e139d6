"""Where the package's modules are found: one module under all of its names, and a core that knows no façade."""
import ast
import importlib.util
import pathlib

from harness import Case, main

# Paths that programs import, and where they lie. Inner modules come first: a finder of files would make second modules
# of these.
PATHS = {
    "runtime.pipe.engine": "runtime.pipe.engine", "runtime.pipe.topology": "runtime.pipe.topology", "runtime.pipe": "runtime.pipe",
    "runtime.lr_schedules": "runtime.lr_schedules", "runtime.engine": "runtime.engine", "runtime.config": "runtime.config",
    "runtime.utils": "runtime.utils", "runtime.dataloader": "utils.programs", "runtime.zero": "zero", "runtime.zero.config": "runtime.sections",
    "runtime.zero.partition_parameters": "zero", "runtime.activation_checkpointing.checkpointing": "checkpointing", "runtime": "runtime",
    "ops.adam.cpu_adam": "ops.adam", "ops.adam": "ops.adam", "ops.op_builder.fused_adam": "ops.op_builder", "ops": "ops",
    "utils.zero_to_fp32": "utils.zero_to_fp32", "utils.logging": "utils.logging", "utils.groups": "utils.groups", "utils": "utils",
    "comm.comm": "comm", "comm": "comm", "accelerator.real_accelerator": "accelerator", "accelerator": "accelerator",
    "checkpoint.utils": "checkpoint", "checkpointing": "checkpointing", "launcher.runner": "launcher.runner", "pipe": "pipe", "zero": "zero",
    "monitor.monitor": "monitor.monitor", "monitor.config": "monitor.config", "monitor": "monitor", "git_version_info": "git_version_info", "compile.passes.sp_compile": "autosp"}


class Paths(Case):
    def test_a_module_is_one_object_under_all_of_its_names(self):
        result = self.on_ranks(0, f"""
            import importlib, pickle, sys
            paths = {PATHS!r}
            made = {{name: (importlib.import_module(f"trireme.{{name}}"), importlib.import_module(f"deepspeed.{{name}}"),
                           importlib.import_module(f"trireme.deepspeed.{{real}}")) for name, real in paths.items()}}
            files = {{}}
            for module in list(sys.modules.values()):
                if module.__name__.startswith("trireme") and getattr(module, "__file__", None):
                    files.setdefault(module.__file__, set()).add(id(module))
            import trireme
            from trireme.runtime.lr_schedules import WarmupLR
            result = {{"several": [name for name, modules in made.items() if len(set(map(id, modules))) > 1],
                      "files": [file for file, modules in files.items() if len(modules) > 1],
                      "attributes": [name for name, (module, *_) in made.items() if "." not in name and getattr(trireme, name) is not module],
                      "pickled": pickle.loads(b"ctrireme.runtime.lr_schedules\\nWarmupLR\\n.") is WarmupLR,
                      "loads": pickle.loads(pickle.dumps(WarmupLR)) is WarmupLR}}
        """, as_deepspeed=True, launched=True)
        self.assertEqual(result, {"several": [], "files": [], "attributes": [], "pickled": True, "loads": True})

    def test_a_type_checker_finds_each_module_where_programs_import_it(self):
        package = pathlib.Path(importlib.util.find_spec("trireme").origin).parent
        for name in (name for name, real in PATHS.items() if name == real):
            with self.subTest(name):
                stub = package / (name.replace(".", "/"))
                found = stub.with_suffix(".pyi") if not stub.is_dir() else stub / "__init__.pyi"
                self.assertEqual(found.read_text(), f"from trireme.deepspeed.{name} import *\n")

    def test_what_facades_stand_on_knows_none_of_them(self):
        package = pathlib.Path(importlib.util.find_spec("trireme").origin).resolve().parent
        core = [path for path in package.rglob("*.py")
                if path.relative_to(package).parts[0] not in ("deepspeed", "deepspeed_path", "__init__.py", "as_deepspeed.py")]
        self.assertGreater(len(core), 15)
        for path in core:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    named = f"{node.module}.{'.'.join(name.name for name in node.names)}"
                    with self.subTest(path=path.relative_to(package), line=node.lineno):
                        self.assertNotIn("deepspeed", named.split("."))


if __name__ == "__main__":
    main()
