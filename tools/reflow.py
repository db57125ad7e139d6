"""Prose that is broken before column COLUMNS: Markdown, comments and docstrings of Python, docstring fields of C++.

Only a paragraph with a line that is too long is broken anew; tables, code, headings and made pages stay as they are.
Used by check_format. Comments of C++ but for the fields are clang-format's.
"""
import io
import re
import tokenize

from prose import COLUMNS, cpp_prose_files, is_pragma, markdown_files, python_files

# A word that would open a list, a heading, a quotation or a table, were it the first of a line.
_OPENS = re.compile(r"(?:[-+*>]|#+|=+|\d+[.)]|\|.*|```.*)$")
_ITEM = re.compile(r"(\s*)((?:[-*+]|\d+[.)])\s+)(?=\S)")
_TERM = re.compile(r"(\s*)(\S(?:\S| (?! )){0,40}\s{2,})(?=\S)")
_FIELD = re.compile(r"(\s*/// )((?:Shapes|Requires|Ordering|Cost|Throws|Source) +)(?=\S)")


def _words(text):
    """The words of `text`; code between backticks is a part of one, unless a line cannot take it."""
    words, open_ticks = [], 0
    for word in text.split():
        if open_ticks % 2:
            words[-1] += " " + word
        else:
            words.append(word)
        open_ticks += word.count("`")
    return [part for word in words for part in (word.split() if len(word) > COLUMNS * 2 // 3 else [word])]


def wrap(text, first, rest, last_room=0):
    """Lines of `text`, the first behind `first`, the others behind `rest`. The last one leaves `last_room` columns."""
    lines, words = [], _words(text)
    line = first
    for index, word in enumerate(words):
        room = COLUMNS - (last_room if index == len(words) - 1 else 0)
        head = first if not lines else rest
        if line != head and len(line) + 1 + len(word) > room:
            # A line must not begin with a word that has a meaning there, so the word before it comes along.
            before = line[len(head):].rsplit(" ", 1)
            if _OPENS.match(word) and len(before) == 2:
                lines.append(head + before[0])
                line = rest + before[1] + " " + word
            else:
                lines.append(line)
                line = rest + word
        else:
            line += word if line == head else " " + word
    return lines + [line]


def _indent(line):
    return len(line) - len(line.lstrip())


class _Block:
    """A run of lines that is broken as one: a paragraph, an item of a list, a term and its explanation."""

    def __init__(self, line, has_terms):
        found = _ITEM.match(line) or (has_terms and _TERM.match(line)) or re.match(r"(\s*)()", line)
        self.head = line[:found.end()]
        self.hang = len(self.head)
        self.lines = [line]

    def takes(self, line, has_terms, is_lazy):
        """Whether `line` goes on with it."""
        if _ITEM.match(line) or (has_terms and _TERM.match(line)):
            return False
        if len(self.lines) == 1 and self.head.strip() and _indent(line) > _indent(self.head):
            self.hang = _indent(line)
            return True
        return _indent(line) == self.hang or (is_lazy and self.head.strip() == "")

    def wrapped(self, last_room=0):
        if all(len(line) <= COLUMNS for line in self.lines[:-1]) and len(self.lines[-1]) + last_room <= COLUMNS:
            return self.lines
        text = " ".join(line.strip() for line in [self.lines[0][len(self.head):], *self.lines[1:]])
        return wrap(text, self.head, " " * self.hang, last_room)


def _reflowed(lines, has_terms, is_lazy, last_room=0):
    """`lines` of prose without code, block by block."""
    blocks = []
    for line in lines:
        if not line.strip():
            blocks.append(None)
        elif blocks and blocks[-1] and blocks[-1].takes(line, has_terms, is_lazy):
            blocks[-1].lines.append(line)
        else:
            blocks.append(_Block(line, has_terms))
    out = []
    for index, block in enumerate(blocks):
        out += block.wrapped(last_room if index == len(blocks) - 1 else 0) if block else [""]
    return out


def markdown(text):
    out, prose, is_code = [], [], False

    def flush():
        out.extend(_reflowed(prose, has_terms=False, is_lazy=True))
        prose.clear()

    for line in text.split("\n"):
        is_fence = line.lstrip().startswith("```")
        if is_fence or is_code or line.lstrip().startswith(("|", "#", "<")):
            flush()
            out.append(line)
            is_code = is_code != is_fence
        else:
            prose.append(line)
    flush()
    return "\n".join(out)


def _docstring(lines):
    """The lines of a docstring, quotes included."""
    indent = " " * _indent(lines[0])
    quotes = re.match(r"\s*([rR]?\"\"\")", lines[0])
    if not quotes or all(len(line) <= COLUMNS for line in lines):
        return lines
    has_own_end = lines[-1].strip() == '"""'
    body = [indent + lines[0][quotes.end():], *lines[1:]]
    if has_own_end:
        body.pop()
    else:
        body[-1] = body[-1].rstrip()[:-3]
    width = len(quotes.group(1))  # the first line has its quotes before the text, the last one after it
    body[0] = indent + "\0" * width + body[0][len(indent):]
    body = _reflowed(body, has_terms=True, is_lazy=False, last_room=0 if has_own_end else 3)
    body[0] = indent + quotes.group(1) + body[0][len(indent) + width:]
    if has_own_end:
        return [*body, indent + '"""']
    body[-1] += '"""'
    return body


def _comment_run(lines):
    """Lines that are comments of one indentation."""
    indent = " " * _indent(lines[0])
    bare = [re.sub(r"^\s*#", "", line) for line in lines]
    if any(is_pragma(line) for line in lines) or all(len(line) <= COLUMNS for line in lines):
        return lines
    padded = [indent + " " + line for line in bare]
    return [indent + ("#" + line[len(indent) + 1:]).rstrip() if line.strip() else indent + "#"
            for line in _reflowed(padded, has_terms=True, is_lazy=False)]


def _beside_code(line, column):
    """A line of code with a comment from `column` on: the comment stands above it, or opens the block that it
    begins."""
    code, comment = line[:column].rstrip(), line[column:]
    indent = " " * _indent(line)
    if re.match(r"(?:else|elif|except|finally|case)\b.*:$", code.strip()):
        return [code, *_comment_run([indent + "    " + comment])]
    return [*_comment_run([indent + comment]), code]


def python(text):
    # Edits are {first line: (line after the last one, new lines)}
    lines, edits, before = text.split("\n"), {}, tokenize.NEWLINE
    run = []

    def flush():
        if run:
            old = lines[run[0]:run[-1] + 1]
            edits[run[0]] = (run[-1] + 1, _comment_run(old))
            run.clear()

    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row = token.start[0] - 1
        if token.type == tokenize.COMMENT:
            is_alone = not lines[row][:token.start[1]].strip()
            if run and not (is_alone and row == run[-1] + 1 and _indent(lines[row]) == _indent(lines[run[-1]])):
                flush()
            if is_alone and not token.string.startswith("#!"):
                run.append(row)
            elif not is_alone and len(lines[row]) > COLUMNS and not is_pragma(token.string):
                edits[row] = (row + 1, _beside_code(lines[row], token.start[1]))
        elif token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            edits[row] = (token.end[0], _docstring(lines[row:token.end[0]]))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    flush()
    out, row = [], 0
    while row < len(lines):
        after, new = edits.get(row, (row + 1, [lines[row]]))
        out += new
        row = after
    return "\n".join(out)


def cpp(text):
    """The fields of docstrings: /// Throws    ..., with their next lines below the text."""
    out, lines, row = [], text.split("\n"), 0
    while row < len(lines):
        found, end = _FIELD.match(lines[row]), row + 1
        if found:
            rest = re.match(r"\s*///", lines[row]).group() + " " * (found.end() - len(found.group(1)) + 1)
            while end < len(lines) and re.match(r"\s*///  +\S", lines[end]):
                end += 1
            if any(len(line) > COLUMNS for line in lines[row:end]):
                text_of = " ".join([lines[row][found.end():], *(re.sub(r"^\s*///\s*", "", line) for line in lines[row + 1:end])])
                out += wrap(text_of, found.group(), rest)
                row = end
                continue
        out.append(lines[row])
        row += 1
    return "\n".join(out)


def files(root):
    """(path, its function) of all files with prose."""
    yield from ((path, markdown) for path in markdown_files(root))
    yield from ((path, python) for path in python_files(root))
    yield from ((path, cpp) for path in cpp_prose_files(root))
