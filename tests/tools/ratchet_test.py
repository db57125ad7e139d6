"""tools/count_concepts --check holds the figures of tools/concepts.txt: none grows without a decision, smaller ones are
kept."""
import unittest

from tree import BEGINNINGS, Tree

KEPT = "tools/concepts.txt"
PAGE = "docs/decisions/099-a-longer-step.md"
STEP = "src/engine/engine.cpp"


def walk_of_step(functions):
    """The file STEP with a walk of a step that meets this many functions."""
    names = [f"called_{n}()" for n in range(functions - 1)]
    called, calls = ("".join(form.format(name) for name in names) for form in ("void {} {{}}\n", "    {};\n"))
    return f"{called}struct Engine {{\n  void backward() {{}}\n  void step() {{\n{calls}  }}\n}};\n"


def class_with(methods, members=0):
    return ("class Large {\n" + "".join(f"  void does_{n}();\n" for n in range(methods)) + "".join(f"  int has_{n};\n" for n in range(members)) + "};\n")


def python_class_with(methods):
    return "class Root:\n" + "".join(f"    def does_{n}(self): pass\n" for n in range(methods))


class ARatchet(unittest.TestCase):
    def kept(self, files):
        """A tree whose figures are those of `files`."""
        tree = Tree(self, BEGINNINGS | files)
        self.assert_errors(tree, [], "--update")
        return tree

    def assert_errors(self, tree, expected, flag="--check"):
        """Each error begins with its text, and there are no others."""
        status, out = tree.run("count_concepts", flag)
        errors = [line.removeprefix("error: ") for line in out.splitlines() if line.startswith("error: ")]
        self.assertEqual(len(errors), len(expected), errors)
        for error, begin in zip(errors, expected):
            self.assertTrue(error.startswith(begin), error)
        self.assertEqual(status, int(bool(expected)))
        return errors

    def assert_held(self, file, before, passes, after, expected):
        """Where `file` becomes `after`, the errors are `expected`, also by --update, which writes nothing then."""
        tree = self.kept({file: before})
        kept = (tree.root / KEPT).read_text()
        for text, errors in ((passes, []), (after, expected)):
            (tree.root / file).write_text(text)
            self.assert_errors(tree, errors)
        self.assert_errors(tree, expected, "--update")
        self.assertEqual((tree.root / KEPT).read_text(), kept)

    def test_a_longer_walk_is_refused_from_a_second_function_on_below_a_hundred(self):
        self.assert_held(STEP, walk_of_step(20), walk_of_step(21), walk_of_step(22),
                          [f"walk step{rooms}, functions: 22, and 20 is kept, so that 21 is the most (its line names no page); make it smaller, or put the "
                           f"path of a page of docs/decisions behind its figure in {KEPT}" for rooms in ("", " through the lowest rooms")]
                          + ["C++, lines of the largest function: 23, and 21 is kept"])

    def test_two_percent_more_pass_from_a_hundred_on(self):
        self.assert_held("src/pager/large.h", class_with(150), class_with(153), class_with(154),
                          ["C++ class Large, methods: 154, and 150 is kept, so that 153 is the most"])

    def test_a_walk_below_the_pager_is_held_by_its_second_figure(self):
        tree = self.kept({})
        (tree.root / "src/base").mkdir()
        (tree.root / "src/base/group.h").write_text("struct Group {\n  void meet() {\n    one();\n    two();\n  }\n  void one() {}\n  void two() {}\n};\n")
        path = tree.root / "src/engine/beginnings.cpp"
        path.write_text('#include "base/group.h"\n' + path.read_text().replace("void cut() {}", "void cut(Group& group) { group.meet(); }"))
        self.assert_errors(tree, ["walk sequence through the lowest rooms, functions: 5, and 2 is kept", "C++, lines of the largest function"])

    def test_a_larger_class_is_refused(self):
        self.assert_held("src/pager/large.h", class_with(32, 13), class_with(33, 14), class_with(34, 15),
                          ["C++ class Large, methods: 34, and 32 is kept, so that 33 is the most", "C++, members of the largest class: 15, and 13 is kept"])

    def test_a_class_of_python_that_grew_is_refused(self):
        self.assert_held("python/trireme/root.py", python_class_with(40), python_class_with(41), python_class_with(42),
                          ["Python class trireme.root.Root, methods: 42, and 40 is kept, so that 41 is the most"])

    def test_a_class_that_grows_over_the_bound_is_refused(self):
        self.assert_held("python/trireme/root.py", python_class_with(20), python_class_with(31), python_class_with(32),
                          ["Python class trireme.root.Root, methods: 32, and 30 is the bound, so that 31 is the most (its line names no page); make it "
                           f"smaller, or put the path of a page of docs/decisions into {KEPT}, as 'Python class trireme.root.Root, methods: 30  PAGE'"])

    def test_an_axis_that_more_files_name_is_refused(self):
        tree = self.kept({"src/config/one.cpp": "int disk;\n"})
        for name, errors in (("two", []), ("three", ["axis disk, files outside of its rooms: 3, and 1 is kept, so that 2 is the most"])):
            (tree.root / f"src/config/{name}.cpp").write_text("int nvme;\n")
            self.assert_errors(tree, errors)

    def test_lines_are_kept_in_thousands_and_may_grow(self):
        tree = self.kept({"tests/a.cpp": "int a;\n" * 900})
        (tree.root / "tests/a.cpp").write_text("int a;\n" * 1900)
        self.assert_errors(tree, [])
        self.assertIn("\nC++, thousands of lines of tests: 1\n", (tree.root / KEPT).read_text())
        self.assert_errors(tree, [], "--update")
        self.assertIn("\nC++, thousands of lines of tests: 2\n", (tree.root / KEPT).read_text())

    def test_a_decision_that_holds_the_figure_lets_it_grow(self):
        name = "Python class trireme.root.Root, methods"
        tree = self.kept({"python/trireme/root.py": python_class_with(40)})
        kept = (tree.root / KEPT).read_text()
        (tree.root / KEPT).write_text(kept.replace(f"{name}: 40\n", f"{name}: 40  {PAGE}\n"))
        (tree.root / "python/trireme/root.py").write_text(python_class_with(50))
        self.assert_errors(tree, [f"{name}: 50, and 40 is kept, so that 41 is the most ({PAGE} is not there)"])
        (tree.root / PAGE).parent.mkdir(parents=True)
        for page in ("", f"| {name} | 40 | 49 |\n", f"| {name} | 40 | 150 |\n", f"| {name} | 40 | 50.5 |\n", f"{name}:\n50\n"):
            (tree.root / PAGE).write_text(page)
            self.assert_errors(tree, [f"{name}: 50, and 40 is kept, so that 41 is the most ({PAGE} has no line with both '{name}' and 50)"])
        (tree.root / PAGE).write_text(f"# 099\n\n| {name} | 40 | 50 |\n")
        self.assert_errors(tree, [])
        self.assert_errors(tree, [], "--update")
        self.assertEqual((tree.root / KEPT).read_text(), kept.replace(f"{name}: 40\n", f"{name}: 50  {PAGE}\n"))
        (tree.root / "python/trireme/root.py").write_text(python_class_with(45))
        self.assert_errors(tree, [], "--update")
        self.assertEqual((tree.root / KEPT).read_text(), kept.replace(f"{name}: 40\n", f"{name}: 45\n"))

    def test_a_smaller_figure_has_to_be_kept(self):
        name = "Python class trireme.root.Root, methods"
        tree = self.kept({"python/trireme/root.py": python_class_with(40)})
        for methods, error in ((39, f"{name}: 39, and 40 is kept; run tools/count_concepts --update, which keeps it"),
                               (30, f"{name}: 39 is kept, and nothing of that name is counted; run tools/count_concepts --update, which removes it")):
            (tree.root / "python/trireme/root.py").write_text(python_class_with(methods))
            self.assertEqual(self.assert_errors(tree, [error]), [error])
            self.assert_errors(tree, [], "--update")
        self.assertNotIn(name, (tree.root / KEPT).read_text())

    def test_a_file_of_figures_without_a_figure_or_with_another_form_is_refused(self):
        tree = self.kept({})
        kept = (tree.root / KEPT).read_text()
        line = "axis disk, files outside of its rooms: 0\n"
        number = kept[:kept.index(line)].count("\n") + 1
        for text, error in ((kept.replace(line, ""), "axis disk, files outside of its rooms: 0, and no figure is kept; run tools/count_concepts --update"),
                            (kept + line, f"{KEPT}:{len(kept.splitlines()) + 1}: 'axis disk, files outside of its rooms' stands twice"),
                            (kept.replace(line, f"<<<<<<< main\n{line}"), f"{KEPT}:{number}: '<<<<<<< main'; a line is"),
                            (kept.replace(line, f"{line[:-1]}  because\n"), f"{KEPT}:{number}: '{line[:-1]}  because'; a line is")):
            with self.subTest(error):
                (tree.root / KEPT).write_text(text)
                self.assertIn(error, tree.run("count_concepts", "--check")[1])
        (tree.root / KEPT).unlink()
        self.assert_errors(tree, [f"{KEPT} is not there; run tools/count_concepts --update"])

    def test_a_walk_that_does_not_begin_is_refused(self):
        tree = self.kept({})
        path = tree.root / "src/engine/beginnings.cpp"
        path.write_text(path.read_text().replace("void cut() {}", "void cut_all() {}"))
        self.assertIn("error: walk sequence: there is no SequenceParallel::cut; name in WALKS of tools/count_concepts where it begins\n",
                      tree.run("count_concepts", "--check")[1])


if __name__ == "__main__":
    unittest.main()
