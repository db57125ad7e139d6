"""cmake/TriremeConfig.cmake.in: an installation that cannot be used is not found, with the reason."""
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CMAKE = shutil.which("cmake") or ROOT / ".venv/bin/cmake"

# Configures the package as TriremeInstall.cmake does, and looks for it.
SCRIPT = """
include(CMakePackageConfigHelpers)
set(CMAKE_INSTALL_LIBDIR lib)
set(CMAKE_INSTALL_PREFIX "${PREFIX}")
set(PROJECT_VERSION 0.1.0)
set(TRIREME_TORCH_VERSION 2.11.0)
set(CMAKE_CXX_COMPILER_ID GNU)
set(CMAKE_CXX_COMPILER_VERSION 12.2.0)
set(TRIREME_COMPILER_MAJOR 12)
configure_package_config_file("${ROOT}/cmake/TriremeConfig.cmake.in" "${PREFIX}/lib/cmake/Trireme/TriremeConfig.cmake"
                              INSTALL_DESTINATION lib/cmake/Trireme NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
set(CMAKE_CXX_COMPILER_VERSION "${COMPILER}")
find_package(Trireme QUIET PATHS "${PREFIX}" NO_DEFAULT_PATH)
message(STATUS "found ${Trireme_FOUND}: ${Trireme_NOT_FOUND_MESSAGE}")
"""


@unittest.skipUnless(os.path.exists(CMAKE), "needs cmake")
class FindPackage(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="trireme-package-")
        self.addCleanup(folder.cleanup)
        self.prefix = pathlib.Path(folder.name)
        self.package = self.prefix / "lib/cmake/Trireme"
        self.package.mkdir(parents=True)
        (self.prefix / "find.cmake").write_text(SCRIPT)

    def look(self, compiler="12.2.0"):
        done = subprocess.run([CMAKE, f"-DPREFIX={self.prefix}", f"-DROOT={ROOT}", f"-DCOMPILER={compiler}", "-P", self.prefix / "find.cmake"],
                              text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def complete(self):
        for name in ("TriremeTargets.cmake", "TriremeTorch.cmake"):
            (self.package / name).write_text("")

    def test_a_build_tree_is_not_found(self):
        said = self.look()
        self.assertIn("found 0", said)
        self.assertIn("TriremeTargets.cmake is not there", said)
        self.assertIn("make install", said)

    def test_an_installation_without_its_library_is_not_found(self):
        self.complete()
        said = self.look()
        self.assertIn("found 0", said)
        self.assertIn("lib/libtrireme.so is not there", said)

    def test_an_older_compiler_does_not_find_it(self):
        self.complete()
        (self.prefix / "lib/libtrireme.so").write_text("")
        said = self.look(compiler="11.4.0")
        self.assertIn("found 0", said)
        self.assertIn("built by GCC 12.2.0", said)
        self.assertIn("GCC 11.4.0", said)


if __name__ == "__main__":
    unittest.main()
