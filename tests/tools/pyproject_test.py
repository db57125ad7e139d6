"""pyproject.toml says what CMake and scripts/ say."""
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def array(key):
    """The strings of a one-line array of pyproject.toml (Python 3.10 has no tomllib)."""
    return re.findall(r'"([^"]*)"', re.search(rf"^{key} = \[(.*?)\]", PYPROJECT, re.MULTILINE).group(1))


def pins(path):
    """{package: version} of a requirements file."""
    return dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / path).read_text(), re.MULTILINE))


class Pyproject(unittest.TestCase):
    def test_one_torch_is_built_against_run_with_and_set_up(self):
        torch = "torch==" + pins("scripts/requirements-torch.txt")["torch"]
        self.assertEqual([one for one in array("requires") if one.startswith("torch")], [torch])
        self.assertEqual(array("dependencies"), [torch])

    def test_the_tools_are_those_of_setup_and_all_are_exact(self):
        required = dict(one.split("==") for one in array("requires"))
        for tool in ("cmake", "ninja"):
            self.assertEqual(required[tool], pins("scripts/requirements.txt")[tool])

    def test_the_version_is_that_of_cmake_and_of_the_library(self):
        pattern = re.search(r"^regex = '(.*)'$", PYPROJECT, re.MULTILINE).group(1)
        version = re.search(pattern, (ROOT / "CMakeLists.txt").read_text()).group("value")
        header = (ROOT / "include/trireme/base/version.h").read_text()
        self.assertEqual(version, re.search(r'kVersion\[\] = "([^"]*)"', header).group(1))
        self.assertIsNone(re.search(r"^version\s*=", PYPROJECT, re.MULTILINE))

    def test_the_oldest_python_is_the_one_that_setup_takes(self):
        asked = tuple(map(int, re.search(r'^requires-python = ">=(\d+)\.(\d+)"', PYPROJECT, re.MULTILINE).groups()))
        taken = re.search(r"sys\.version_info < \((\d+), (\d+)\)", (ROOT / "scripts/setup").read_text())
        self.assertEqual(asked, tuple(map(int, taken.groups())))


if __name__ == "__main__":
    unittest.main()
