"""tools/check_words holds the table of words against the prose of a tree."""
import unittest

from tree import Tree

HEAD = "# Words\n\n| word | meaning | never for | not written |\n|---|---|---|---|\n"
AXIS = "| axis | a direction of the mesh | a tensor's | |\n"
DIM = "| dim | a direction of a tensor | the mesh's | `dimension`, `dimension of it` |\n"
STAGE = "| stage | a part of a pipeline | | `stage 0` to `stage 3` outside of pipelines |\n"
USES = "An axis, a dim and a stage.\n"


class CheckWords(unittest.TestCase):
    def check(self, files, rows=AXIS + DIM + STAGE, uses=USES):
        """(exit status, lines that were printed)."""
        status, out = Tree(self, {"docs/words.md": HEAD + rows, "docs/uses.md": uses, **files}).run("check_words")
        return status, out.splitlines()

    def test_prose_with_the_words_of_the_table_passes(self):
        fine = {"docs/a.md": "ZeRO stage 3, a `dimension`, \"stage 2\" and [dim](dimension.md).\n```\ndimension\n```\n",
                "docs/pipeline.md": "stage 1\n", "src/a.cpp": "int dimension;  // a dim\n", "CHANGELOG.md": "dimension\n"}
        self.assertEqual(self.check(fine), (0, ["check_words: ok, 3 words"]))

    def test_another_word_is_named_in_pages_comments_and_docstrings(self):
        status, out = self.check({"docs/a.md": "a\n| Dimension |\n", "src/a.cpp": "int a;  // the dimension\n", "python/trireme/a.py": '"""A\n\ndimension of it."""\n'})
        self.assertEqual(status, 1)
        self.assertEqual(out, ["docs/a.md:2: 'Dimension'; docs/words.md says how it is called: 'dim'",
                               "python/trireme/a.py:3: 'dimension of it'; docs/words.md says how it is called: 'dim'",
                               "src/a.cpp:1: 'dimension'; docs/words.md says how it is called: 'dim'", "check_words: 3 errors"])

    def test_the_number_of_a_stage_is_a_pipelines(self):
        status, out = self.check({"docs/a.md": "at stages 2 and 3\n"})
        self.assertEqual((status, out[0]), (1, "docs/a.md:1: 'stages 2' is ZeRO's number; write 'ZeRO stages 2' (docs/words.md, 'stage')"))

    def test_a_phrase_may_be_broken_over_two_lines(self):
        self.assertEqual(self.check({"src/a.cpp": "// at ZeRO\n// stage 3\nint a;\n", "docs/a.md": "of ZeRO\n- stage 1\n\nZeRO\nstage 2\n"})[0], 1)
        self.assertEqual(self.check({"src/a.cpp": "// at ZeRO\n// stage 3\nint a;\n", "docs/a.md": "ZeRO\nstage 2, ZeRO stage\n3\n"})[0], 0)
        status, out = self.check({"docs/a.md": "the dimension\nof it\n"}, rows=AXIS + DIM.replace("`dimension`, ", "") + STAGE)
        self.assertEqual((status, out[0]), (1, "docs/a.md:2: 'dimension of it'; docs/words.md says how it is called: 'dim'"))

    def test_a_word_that_nobody_says_is_named(self):
        self.assertEqual(self.check({}, uses="An axis, a dim.\n")[1][0], "docs/words.md: nobody says 'stage'; take the row out")

    def test_a_row_without_a_meaning_one_that_stands_twice_and_a_wrong_order_are_named(self):
        out = self.check({}, rows=STAGE + AXIS + AXIS + "| dim | | | |\n")[1]
        self.assertEqual(out[0], "docs/words.md:8: a row has four cells: word, meaning, never for, not written; the first two say something")
        self.assertEqual(out[1], "docs/words.md: the rows are not in the order of the alphabet: 'axis'")
        self.assertEqual(out[2], "docs/words.md: 'axis' stands twice; one word has one meaning")

    def test_more_than_sixty_rows_are_too_many(self):
        rows = "".join(f"| w{number} | a | | |\n" for number in range(100, 161))
        self.assertIn("docs/words.md: 61 rows, and 60 are the most; leave out the least needed", self.check({}, rows=rows, uses=rows)[1])

    def test_a_comment_without_a_noun_is_named(self):
        out = self.check({"src/a.cpp": "// What it has.\nint a;\n"})[1]
        self.assertEqual(out[0], "src/a.cpp:1: a comment begins with its noun: // What it has.")


if __name__ == "__main__":
    unittest.main()
