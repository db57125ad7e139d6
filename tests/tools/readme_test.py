"""README.md shows only what is there."""
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


class Readme(unittest.TestCase):
    def test_the_program_in_it_is_the_example_that_is_built(self):
        for language, file in (("cpp", "main.cpp"), ("json", "ds_config.json")):
            block = re.search(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
            self.assertEqual(block, (ROOT / "examples/minimal" / file).read_text())

    def test_every_link_to_a_file_leads_to_one(self):
        pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
        # Without the code blocks: a lambda there looks like a link.
        dead = [f"{page.relative_to(ROOT)}: {link}" for page in pages
                for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
                if "://" not in link and not (page.parent / link).exists()]
        self.assertEqual(dead, [])

    def test_every_test_that_a_table_names_is_there(self):
        sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*_test.cpp"))
        there = {f"{suite}.{name}" for suite, name in re.findall(r"\bTEST(?:_[FP])?\((\w+),\s*(\w+)\)", sources)}
        named = re.findall(r"\(`([A-Z]\w+\.[A-Z]\w+)`\)", (ROOT / "docs/engine.md").read_text())
        self.assertGreater(len(named), 50)
        self.assertEqual([name for name in named if name not in there], [])


if __name__ == "__main__":
    unittest.main()
