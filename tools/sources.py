"""The C++ files of the tree, and their text without comments and literals. Used by the checks beside this file."""
import argparse
import pathlib
import re

# A raw string, a string, a character, a block comment, a line comment; digit separators are no character literals.
_NOISE = re.compile(
    r'R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])*\'|/\*.*?\*/|//[^\n]*',
    re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)


def root_from_arguments(description):
    """The repository to check: the one that holds this script, or --root."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    return parser.parse_args().root


def cpp_files(root, *folders):
    """All .h and .cpp files below `folders`, sorted."""
    return sorted(path for folder in folders for path in (root / folder).rglob("*") if path.suffix in (".h", ".cpp"))


def code_of(text, keeps_literals=False):
    """`text` with comments removed and literals emptied; line numbers stay."""
    def blank(match):
        if keeps_literals and not match.group().startswith("/"):
            return match.group()
        kept = '""' if match.group().startswith(('"', "R")) else "0" if match.group().startswith("'") else " "
        return kept + "\n" * match.group().count("\n")
    return _NOISE.sub(blank, text)


def without_directives(code):
    """`code` without preprocessor directives; line numbers stay."""
    return _DIRECTIVE.sub(lambda match: "\n" * match.group().count("\n"), code)


def pieces(code):
    """Yields (mark, line, text before it) for each "{", "}" and ";" of `code`, which has no comments or literals."""
    for mark, line, _, text in placed_pieces(without_directives(code)):
        yield mark, line, text


def placed_pieces(code):
    """As pieces() of `code` without directives: (mark, line, position of the mark, text before it).

    Formatted code has a space before the brace of a block, and none in an initializer such as size_{0}, which belongs
    to the text. Semicolons in parentheses are skipped.
    """
    line, start, parens, initializers = 1, 0, 0, 0
    for position, character in enumerate(code):
        if character == "\n":
            line += 1
        elif character == "{" and (initializers or re.match(r"[\w>]", code[position - 1:position])):
            initializers += 1
        elif character == "}" and initializers:
            initializers -= 1
        elif initializers:
            continue
        elif character in "()":
            parens += 1 if character == "(" else -1
        elif character in "{}" or (character == ";" and parens == 0):
            yield character, line, position, code[start:position].strip()
            start = position + 1


def print_largest(title, rows, most=8):
    """At most `most` of the `rows` of (size, name), the largest first."""
    print(f"{title}:")
    for size, name in sorted(rows, key=lambda row: (-row[0], row[1]))[:most]:
        print(f"  {size:5}  {name}")


def report(name, errors, summary):
    """Prints `errors` one a line and returns the exit status."""
    for error in errors:
        print(error)
    print(f"{name}: " + (f"{len(errors)} error{'s' * (len(errors) > 1)}" if errors else f"ok, {summary}"))
    return 1 if errors else 0
