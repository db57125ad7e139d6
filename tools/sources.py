"""The C++ files of the tree, and their text without comments and literals. Used by the checks beside this file."""
import argparse
import pathlib
import re

# A raw string, a string, a character, a block comment, a line comment; digit separators are no character literals.
_NOISE = re.compile(
    r'R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])*\'|/\*.*?\*/|//[^\n]*',
    re.DOTALL)


def root_from_arguments(description):
    """The repository to check: the one that holds this script, or --root."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    return parser.parse_args().root


def cpp_files(root, *folders):
    """All .h and .cpp files below `folders`, sorted."""
    return sorted(path for folder in folders for path in (root / folder).rglob("*") if path.suffix in (".h", ".cpp"))


def code_of(text):
    """`text` with comments removed and literals emptied; line numbers stay."""
    def blank(match):
        kept = '""' if match.group().startswith(('"', "R")) else "0" if match.group().startswith("'") else " "
        return kept + "\n" * match.group().count("\n")
    return _NOISE.sub(blank, text)


def report(name, errors, summary):
    """Prints `errors` one a line and returns the exit status."""
    for error in errors:
        print(error)
    print(f"{name}: " + (f"{len(errors)} error{'s' * (len(errors) > 1)}" if errors else f"ok, {summary}"))
    return 1 if errors else 0
