"""tools/count_concepts counts types on the path of a step, walks, parts of classes, and what crosses rooms."""
import functools
import itertools
import subprocess
import sys
import unittest

from tree import BEGINNINGS, ROOT, Tree


@functools.cache
def report_of_this_tree():
    """The lines that are printed."""
    return subprocess.run([sys.executable, "-B", ROOT / "tools/count_concepts"], text=True, check=True, stdout=subprocess.PIPE).stdout


class CountConcepts(unittest.TestCase):
    def report(self, files):
        """{title, without what stands behind a colon: its rows}, and the last line."""
        status, out = Tree(self, files).run("count_concepts")
        self.assertEqual(status, 0, out)
        lists, *lines = {}, *out.splitlines()
        for line in lines[:-1]:
            if line.startswith(" "):
                lists[title].append(line.split())
            else:
                title = line.partition(":")[0]
                lists[title] = []
        return lists, lines[-1]

    def walked(self, files, walk="step", *flags):
        """({function: calls that lead there}, types) of a walk."""
        status, out = Tree(self, files).run("count_concepts", "--walk", walk, *flags)
        self.assertEqual(status, 0, out)
        *functions, types = out.splitlines()
        return ({name: int(depth) for depth, name, _ in map(str.split, functions)}, types.removeprefix("types: ").split(", "))

    def types(self, text):
        """How many named types a file of the pager with `text` has."""
        path = self.report({"src/pager/a.cpp": text})[0]["the path of a step (.cpp files, their lines, named types with the headers')"]
        return next(int(types) for _, _, types, folder in path if folder == "pager")

    def test_types_are_counted_where_they_are_defined(self):
        for text, count in {
                "class A;\nstruct B;\nenum class C : int;\nusing D = int;\nfriend class E;\n": 0,
                "class A {};\nstruct B final : A {\n  int n = 0;\n};\nunion C {\n};\n": 3,
                "enum class A : uint8_t { kOne };\nenum B { kTwo };\n": 2,
                "class A {\n  struct B {\n    enum class C { kOne };\n  };\n};\n": 3,
                "namespace {\nvoid f() {\n  struct A {\n  };\n}\n}\n": 1,
                "template <class T>\nstruct A : B<T> {\n};\n": 1,
                "template <class T>\nvoid f(T a) {\n}\n": 0,
                "struct A make(struct B* b) {\n}\n": 0,
                "struct {\n} a;\n": 0,
                "// struct A {\nconst char* a = \"struct B {\";\n": 0}.items():
            with self.subTest(text):
                self.assertEqual(self.types(text), count)

    def test_the_path_of_a_step_is_its_folders_with_their_headers(self):
        lists, last = self.report({"src/engine/a.cpp": "struct A {\n};\n", "include/trireme/optim/b.h": "struct B {\n};\n",
                                   "src/checkpoint/c.cpp": "struct C {\n};\n", "include/trireme/d.h": "struct D {\n};\n"})
        path = lists["the path of a step (.cpp files, their lines, named types with the headers')"]
        self.assertIn(["1", "2", "1", "engine"], path)
        self.assertIn(["0", "0", "1", "optim"], path)
        self.assertEqual(path[-1], ["1", "2", "2", "in", "all"])
        self.assertEqual(last, "count_concepts: 2 named types on the path of a step; "
                               "6 lines of the product without formats, checkpoint, data, models, cli, observe")

    def test_public_methods_are_those_of_public_parts_and_not_the_deleted(self):
        others = ("  A& operator=(const A&) = delete;\n  struct B {\n    void own();\n  };\n  using C = void();\n  friend void f();\n"
                  "  std::function<void()> check = [](int) { return 1; };\n  int a{1}, b = f(2);\n private:\n  void hidden();\n")
        body = "".join(f"  template <class T>\n  T get{n}(std::vector<T> a = {{}}) const {{ return a; }}\n" for n in range(15))
        body += "".join(f"  void set{n}(int a);\n" for n in range(14))
        for made, rows in {"  A();\n": [], "  A();\n  bool operator<(const A&) const;\n": [["31", "A"]]}.items():
            with self.subTest(made):
                lists, _ = self.report({"src/pager/a.h": "namespace trireme {\nclass A {\n  void first();\n public:\n" + made + body + others + "};\n}\n"})
                self.assertEqual(lists["public methods of a class, over 30"], rows)

    def test_members_are_the_data_of_an_object(self):
        body = "".join(f"  std::map<int, std::function<int(int)>> a{n} = {{}};\n" for n in range(11))
        body += "  static constexpr int kSize = 2;\n  int size() const;\n  struct B {\n    int c = 0;\n  };\n"
        for more, rows in {"  int d{2};\n": [], "  int d{2}, e = 3;\n": [["13", "A"]]}.items():
            with self.subTest(more):
                self.assertEqual(self.report({"src/pager/a.h": "struct A {\n" + body + more + "};\n"})[0]["members of a class, over 12"], rows)

    def test_virtual_methods_are_those_declared_or_overridden(self):
        body = "".join(f"  virtual void a{n}() = 0;\n  void b{n}() const override {{\n  }}\n" for n in range(6))
        body += "  virtual ~A() = default;\n  void virtual_size();\n"
        for more, rows in {"": [], "  virtual int c() { return 1; }\n": [["13", "A"]]}.items():
            with self.subTest(more):
                self.assertEqual(self.report({"src/pager/a.h": "struct A {\n" + body + more + "};\n"})[0]["virtual methods of a class, over 12"], rows)

    def test_a_class_in_many_files_is_found_by_its_functions(self):
        define = "namespace trireme {\nstd::vector<A::B> A::f(int n) const {\n}\n}\n"
        tree = {"include/trireme/a.h": "namespace trireme {\nclass A {\n  struct B {\n  };\n};\n}\n",
                "src/pager/1.cpp": define + "void trireme::A::B::g() {\n}\n",
                "src/pager/2.cpp": "namespace trireme {\nA::A(int n) : n_{n} {\n}\n}\n",
                "src/pager/3.cpp": "namespace other {\nvoid A::f() {\n}\n}\nnamespace trireme {\nvoid f() {\n  A::g();\n}\n}\n"}
        for more, rows in {"": [], "namespace trireme {\nbool A::operator==(const A& a) {\n}\n}\n": [["3", "A"]]}.items():
            with self.subTest(more):
                lists, _ = self.report(tree | {"src/pager/4.cpp": more})
                self.assertEqual(lists[".cpp files of a class, over 2"], rows)

    def test_a_walk_follows_members_variables_results_and_overrides(self):
        functions, types = self.walked({
            "include/trireme/engine.h": """#include "trireme/step.h"
namespace trireme {
class Engine {
 public:
  int step();
  void unrelated();

 private:
  std::unique_ptr<TrainStep> step_;
};
}
""", "include/trireme/step.h": """#include "trireme/store.h"
namespace trireme {
struct Report {
  int norm = 0;
};
struct Unused {
};
class TrainStep {
 public:
  Report close(Store& given);
  Store& store();
};
int helper(const Report& report);
}
""", "include/trireme/store.h": """namespace trireme {
class Store {
 public:
  virtual void publish() = 0;
  virtual void wait();
};
}
""", "src/engine/engine.cpp": """#include "trireme/engine.h"
namespace trireme {
namespace {
int local(int n) { return n; }
}
int Engine::step() {
  auto& store = step_->store();
  store.publish();
  const auto report = step_->close(store);
  return helper(report) + local(report.norm);
}
void Engine::unrelated() { step_->store().wait(); }
}
""", "src/step/step.cpp": """#include "trireme/step.h"
namespace trireme {
Report TrainStep::close(Store& given) { return {}; }
Store& TrainStep::store() { return *store_; }
int helper(const Report& report) { return report.norm; }
}
""", "src/pager/stores.cpp": """#include "trireme/store.h"
namespace trireme {
namespace {
void write() {}
class Shared final : public Store {
 public:
  void publish() override { write(); }
};
}
void Store::wait() {}
}
""", "src/plan/other.cpp": "namespace trireme {\nint helper(int n) { return n; }\nint local(int n) { return n; }\n}\n"})
        self.assertEqual(functions, {"Engine::step": 0, "TrainStep::store": 1, "(src/pager/stores.cpp)::Shared::publish": 1, "TrainStep::close": 1,
                                     "helper": 1, "local": 1, "write": 2})
        self.assertEqual(types, ["(src/pager/stores.cpp)::Shared", "Engine", "Report", "Store", "TrainStep"])

    def test_a_walk_meets_constructors_and_destructors_and_does_not_enter_the_lowest_rooms(self):
        functions, types = self.walked({
            "include/trireme/comm/group.h": "namespace trireme {\nclass Group {\n public:\n  void meet() { inside(); }\n  void inside() {}\n};\n}\n",
            "src/engine/engine.cpp": """#include "trireme/comm/group.h"
namespace trireme {
struct Scope {
  Scope(int n) { begin(n); }
  ~Scope() { end(); }
  void begin(int n) {}
  void end() {}
};
struct Made {
  Made() {}
};
struct Lent {
  Lent() {}
};
class Engine {
 public:
  int step(Group& group, const Lent& lent) {
    const Scope scope(1);
    std::make_unique<Made>();
    group.meet();
  }
};
}
"""})
        self.assertEqual(functions, {"Engine::step": 0, "Scope::Scope": 1, "Scope::~Scope": 1, "Made::Made": 1, "Group::meet": 1, "Scope::begin": 2,
                                     "Scope::end": 2})
        self.assertEqual(types, ["Engine", "Group", "Lent", "Made", "Scope"])

    def test_a_second_walk_goes_through_the_lowest_rooms(self):
        files = {"include/trireme/comm/group.h": "namespace trireme {\nclass Group {\n public:\n  void meet() { inside(); }\n  void inside() {}\n};\n}\n",
                 "src/engine/engine.cpp": '#include "trireme/comm/group.h"\nnamespace trireme {\nclass Engine {\n  int step(Group& group) {\n    group.meet();\n'
                                          "  }\n};\n}\n"}
        self.assertEqual(self.walked(files, "step", "--lowest")[0], {"Engine::step": 0, "Group::meet": 1, "Group::inside": 2})
        walks = self.report(files)[0]["walks (functions, files, types, calls deep; the same through the lowest rooms)"]
        self.assertIn(["2", "2", "2", "1", "3", "2", "2", "2", "step"], [walk[:9] for walk in walks])

    def test_every_walk_has_a_beginning_in_this_tree(self):
        out = report_of_this_tree()
        self.assertNotIn("there is no", out)
        walks = out.partition("walks (")[2].partition("classes that")[0].splitlines()[1:]
        self.assertEqual(len(walks), 7)
        for walk in walks:
            self.assertGreater(int(walk.split()[2]), 10, walk)  # types
            self.assertGreater(int(walk.split()[4]), int(walk.split()[0]), walk)  # functions, with the lowest rooms'

    def test_no_rooms_of_this_tree_include_each_other_and_every_link_is_used(self):
        self.assertIn("\ncycles of rooms: 0\nunused edges of src/CMakeLists.txt: 0\n", report_of_this_tree())

    def test_befriended_classes_are_counted(self):
        lists, _ = self.report({"src/engine/a.h": "namespace trireme {\nclass Engine {\n public:\n  int a();\n\n private:\n"
                                                  "  friend class B;\n  friend struct C;\n  friend void f();\n  int b_, c_;\n};\n}\n"})
        self.assertEqual(lists["classes that users hold (public methods, members, befriended classes)"], [["1", "2", "2", "Engine"]])

    def test_an_axis_is_named_by_code_and_keys_outside_of_its_rooms_not_by_comments_and_texts(self):
        lists, _ = self.report({"src/engine/a.cpp": "// sequence\nint sequence_size = at(\"sequence\");\nsay(\"a sequence of tokens\");\n",
                                "src/data/b.cpp": "/* sequence */ std::make_index_sequence<2> a;\n", "src/sequence/c.cpp": "int sequence;\n",
                                "src/python/pipeline_engine.cpp": "int pipeline;\n", "src/cli/d.cpp": "Grid grid({\"pipe\"});\n"})
        self.assertEqual(lists["axes outside of their rooms (files, places)"], [["1", "2", "sequence"], ["1", "1", "pipeline"], ["0", "0", "tensor"],
                                                                       ["0", "0", "disk"]])

    def test_the_disk_is_named_outside_of_the_files_that_are_its_own(self):
        own = ("include/trireme/device/disk.h", "src/device/extents.cpp", "src/optim/disk_states.h", "src/pager/weights/disk_shards.cpp", "src/parallel/plan.cpp")
        lists, _ = self.report({name: "int disk;\n" for name in own} | {
            "src/optim/slices.cpp": '#include "optim/disk_states.h"\nDiskStates* states;\nint is_on_disk;\n', "src/config/a.cpp": 'at("offload_param.nvme_path");\n',
            "src/device/pinned.cpp": '// The disk\nsay("no room on the disk");\nint displayed;\n', "src/pager/extents.cpp": "kNvme;\n"})
        self.assertIn(["3", "5", "disk"], lists["axes outside of their rooms (files, places)"])

    def test_rooms_that_include_each_other_fail_a_check(self):
        chain = {"src/pager/a.h": '#include "pager/weights/b.h"\n', "src/pager/weights/b.h": "#include <trireme/pager/init/c.h>\n",
                 "include/trireme/pager/init/c.h": ""}
        for last, rows, expected in (("", [], 0), ('#include "trireme/pager/d.h"\n', [["pager", "pager/init", "pager/weights"]], 1)):
            with self.subTest(last):
                files = {**chain, "include/trireme/pager/init/c.h": last, "include/trireme/pager/d.h": ""}
                self.assertEqual(self.report(files)[0]["cycles of rooms"], rows)
                status, out = Tree(self, BEGINNINGS | files).run("count_concepts", "--update")
                self.assertEqual(status, expected)
                self.assertEqual(out.count("  src/pager/a.h includes src/pager/weights/b.h\n"), expected)

    def test_links_to_modules_of_which_nothing_is_included_fail_a_check(self):
        for link, rows, expected in (("base", [], 0), ("base topology", [["comm", "->", "topology"]], 1)):
            with self.subTest(link):
                files = {"src/CMakeLists.txt": f"trireme_module(base)\ntrireme_module(comm DEPENDS {link}\n  LIBRARIES xxhash)\n",
                         "src/comm/a.cpp": "#include <trireme/base/error.h>\n", "include/trireme/base/error.h": "", "include/trireme/topology.h": ""}
                self.assertEqual(self.report(files)[0]["unused edges of src/CMakeLists.txt"], rows)
                status, out = Tree(self, BEGINNINGS | files).run("count_concepts", "--update")
                self.assertEqual(status, expected)
                self.assertEqual(out.count("error: src/CMakeLists.txt: comm is linked to topology"), expected)

    def test_long_lines_of_prose_are_counted_and_code_and_tables_are_not(self):
        long = "a " * 61
        lists, _ = self.report({"docs/a.md": f"{long}\n| {long} |\n```\n{long}\n```\n{long}\n", "src/base/a.cpp": f"// {long}\nint a; {long}\n",
                                "python/trireme/a.py": f'"""{long}"""\nB = "{long}"\n# {long}\ndef c():\n    """\n    {long}\n    """\n'})
        self.assertEqual(lists["prose over 120 columns (lines)"], [["2", "Markdown"], ["1", "comments", "of", "C++"],
                                                                   ["3", "comments", "and", "docstrings", "of", "Python"]])
        self.assertEqual(lists["lines of the product"], [["2", "C++"], ["7", "Python"]])

    def test_lines_of_tests_are_counted_beside_those_of_the_product(self):
        lists, _ = self.report({"src/a.cpp": "int a;\n", "tests/b.cpp": "int b;\nint c;\n", "tests/c.h": "int d;\n", "tests/python/e_test.py": "e = 1\n" * 5,
                                "tests/f.json": "{}\n"})
        self.assertEqual(lists["lines of the product"], [["1", "C++"], ["0", "Python"]])
        self.assertEqual(lists["lines of tests"], [["3", "C++"], ["5", "Python"]])

    def test_the_largest_functions_are_those_of_most_lines(self):
        lists, _ = self.report({"src/pager/a.cpp": "int A::f() {\n  if (b) {\n    c();\n  }\n}\nint g() { return 1; }\n",
                                "python/trireme/a.py": "@d\ndef f():\n    def g():\n        return 1\n    return g\n"})
        self.assertEqual(lists["lines of a function of C++"], [["5", "f", "src/pager/a.cpp"], ["1", "g", "src/pager/a.cpp"]])
        self.assertEqual(lists["lines of a function of Python"], [["4", "python/trireme/a.py:2:", "f"], ["2", "python/trireme/a.py:3:", "g"]])

    def test_comments_that_begin_without_a_noun_are_counted_once(self):
        lists, _ = self.report({"src/base/a.cpp": "/// What a rank has.\n/// Who waits\nint a;  ///< of a\n// The rest.\n// What follows.\n\n  // Of one.\n",
                                "python/trireme/a.py": '"""What a rank has.\n\nOf it."""\nB = "What"\n# Whose it is\n# Of two\n\n# The end\n'})
        self.assertEqual(lists["comments that begin without a noun"], [["2", "C++"], ["2", "Python"]])


class MethodsOfPython(unittest.TestCase):
    """Each class has 29 methods of its own, so that two more are listed."""
    OWN = "".join(f"    def own_{n}(self): pass\n" for n in range(27)) + "    def __init__(self): pass\n    def _private(self): pass\n"

    def listed(self, files):
        """{class: its methods}, of classes over 30."""
        status, out = Tree(self, {f"python/trireme/{name}": text for name, text in files.items()}).run("count_concepts")
        self.assertEqual(status, 0, out)
        rows = itertools.takewhile(lambda line: line.startswith(" "), out.partition("methods of a class of Python, over 30:\n")[2].splitlines())
        return {name: int(count) for count, name in map(str.split, rows)}

    def assert_listed(self, cases, files=()):
        """Looks at modules m0, m1, ... with a class A each. `cases`: [(text, the number of methods or None below
        31)]"""
        self.assertEqual(self.listed({**dict(files), **{f"m{n}.py": text for n, (text, _) in enumerate(cases)}}),
                         {f"trireme.m{n}.A": count for n, (_, count) in enumerate(cases) if count})

    def test_methods_are_functions_properties_lambdas_and_other_names_of_methods_each_once(self):
        self.assert_listed([(f"class A:\n{self.OWN}{body}", count) for body, count in (
            ("    a = 1\n    b = c()\n    d: int = 2\n    class E:\n        def f(self): pass\n    def own_0(self): pass\n", None),
            ("    async def a(self): pass\n    b = a\n", 31),
            ("    a = property(lambda self: 1)\n    b = lambda self: 2\n    c = functools.partialmethod(own_0)\n", 32),
            ("    if X:\n        def a(self): pass\n    else:\n        def a(self): pass\n        def b(self): pass\n", 31))])

    def test_methods_that_a_module_sets_count(self):
        self.assert_listed([(f"class A:\n{self.OWN}{code}", count) for code, count in (
            ("A.__doc__ = 'of A'\nother.b = f\nsetattr(other, 'c', f)\n", None),
            ("A.b = f\nsetattr(A, 'c', f)\n", 31),
            ("for _name, _key in {'b': 1, 'c': 2, 'own_1': 3}.items():\n    setattr(A, _name, f(_key))\n", 31),
            ("_NAMES = {f'get_{key}': key for key in ('b', 'c')}\n_NAMES |= dict.fromkeys(('d',))\nfor _name in _NAMES:\n    setattr(A, _name, f)\n", 32),
            ("if X:\n    for _name in ('b', 'c'):\n        for _end in 'xy':\n            setattr(A, f'{_name}_{_end}', f)\n", 33))])

    def test_methods_of_the_packages_mixins_count_wherever_they_come_from(self):
        mixins = {"part/__init__.py": "from .mixins import First\n", "part/mixins.py": "from .. import base\nclass First(base.Base):\n    def a(self): pass\n",
                  "base.py": "class Base:\n    def a(self): pass\n    def b(self): pass\n"}
        self.assert_listed([(f"{importing}\nclass A({bases}):\n{self.OWN}", count) for importing, bases, count in (
            ("import torch", "torch.nn.Module", None), ("from .part import First", "First", 31), ("from . import part as parts", "parts.First", 31),
            ("import trireme.base", "trireme.base.Base", 31), ("from trireme.part.mixins import First as F", "F, dict", 31))], mixins)

    def test_a_loop_over_what_the_text_does_not_tell_fails_a_check(self):
        tree = Tree(self, BEGINNINGS | {"python/trireme/a.py": "class A:\n    pass\nfor _name in dir(torch):\n    setattr(A, _name, f)\n"})
        self.assertEqual(tree.run("count_concepts")[0], 0)
        status, out = tree.run("count_concepts", "--update")
        self.assertEqual(status, 1)
        self.assertIn("error: python/trireme/a.py:4: methods are set by names that the text does not tell; let the loop go over a constant", out)


if __name__ == "__main__":
    unittest.main()
