"""Figures that a change may make smaller, and larger only with a reason: those of tools/concepts.txt. Used by
count_concepts.

A line there is "NAME: FIGURE", and behind it may stand a page of docs/decisions. check() compares what was counted with
what is kept: up to 2 % more passes, and one more where that is less. What is larger still needs a page which the line
names and which has the name and the new figure on one line of its own. What became smaller has to be kept, by update().
"""
import re
from typing import NamedTuple, Optional

FILE = "tools/concepts.txt"
_HEAD = """\
# Figures of tools/count_concepts. They become smaller by its --update; docs/decisions/023-walks.md says how one may grow.
"""
_LINE = re.compile(r"(?P<name>\S.*): (?P<value>\d+)(?: +(?P<page>docs/decisions/\S+))?")
_UPDATE = "run tools/count_concepts --update, which"


class Figure(NamedTuple):
    """A number that was counted. `bound`: the figure of what has no line yet. `is_held`: whether it may not grow."""
    name: str
    value: int
    bound: Optional[int] = None
    is_held: bool = True


class Kept(NamedTuple):
    """A line of the file. Without a `page` nothing larger is allowed."""
    value: int
    page: Optional[str] = None


def _most(kept):
    return kept + max(1, kept * 2 // 100)


def _read(root):
    """({name: Kept}, errors of the file's form)"""
    path, kept, errors = root / FILE, {}, []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.rstrip())
        if not match:
            errors.append(f"{FILE}:{number}: {line!r}; a line is 'NAME: FIGURE', or 'NAME: FIGURE docs/decisions/PAGE.md'")
        elif match["name"] in kept:
            errors.append(f"{FILE}:{number}: {match['name']!r} stands twice; leave the smaller figure")
        else:
            kept[match["name"]] = Kept(int(match["value"]), match["page"])
    return kept, errors


def _why_not(root, figure, page):
    """Why `page` is no decision for the figure; "" where it is one."""
    if not page:
        return "its line names no page"
    if not (root / page).is_file():
        return f"{page} is not there"
    number = re.compile(rf"(?<![\d.]){figure.value}(?!\.?\d)")
    lines = (root / page).read_text().splitlines()
    if not any(figure.name in line and number.search(re.sub(r"(?<=\d),(?=\d{3})", "", line)) for line in lines):
        return f"{page} has no line with both '{figure.name}' and {figure.value}"
    return ""


def _error(root, figure, kept):
    """The error of a figure, or None. Without a line (`kept` is None) its bound stands for one."""
    line = kept or Kept(figure.bound)
    if figure.value < line.value:
        return f"{figure.name}: {figure.value}, and {line.value} is kept; {_UPDATE} keeps it"
    if figure.value <= _most(line.value) or not (why := _why_not(root, figure, line.page)):
        return None
    place = (f"behind its figure in {FILE}" if kept else
             f"into {FILE}, as '{figure.name}: {line.value}  PAGE' (where only the name is new, change it there)")
    return (f"{figure.name}: {figure.value}, and {line.value} is {'kept' if kept else 'the bound'}, so that {_most(line.value)} is the most "
            f"({why}); make it smaller, or put the path of a page of docs/decisions {place}; the page says why it is worth it, "
            f"and has a line with '{figure.name}' and {figure.value}")


def check(root, figures):
    """Errors: what grew without a decision, what became smaller and is not kept, and lines of nothing."""
    if not (root / FILE).exists():
        return [f"{FILE} is not there; {_UPDATE} writes all figures"]
    kept, errors = _read(root)
    for figure in figures:
        line = kept.pop(figure.name, None)
        if not figure.is_held:
            continue
        if line is None and figure.bound is None:
            errors.append(f"{figure.name}: {figure.value}, and no figure is kept; {_UPDATE} keeps it")
        elif error := _error(root, figure, line):
            errors.append(error)
    return errors + [f"{name}: {line.value} is kept, and nothing of that name is counted; {_UPDATE} removes it"
                     for name, line in kept.items()]


def update(root, figures):
    """Writes what became smaller or is decided. A file that is not there begins with all figures. Returns the
    errors."""
    kept, errors = _read(root)
    if errors:
        return errors
    is_new, lines = not (root / FILE).exists(), {}
    for figure in figures:
        line = kept.get(figure.name) or (Kept(figure.bound) if figure.bound is not None and not is_new else None)
        if line is None or not figure.is_held or figure.value < line.value:
            lines[figure.name] = Kept(figure.value)
        elif not _why_not(root, figure, line.page):
            lines[figure.name] = Kept(figure.value, line.page)
        elif figure.name in kept:
            lines[figure.name] = line
    text = "".join(f"{name}: {line.value}" + (f"  {line.page}" if line.page else "") + "\n" for name, line in lines.items())
    (root / FILE).parent.mkdir(exist_ok=True)
    (root / FILE).write_text(_HEAD + text)
    return check(root, figures)
