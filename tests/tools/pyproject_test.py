"""pyproject.toml says what CMake and scripts/ say."""
import pathlib
import re
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "cmake"))
import torch_of_wheel  # pylint: disable=wrong-import-position

PYPROJECT = (ROOT / "pyproject.toml").read_text()


def array(key):
    """The strings of a one-line array of pyproject.toml (Python 3.10 has no tomllib)."""
    return re.findall(r'"([^"]*)"', re.search(rf"^{key} = \[(.*?)\]", PYPROJECT, re.MULTILINE).group(1))


def pins(path):
    """{package: version} of a requirements file."""
    return dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / path).read_text(), re.MULTILINE))


class Pyproject(unittest.TestCase):
    def test_the_torch_that_is_installed_is_built_against_and_run_with(self):
        for installed, required in (([], "2.11.0"), (["2.15.0"], "2.15.0"), (["2.15.1+cpu"], "2.15.1"), (["2.99.0"], "2.99.0"),
                                    (["2.9.1"], "2.11.0"), (["2.11.2"], "2.11.2")):
            with self.subTest(installed=installed), tempfile.TemporaryDirectory(prefix="trireme-pyproject-") as folder:
                for version in installed:
                    information = pathlib.Path(folder, f"torch-{version}.dist-info")
                    information.mkdir()
                    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
                self.assertEqual(torch_of_wheel.torch_requirement([folder]), f"torch=={required}")
        self.assertEqual(torch_of_wheel.dynamic_metadata("dependencies", {}), [*torch_of_wheel.get_requires_for_dynamic_metadata({}), "numpy"])

    def test_torch_is_named_by_the_provider_alone(self):
        self.assertRegex(PYPROJECT, r'(?m)^dynamic = \[.*"dependencies".*\]$')
        provider = re.search(r'^\[tool\.scikit-build\.metadata\.dependencies\]\nprovider = "(.*)"\nprovider-path = "(.*)"$', PYPROJECT, re.MULTILINE)
        self.assertEqual(ROOT.joinpath(*reversed(provider.groups())).with_suffix(".py"), pathlib.Path(torch_of_wheel.__file__))
        self.assertFalse([one for one in array("requires") if one.startswith("torch")])

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
