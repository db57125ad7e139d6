"""Lines of prose that are longer than COLUMNS, and comments that begin without a noun. Used by count_concepts,
check_words and reflow."""
import io
import re
import tokenize

from sources import cpp_files

COLUMNS = 120
_NO_NOUN = re.compile(r"\s*(?:///?|#|\"\"\")\s*(?:What|Of|Who|Whose|By what)\s")
_FOLDERS = ("docs", "benchmarks", "examples", "python", "src", "include", "tests", "tools")
_MADE_PAGES = ("docs/compose.md",)  # by tests, from texts of errors
_PRAGMA = re.compile(r"#\s*(?:pylint|noqa|type:|fmt:|isort)")


def is_pragma(text):
    """Whether a comment of Python is for a tool: it must stay on its line."""
    return _PRAGMA.search(text) is not None


def _outside_of_code(text):
    """(number, line) of Markdown that is no code."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line


def _markdown(text):
    """(number, line) of Markdown that is neither code nor a table."""
    return ((number, line) for number, line in _outside_of_code(text) if not line.lstrip().startswith("|"))


def _comments(text):
    """(number, line) of C++ with a comment to its end."""
    return ((number, line) for number, line in enumerate(text.splitlines(), 1) if re.search(r"(?:^|\s)//", line))


def _words_of_python(text):
    """(number, line) of comments and docstrings."""
    lines, before = text.splitlines(), tokenize.NEWLINE
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            is_comment = token.type == tokenize.COMMENT and not is_pragma(token.string)
            if is_comment or (token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)):
                yield from enumerate(lines[token.start[0] - 1:token.end[0]], token.start[0])
            if token.type not in (tokenize.COMMENT, tokenize.NL):
                before = token.type
    except (tokenize.TokenError, SyntaxError):
        return  # a file with an error in it has no more prose


def _beginnings(text, begins):
    """(number, line) of the first lines of runs of comments, each of which is a line that matches `begins`."""
    before = False
    for number, line in enumerate(text.splitlines(), 1):
        is_comment = re.match(begins, line) is not None
        if is_comment and not before:
            yield number, line
        before = is_comment


def comments_without_noun(root):
    """{language: [(file, number, line)]} of comments that begin with "What", "Of" or "Who", in the product and its
    tests."""
    kinds = {"C++": (r"\s*//", cpp_prose_files(root)), "Python": (r"\s*(?:#|\"\"\")", python_files(root))}
    return {kind: [(path, number, line) for path in paths for number, line in _beginnings(path.read_text(), begins) if _NO_NOUN.match(line)]
            for kind, (begins, paths) in kinds.items()}


def python_files(root):
    for folder in _FOLDERS:
        for path in (root / folder).rglob("*"):
            if path.is_file() and (path.suffix == ".py" or (folder == "tools" and not path.suffix and path.read_text().startswith("#!/usr/bin/env python3"))):
                yield path


def cpp_prose_files(root):
    return cpp_files(root, *_FOLDERS)


def markdown_files(root):
    """All pages but those that tests make."""
    found = [*root.glob("*.md"), *(path for folder in _FOLDERS for path in (root / folder).rglob("*.md"))]
    return [path for path in found if path.relative_to(root).as_posix() not in _MADE_PAGES]


def long_lines(root):
    """{kind of prose: lines longer than COLUMNS}"""
    kinds = {"Markdown": (_markdown, markdown_files(root)), "comments of C++": (_comments, cpp_prose_files(root)),
             "comments and docstrings of Python": (_words_of_python, python_files(root))}
    return {kind: sum(len(line) > COLUMNS for path in paths for _, line in lines_of(path.read_text()))
            for kind, (lines_of, paths) in kinds.items()}


def prose_lines(root):
    """(file, number, line) of all prose, tables included; of lines of C++ only the comment."""
    for paths, lines_of in ((markdown_files(root), _outside_of_code), (python_files(root), _words_of_python)):
        yield from ((path, number, line) for path in paths for number, line in lines_of(path.read_text()))
    for path in cpp_prose_files(root):
        yield from ((path, number, line[re.search(r"(?:^|\s)//", line).start():]) for number, line in _comments(path.read_text()))
