"""The types, functions and #include lines of C++ files, found by their text. Used by count_concepts and its walks.

It reads formatted code without a compiler: what macros, overloads and templates decide is not seen.
"""
import collections
import re

from sources import code_of, cpp_files, placed_pieces, without_directives

SPACES = re.compile(r"(?:inline\s+)?namespace\b(?:\s+\[\[.*?\]\])?\s*([\w:]*)$")
TYPE = re.compile(r"\b(?P<key>class|struct|union|enum(?:\s+(?:class|struct))?)\s+(?:\[\[.*?\]\]\s*|alignas\(.*?\)\s*)*"
                  r"(?P<name>[A-Za-z_][\w:]*(?:<.*?>)?)\s*(?:final\s*)?(?P<bases>:(?!:).*)?$", re.DOTALL)
ACCESS = re.compile(r"^(public|private|protected)\s*:(?!:)\s*")
NO_MEMBER = re.compile(r"(?:using|typedef|friend|static_assert|class|struct|union|enum|template)\b")
OUTSIDE = re.compile(r"((?:\w+::)+)(?:~?\w+|operator\W{1,3}|operator\s[\w:]+)\s*\(")  # the name of a class's function
FUNCTION = re.compile(r"((?:\w+::)*(?:operator\s*\(\)|operator\s*[^\w\s(]{1,3}|operator\s+[\w:]+|~?\w+))\s*\(")
ALIAS = re.compile(r"using\s+(\w+)\s*=\s*(.+)$", re.DOTALL)
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
CONTROL = re.compile(r"^(?:\}?\s*else\s*)?(?:if|for|while|switch|catch|do|try|else|return|case|default)\b|=\s*$")


class Class:
    """A class, struct or union as its definition shows it."""

    def __init__(self, name="", file="", access="public", bases=""):
        self.name, self.file, self.access = name, file, access
        self.bases = re.sub(r"\b(?:public|private|protected|virtual)\b", " ", bases)
        self.count = collections.Counter()
        self.files = set()  # the .cpp files that define its functions
        self.types_of = {}  # the declared type of each data member, and the result's of each method


class Function:
    """The definition of a function: `text` begins with its head. `owner`: its Class, or None."""

    def __init__(self, name, file, scope, owner):
        self.name, self.file, self.scope, self.owner, self.text = name, file, scope, owner, ""

    @property
    def full_name(self):
        return f"{self.owner.name.removeprefix('trireme::')}::{self.name}" if self.owner else self.name

    @property
    def lines(self):
        return self.text.count("\n") + 1


def without_templates(text):
    """`text` without template parameters and arguments, and without the angle brackets of operators."""
    text = re.sub(r"operator\s*(?:<=>|<<=?|>>=?|->\*?|<=?|>=?)", "operator+", text)
    while (shorter := re.sub(r"<[^<>]*>", "", text)) != text:
        text = shorter
    text = re.sub(r"\bdecltype\((?:[^()]|\([^()]*\))*\)", "auto", text)
    return re.sub(r"^(?:template\s*)+", "", text)


def split_at_commas(text):
    """The parts of `text` between commas that stand in no bracket."""
    parts, depth = [""], 0
    for character in text:
        depth += character in "<({["
        depth -= character in ">)}]"
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def count_statement(owner, text):
    """Adds the declaration `text` of a class body to the class."""
    whole = re.sub(r"^(?:\[\[.*?\]\]\s*)+", "", text)
    owner.count["friends"] += bool(re.match(r"friend\s+(?:class|struct)\b", whole))
    text = re.sub(r"^(?:\[\[.*?\]\]\s*)+", "", without_templates(text))
    if not text or NO_MEMBER.match(text):
        return
    declared = re.sub(r"alignas\(.*?\)|\{.*?\}|(?<!operator)=(?:\([^()]*\)|[^,])*", "", text)  # without values
    if "(" not in declared:
        owner.count["members"] += 0 if text.startswith("static ") else 1 + declared.count(",")
        note_members(owner, whole)
        return
    if function := FUNCTION.search(re.sub(r"^template\s*", "", declared)):
        owner.types_of.setdefault(function.group(1), whole[:whole.find(function.group(1).split("operator")[0] + "(")] or whole)
    if not re.search(r"=\s*delete$", text):
        owner.count["methods"] += 1
        owner.count["public methods"] += owner.access == "public"
        owner.count["virtual methods"] += bool(re.match(r"virtual\b|.*\boverride\b", text, re.DOTALL)) and "~" not in text


def note_members(owner, text):
    first, *others = (re.sub(r"\{.*|(?<![=<>!])=.*", "", part, flags=re.DOTALL).strip() for part in split_at_commas(text))
    if name := re.search(r"(\w+)(?:\[.*\])?$", first):
        for each in (name.group(1), *(re.sub(r"\W", "", other) for other in others)):
            owner.types_of[each] = first[:name.start()]


class Tree:
    """The named types and the functions of the files that read() was given."""

    def __init__(self):
        self.types = collections.Counter()  # named types by file
        self.classes = {}                   # by full name, enumerations too
        self.functions = []
        self.results = {}                   # of a free function's name: {file that declares it: its result's type}
        self.aliases = {}                   # name: {file: text}
        self.includes = {}                  # by file, as they are written
        self.lines = {}

    def read_all(self, root, *folders):
        for path in sorted(cpp_files(root, *folders), key=lambda path: path.suffix != ".h"):
            name, text = path.relative_to(root).as_posix(), path.read_text()
            self.lines[name] = len(text.splitlines())
            self.includes[name] = INCLUDE.findall(text)
            self.read(name, code_of(text))
        return self

    def read(self, name, code):
        """Reads the file `name`; a header comes before the .cpp files that define its functions."""
        code = without_directives(code)
        blocks = []  # what is open: (its name or "", its Class, its Function)
        for mark, _, position, head in placed_pieces(code):
            owner = blocks[-1][1] if blocks else None
            function = next((block[2] for block in blocks if block[2]), None)
            while owner and (access := ACCESS.match(head)):
                owner.access, head = access.group(1), head[access.end():]
            if mark == "}":
                if blocks and (done := blocks.pop()[2]):
                    done.text += code[done.begin:position]
            elif mark == "{":
                blocks.append(self._open(name, head, blocks, owner, function))
                if made := blocks[-1][2]:
                    made.begin = position + 1
            elif owner:
                count_statement(owner, head)
            elif not function:
                self._note_declaration(name, head)
            if mark == ";" and (alias := ALIAS.match(head)):
                self.aliases.setdefault(alias.group(1), {})[name] = alias.group(2)

    def _note_declaration(self, file, head):
        if declared := FUNCTION.search(without_templates(head)):
            name = declared.group(1)
            self.results.setdefault(name, {})[file] = head[:head.find(name + "(")]

    def _open(self, file, head, blocks, owner, function):
        scope = "".join(f"{block[0]}::" for block in blocks if block[0])
        if space := SPACES.search(head):
            return space.group(1) or f"({file})", None, None  # what an unnamed namespace holds belongs to its file
        plain = without_templates(head)
        if (kind := TYPE.search(plain)) and "(" not in plain[:kind.start()]:
            self.types[file] += 1
            is_enum = kind["key"].startswith("enum")
            made = Class(scope + kind["name"], file, "private" if kind["key"] == "class" else "public", "" if is_enum else kind["bases"] or "")
            if is_enum:
                self.classes.setdefault(made.name, made)
                return "", None, None
            self.classes[made.name] = made
            return kind["name"], made, None
        if owner:
            count_statement(owner, head)
        elif file.endswith(".cpp") and (outside := OUTSIDE.search(plain)):
            defined = self.classes.get(scope + outside.group(1)[:-2])
            if defined:
                defined.files.add(file)
        if function or CONTROL.search(plain) or not (named := FUNCTION.search(plain)):
            return "", None, None
        return "", None, self._function(file, scope, head, named.group(1), owner)

    def _function(self, file, scope, head, name, owner):
        *path, last = name.split("::")
        if path:
            spaces = scope.split("::")[:-1]
            owner = next((self.classes[full] for end in range(len(spaces), -1, -1)
                          if (full := "::".join(spaces[:end] + path)) in self.classes), None)
        elif not owner:
            self._note_declaration(file, head)
        made = Function(re.sub(r"\s", "", last), file, scope, owner)
        made.text = head + " {"
        self.functions.append(made)
        return made
