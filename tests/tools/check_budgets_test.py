"""tools/check_budgets measures files, functions and nesting, and refuses what is over, unless there is a reason."""
import unittest

from tree import Tree


def function(lines, name="work", body="  step();"):
    return "\n".join([f"void {name}(int a) {{", *[body] * (lines - 2), "}"]) + "\n"


class CheckBudgets(unittest.TestCase):
    def check(self, files):
        return Tree(self, files).run("check_budgets")

    def test_a_small_tree_passes(self):
        status, out = self.check({"src/base/log.cpp": function(70)})
        self.assertEqual((status, out), (0, "check_budgets: ok, 1 files, median 70 lines, src/engine 0\n"))

    def test_a_long_source_needs_a_reason(self):
        files = {"src/base/log.cpp": "int a;\n" * 351, "src/base/a.cpp": "", "src/base/b.cpp": ""}
        status, out = self.check(files)
        self.assertEqual(status, 1)
        self.assertIn("src/base/log.cpp:1: 351 lines, the budget is 350 (a budget up to 500 needs a reason", out)
        status, out = self.check(files | {"tools/budgets.txt": "src/base/log.cpp 360 one table\n"})
        self.assertEqual(status, 0, out)

    def test_no_reason_lifts_the_hard_cap(self):
        status, out = self.check({"src/base/log.cpp": "int a;\n" * 501, "src/base/a.cpp": "", "src/base/b.cpp": "",
                                  "tools/budgets.txt": "src/base/log.cpp 600 one table\n"})
        self.assertEqual(status, 1)
        self.assertIn("src/base/log.cpp:1: 501 lines, the budget is 500\n", out)

    def test_a_reason_that_is_no_longer_needed_is_refused(self):
        status, out = self.check({"src/base/log.cpp": "int a;\n", "tools/budgets.txt": "src/base/log.cpp 360 one table\n"})
        self.assertEqual(status, 1)
        self.assertIn("tools/budgets.txt:1: src/base/log.cpp is within its budget", out)

    def test_headers_and_tests_have_their_own_budgets(self):
        status, out = self.check({"include/trireme/comm/group.h": "\n" * 201, "src/comm/call.h": "\n" * 151, "src/base/a.cpp": "",
                                  "tests/comm/group_test.cpp": "\n" * 801, "src/base/b.cpp": "", "src/base/c.cpp": ""})
        self.assertEqual(status, 1)
        for line in ("group.h:1: 201 lines, the budget is 200", "call.h:1: 151 lines, the budget is 150",
                     "group_test.cpp:1: 801 lines, the budget is 800"):
            self.assertIn(line, out)

    def test_a_long_function_is_found_whatever_its_form(self):
        forms = {"plain": function(71),
                 "constructor": "Group::Group(int n) : size_{n}, rank_(0) {\n" + "  step();\n" * 69 + "}\n",
                 "member": "class Group {\n public:\n  int size() const noexcept {\n" + "  step();\n" * 69 + "  }\n};\n",
                 "template": "template <typename T>\nT fold(std::vector<T> values) {\n" + "  step();\n" * 69 + "}\n",
                 "test": "TEST(Group, HasASize) {\n" + "  step();\n" * 69 + "}\n",
                 "in a namespace": "namespace trireme {\nnamespace {\n" + function(71) + "}\n}\n"}
        for form, text in forms.items():
            with self.subTest(form):
                status, out = self.check({"src/base/log.cpp": text})
                self.assertEqual(status, 1)
                self.assertIn(": 71 lines, the budget is 70", out)

    def test_braces_in_literals_and_comments_do_not_count(self):
        status, out = self.check({"src/base/log.cpp": 'void f() {\n  say("{", \'{\', R"({{)");  // {\n}\n' + function(70)})
        self.assertEqual(status, 0, out)

    def test_control_nested_four_deep_is_refused(self):
        deep = "void f(int n) {\n  for (;;) {\n    if (n) {\n      while (n) {\n%s      }\n    }\n  }\n}\n"
        self.assertEqual(self.check({"src/base/log.cpp": deep % ""})[0], 0)
        status, out = self.check({"src/base/log.cpp": deep % "        if (n) {\n        }\n"})
        self.assertEqual(status, 1)
        self.assertIn("src/base/log.cpp:1: f: nested 4 deep, the budget is 3", out)

    def test_the_engine_as_a_whole_has_a_budget(self):
        status, out = self.check({f"src/engine/part{n}.cpp": "int a;\n" * 301 for n in range(5)} |
                                 {f"src/base/part{n}.cpp": "" for n in range(5)})
        self.assertEqual(status, 1)
        self.assertIn("src/engine: 1505 lines, the budget is 1500", out)

    def test_the_median_file_has_a_budget(self):
        status, out = self.check({f"src/base/part{n}.cpp": "int a;\n" * 160 for n in range(3)})
        self.assertEqual(status, 1)
        self.assertIn("the median file of include/ and src/ has 160 lines, the budget is 150", out)


if __name__ == "__main__":
    unittest.main()
