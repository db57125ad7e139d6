"""tools/check_budgets measures files, functions, nesting and folders, and lists the largest first."""
import unittest

from tree import Tree


def function(lines, name="work", body="  step();"):
    return "\n".join([f"void {name}(int a) {{", *[body] * (lines - 2), "}"]) + "\n"


class CheckBudgets(unittest.TestCase):
    def report(self, files):
        """{title: its rows}, and the last line."""
        status, out = Tree(self, files).run("check_budgets")
        self.assertEqual(status, 0, out)
        lists, *lines = {}, *out.splitlines()
        for line in lines[:-1]:
            if line.startswith(" "):
                lists[title].append(line.split(maxsplit=1))
            else:
                title = line.removesuffix(":")
                lists[title] = []
        return lists, lines[-1]

    def test_files_are_listed_by_their_lines_and_those_of_the_product_apart(self):
        lists, last = self.report({"src/base/a.cpp": "int a;\n" * 9, "include/trireme/b.h": "int b;\n" * 600, "tests/base/a_test.cpp": "\n" * 900})
        self.assertEqual(lists["lines of a product file"], [["600", "include/trireme/b.h"], ["9", "src/base/a.cpp"]])
        self.assertEqual(lists["lines of another file"], [["900", "tests/base/a_test.cpp"]])
        self.assertEqual(last, "check_budgets: 3 files; product 609 lines in 2 files, median 304")

    def test_a_list_holds_the_largest_alone(self):
        lists, _ = self.report({f"src/base/part{n}.cpp": "int a;\n" * (n + 1) for n in range(20)})
        self.assertEqual([size for size, _ in lists["lines of a product file"]], [str(n) for n in range(20, 12, -1)])
        self.assertEqual(lists["files of a folder"], [["20", "src/base"]])

    def test_a_long_function_is_found_whatever_its_form(self):
        forms = {"plain": function(71),
                 "constructor": "Group::Group(int n) : size_{n}, rank_(0) {\n" + "  step();\n" * 69 + "}\n",
                 "member": "class Group {\n public:\n  int size() const noexcept {\n" + "  step();\n" * 69 + "  }\n};\n",
                 "template": "template <typename T>\nT fold(std::vector<T> values) {\n" + "  step();\n" * 69 + "}\n",
                 "test": "TEST(Group, HasASize) {\n" + "  step();\n" * 69 + "}\n",
                 "in a namespace": "namespace trireme {\nnamespace {\n" + function(71) + "}\n}\n"}
        for form, text in forms.items():
            with self.subTest(form):
                self.assertEqual(self.report({"src/base/log.cpp": text})[0]["lines of a function"][0][0], "71")

    def test_braces_in_literals_and_comments_do_not_count(self):
        lists, _ = self.report({"src/base/log.cpp": 'void f() {\n  say("{", \'{\', R"({{)");  // {\n}\n' + function(70)})
        self.assertEqual(lists["lines of a function"], [["70", "src/base/log.cpp:4: work"], ["3", "src/base/log.cpp:1: f"]])

    def test_nesting_is_that_of_control_and_not_of_classes_or_lambdas(self):
        deep = "void f(int n) {\n  for (;;) {\n    if (n) {\n      while (n) {\n      }\n    }\n  }\n}\n"
        lists, _ = self.report({"src/base/log.cpp": "namespace a {\n" + deep + "}\n"})
        self.assertEqual(lists["depth of nesting"], [["3", "src/base/log.cpp:2: f"]])


if __name__ == "__main__":
    unittest.main()
