"""tools/check_layers refuses small bad trees, and names the file and the line."""
import unittest

from tree import Tree


class CheckLayers(unittest.TestCase):
    def check(self, files):
        return Tree(self, files).run("check_layers")

    def test_a_lower_level_may_be_included(self):
        status, out = self.check({"src/engine/engine.cpp": '#include "trireme/pager/pager.h"\n',
                                  "include/trireme/pager/pager.h": "#include <trireme/base/error.h>\n"})
        self.assertEqual((status, out), (0, "check_layers: ok, 2 files\n"))

    def test_folder_that_nothing_builds(self):
        files = {"src/CMakeLists.txt": "trireme_module(base)\n", "src/base/a.cpp": "", "src/comm/deep/b.cpp": ""}
        status, out = self.check(files)
        self.assertEqual(status, 1)
        self.assertIn("src/comm: no trireme_module(comm) in src/CMakeLists.txt", out)

    def test_a_higher_level_is_refused(self):
        status, out = self.check({"src/base/log.cpp": '\n#include "trireme/engine/engine.h"\n'})
        self.assertEqual(status, 1)
        self.assertIn("src/base/log.cpp:2: base (level 0) includes trireme/engine/engine.h (level 8)", out)

    def test_a_sibling_is_refused(self):
        status, out = self.check({"include/trireme/data.h": "#include <trireme/models/llama.h>\n"})
        self.assertEqual(status, 1)
        self.assertIn("include/trireme/data.h:1: data (level 4) includes trireme/models/llama.h (level 4)", out)

    def test_another_folders_internal_header_is_refused(self):
        status, out = self.check({"src/base/table.h": "", "src/comm/group.cpp": '#include "base/table.h"\n'})
        self.assertEqual(status, 1)
        self.assertIn("src/comm/group.cpp:1: comm includes base/table.h, which is internal to base", out)

    def test_a_module_below_config_that_names_config_is_refused_but_its_comments_may(self):
        status, out = self.check({"src/optim/adam.cpp": "// Config fills these options.\nvoid make(const Config& config);\n",
                                  "src/engine/engine.cpp": "void make(const Config& config);\n"})
        self.assertEqual(status, 1)
        self.assertIn("src/optim/adam.cpp:2: optim names Config", out)
        self.assertIn("1 error\n", out)

    def test_a_target_linked_upwards_is_refused(self):
        status, out = self.check({"src/CMakeLists.txt": "trireme_module(base)\ntrireme_module(comm DEPENDS base pager HEAVY)\n"})
        self.assertEqual(status, 1)
        self.assertIn("src/CMakeLists.txt:2: comm is linked to pager", out)

    def test_a_folder_without_a_level_is_refused(self):
        status, out = self.check({"src/misc/misc.cpp": ""})
        self.assertEqual(status, 1)
        self.assertIn("`misc` is on no level", out)


if __name__ == "__main__":
    unittest.main()
