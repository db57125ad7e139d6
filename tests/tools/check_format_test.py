"""tools/check_format finds a badly formatted file, and mends it when asked."""
import shutil
import unittest

from tree import ROOT, Tree

BAD = "int  main( ){return 0 ;}\n"
GOOD = "int main() { return 0; }\n"


class CheckFormat(unittest.TestCase):
    def tree(self, text):
        tree = Tree(self, {"src/base/log.cpp": text})
        shutil.copy(ROOT / ".clang-format", tree.root)
        return tree

    def test_a_formatted_tree_passes(self):
        status, out = self.tree(GOOD).run("check_format")
        self.assertEqual(status, 0, out)

    def test_a_badly_formatted_file_is_named(self):
        status, out = self.tree(BAD).run("check_format")
        self.assertEqual(status, 1)
        self.assertIn("src/base/log.cpp: not formatted", out)

    def test_apply_mends_it(self):
        tree = self.tree(BAD)
        self.assertEqual(tree.run("check_format", "--apply")[0], 0)
        self.assertEqual((tree.root / "src/base/log.cpp").read_text(), GOOD)

    def mended(self, name, text):
        """`text` after --apply, which changes nothing a second time."""
        tree = Tree(self, {name: text})
        shutil.copy(ROOT / ".clang-format", tree.root)
        self.assertEqual(tree.run("check_format")[0], 1)
        self.assertEqual(tree.run("check_format", "--apply")[0], 0)
        self.assertEqual(tree.run("check_format")[0], 0)
        return (tree.root / name).read_text()

    def test_a_long_paragraph_is_broken_and_its_short_neighbours_are_left(self):
        text = self.mended("docs/a.md", f"# A\n\nshort\nlines\n\n{'word ' * 30}end\n\n| {'cell ' * 30}|\n\n```\n{'code ' * 30}\n```\n")
        self.assertEqual(text, f"# A\n\nshort\nlines\n\n{('word ' * 24).strip()}\n{'word ' * 6}end\n\n| {'cell ' * 30}|\n\n```\n{'code ' * 30}\n```\n")

    def test_an_item_hangs_below_its_text_and_code_is_not_broken(self):
        text = self.mended("docs/a.md", f"- one\n- {'word ' * 21}`a b c d e f g`, then\n  more\n- three\n")
        self.assertEqual(text, f"- one\n- {('word ' * 21).strip()}\n  `a b c d e f g`, then more\n- three\n")

    def test_no_line_begins_as_a_list_would(self):
        text = self.mended("docs/a.md", f"{'w ' * 59}x - y\n")
        self.assertEqual(text, f"{('w ' * 59).strip()}\nx - y\n")

    def test_docstrings_keep_their_quotes_and_terms_hang(self):
        text = self.mended("python/trireme/a.py", f'def f():\n    """{"word " * 22}end.\n\n    Raises  {"E " * 56}end.\n    """\n')
        self.assertEqual(text, f'def f():\n    """{("word " * 22).strip()}\n    end.\n\n    Raises  {("E " * 54).strip()}\n            E E end.\n    """\n')

    def test_a_long_comment_beside_code_goes_above_it_and_one_for_a_tool_stays(self):
        text = self.mended("python/trireme/a.py", f"a = 1  # {'w ' * 56}x\nb = 2  # pylint: disable={'w' * 100}\n")
        self.assertEqual(text, f"# {'w ' * 56}x\na = 1\nb = 2  # pylint: disable={'w' * 100}\n")

    def test_a_field_of_a_cpp_docstring_hangs(self):
        text = self.mended("include/trireme/a.h", f"/// A.\n/// Throws    {'E ' * 54}end\n///           again.\nint a();\n")
        self.assertEqual(text, f"/// A.\n/// Throws    {('E ' * 53).strip()}\n///           E end again.\nint a();\n")


if __name__ == "__main__":
    unittest.main()
