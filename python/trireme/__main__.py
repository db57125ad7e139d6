"""`python -m trireme ARGUMENT …`: the command `trireme`, whose ranks run under this Python."""
import os
import pathlib
import sys
import sysconfig

_HERE = pathlib.Path(__file__).absolute().parent


def main(words):
    """Never returns: arguments, signals and the exit status are the program's."""
    if (_HERE / "bin" / "trireme").exists():  # installed, with what starts the program beside the package
        import _trireme_program  # pylint: disable=import-error,import-outside-toplevel
        sys.argv = [str(pathlib.Path(sysconfig.get_path("scripts")) / "trireme"), *words]
        _trireme_program.main()
    program = _HERE.parent.parent / "bin" / "trireme"
    if not program.exists():
        sys.exit(f"python -m trireme: there is no program {program}; build the target trireme_program (`make build`), or run `pip install .`")
    os.execve(program, ["trireme", *words], {"TRIREME_PYTHON": sys.executable, **os.environ})


if __name__ == "__main__":
    main(sys.argv[1:])
