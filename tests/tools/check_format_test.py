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


if __name__ == "__main__":
    unittest.main()
