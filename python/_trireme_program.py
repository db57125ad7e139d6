"""The command `trireme`: becomes the C++ program that lies in the package `trireme`.

Beside the package, not in it: an import from there loads torch first, which takes longer than most commands run.
"""
import importlib.util
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent


def environment(here, torch_folder):
    """The environment of the program: ranks that it starts run under this Python, and libtorch is found where torch
    is."""
    result = {"TRIREME_PYTHON": sys.executable, **os.environ, "TRIREME_COMMAND": os.path.abspath(sys.argv[0])}
    libraries = torch_folder / "lib"
    # The program looks beside its own package. Torch may lie elsewhere, as with `pip install --user` or a .pth file.
    if not (here / "torch" / "lib").is_dir():
        before = os.environ.get("LD_LIBRARY_PATH")
        result["LD_LIBRARY_PATH"] = f"{libraries}:{before}" if before else str(libraries)
    return result


def main():
    """Never returns: arguments, signals and the exit status are the program's."""
    torch = importlib.util.find_spec("torch")  # without importing it
    if torch is None or torch.origin is None:
        sys.exit(f"trireme: {sys.executable} has no torch, whose libraries the program needs; pip install trireme brings it")
    program = HERE / "trireme" / "bin" / "trireme"
    os.execve(program, ["trireme", *sys.argv[1:]], environment(HERE, pathlib.Path(torch.origin).parent))
