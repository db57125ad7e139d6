"""tools/count_concepts counts the types on the path of a step, and the methods, members and files of each class."""
import unittest

from tree import Tree


class CountConcepts(unittest.TestCase):
    def report(self, files):
        """{title: its rows}, and the last line."""
        status, out = Tree(self, files).run("count_concepts")
        self.assertEqual(status, 0, out)
        lists, *lines = {}, *out.splitlines()
        for line in lines[:-1]:
            if line.startswith(" "):
                lists[title].append(line.split())
            else:
                title = line.removesuffix(":")
                lists[title] = []
        return lists, lines[-1]

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
                               "6 lines of the product without checkpoint, data, models, cli, observe")

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


if __name__ == "__main__":
    unittest.main()
