"""What README.md shows is what is there."""
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


if __name__ == "__main__":
    unittest.main()
