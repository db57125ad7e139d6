"""README.md shows only what is there."""
import pathlib
import re
import textwrap
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()
# A path from the root, or of a header as programs include it.
FILE = re.compile(r"(?:include/trireme|trireme|src|tests|python/trireme|examples|tools|scripts|cmake|docs|benchmarks)/[\w{},./*-]+$")


def expanded(path):
    """The paths of one with {a,b} in it."""
    braces = re.search(r"\{([^{}]*)\}", path)
    if not braces:
        return [path]
    return [whole for part in braces.group(1).split(",") for whole in expanded(path[:braces.start()] + part.strip() + path[braces.end():])]


def names_of_tests():
    """Suite.Name of every C++ test."""
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*_test.cpp"))
    return {f"{suite}.{name}" for suite, name in re.findall(r"\bTEST(?:_[FP])?\((\w+),\s*(\w+)\)", sources)}


class Readme(unittest.TestCase):
    def test_the_c_plus_plus_in_it_is_of_the_example_that_is_built(self):
        block = re.search(r"```cpp\n(.*?)```", README, re.DOTALL).group(1)
        self.assertLessEqual(len(block.splitlines()), 15)
        self.assertIn(textwrap.indent(block, "  "), (ROOT / "examples/minimal/main.cpp").read_text())
        self.assertEqual(re.search(r"```json\n(.*?)```", README, re.DOTALL).group(1), (ROOT / "examples/minimal/ds_config.json").read_text())

    def test_the_figure_in_it_is_a_row_of_the_benchmarks(self):
        section = " ".join(README[README.index("## How fast"):].split())
        ours, deepspeed, fsdp, plain = re.search(r"\*\*(\d+) ms\*\*.*?(\d+) ms there, FSDP2 (\d+) ms.*?nothing (\d+) ms", section).groups()
        row = next(line for line in (ROOT / "benchmarks/README.md").read_text().splitlines() if line.startswith("| llama-130m bf16 | 2 |"))
        minima = [cell.split(" / ")[0].strip() for cell in row.split("|")]
        self.assertEqual([minima[3], minima[4], minima[6], minima[8]], [plain, ours, fsdp, deepspeed])

    def test_every_link_to_a_file_leads_to_one(self):
        pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
        # Without the code blocks: a lambda there looks like a link.
        dead = [f"{page.relative_to(ROOT)}: {link}" for page in pages
                for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
                if "://" not in link and not (page.parent / link).exists()]
        self.assertEqual(dead, [])

    def test_every_test_that_a_table_names_is_there(self):
        there = names_of_tests()
        named = re.findall(r"\(`([A-Z]\w+\.[A-Z]\w+)`\)", (ROOT / "docs/engine.md").read_text())
        self.assertGreater(len(named), 50)
        self.assertEqual([name for name in named if name not in there], [])

    def test_every_file_symbol_and_test_that_the_house_names_is_there(self):
        page = re.sub(r"```.*?```", "", (ROOT / "docs/house.md").read_text(), flags=re.DOTALL)
        named = re.findall(r"`([^`]+)`", page)
        paths = [re.sub("NAME|NOUN", "*", word) for word in named if "/" in word]
        self.assertGreater(len(paths), 40)
        self.assertEqual([path for path in paths if not any(ROOT.glob(path)) and not any(ROOT.glob(path + ".*"))], [])
        symbols = [word.removesuffix("()") for word in named if re.fullmatch(r"[a-z_.]+\(\)|k[A-Z]\w*|[A-Z][a-z]\w*", word)]
        self.assertGreater(len(symbols), 15)
        words = set(re.findall(r"\w+", "\n".join(path.read_text() for folder in ("include", "src", "python") for path in (ROOT / folder).rglob("*")
                                                 if path.suffix in (".h", ".cpp", ".py"))))
        self.assertEqual([symbol for symbol in symbols if symbol.split(".")[-1] not in words], [])
        tests = [word for word in named if re.fullmatch(r"[A-Z]\w+\.[A-Z]\w+", word)]
        self.assertGreater(len(tests), 12)
        self.assertEqual([test for test in tests if test not in names_of_tests()], [])
        self.assertLessEqual(len((ROOT / "docs/house.md").read_text().splitlines()), 120)

    def test_every_file_that_a_page_names_is_there(self):
        pages = [path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks/README.md") if path.name != "CHANGELOG.md"]
        named = [(page, path) for page in pages for word in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
                 if FILE.match(word) and not re.search("NAME|NOUN", word) for path in expanded(word)]
        self.assertGreater(len(named), 150)
        self.assertEqual([f"{page.relative_to(ROOT)}: {path}" for page, path in named
                          if not any(list(ROOT.glob(f"{folder}{path.rstrip('/')}")) for folder in ("", "include/", "python/"))], [])

    def test_the_index_has_every_page(self):
        index = (ROOT / "docs/README.md").read_text()
        pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
        self.assertEqual(sorted(pages - set(re.findall(r"\]\(([a-z-]+\.md)", index))), [])


if __name__ == "__main__":
    unittest.main()
