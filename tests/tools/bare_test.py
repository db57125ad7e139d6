"""tools/bare hides what a user's machine may lack, and tools/check_build_inputs finds what a build has read of it."""
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def run(*command, environment=None):
    done = subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, **(environment or {})})
    return done.returncode, done.stdout


def can_hide():
    return subprocess.run(["unshare", "--mount", "true"], stderr=subprocess.DEVNULL).returncode == 0


class Bare(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="trireme-bare-")
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve() / "checkout"
        (self.root / "tools").mkdir(parents=True)
        for tool in ("bare", "check_build_inputs"):
            shutil.copy(ROOT / "tools" / tool, self.root / "tools")

    def test_the_environment_loses_what_steers_compilers_and_keeps_what_names_this_build(self):
        status, out = run(self.root / "tools/bare", "env", environment={
            "CPATH": "/x", "LIBRARY_PATH": "/x", "CUDA_HOME": "/x", "LD_LIBRARY_PATH": "/x", "CCACHE_SLOPPINESS": "system_headers",
            "CXXFLAGS": "-w", "PYTHONPATH": "/x", "PRESET": "ci", "https_proxy": "http://a b"})
        self.assertEqual(status, 0, out)
        seen = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
        for name in ("CPATH", "LIBRARY_PATH", "CUDA_HOME", "LD_LIBRARY_PATH", "CCACHE_SLOPPINESS", "CXXFLAGS", "PYTHONPATH"):
            self.assertNotIn(name, seen)
        self.assertEqual(seen["PRESET"], "ci")
        self.assertEqual(seen["https_proxy"], "http://a b")
        self.assertEqual(seen["PATH"], "/usr/sbin:/usr/bin:/sbin:/bin")
        self.assertEqual(seen["CCACHE_DIR"], str(self.root / "build/ccache"))
        self.assertIn(seen["BARE"], ("hidden", "environment"))

    def test_the_exit_status_and_the_arguments_are_those_of_the_command(self):
        status, out = run(self.root / "tools/bare", "sh", "-c", 'echo "<$1>"; exit 7', "-", "two words")
        self.assertEqual((status, out.splitlines()[-1]), (7, "<two words>"))

    def test_a_home_that_is_not_set_hides_no_less(self):
        environment = {name: value for name, value in os.environ.items() if name != "HOME"}
        done = subprocess.run([self.root / "tools/bare", "sh", "-c", "echo $BARE; [ $BARE = environment ] || ls -A /usr/local"], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(done.stdout.split(), (["hidden"], ["environment"]))

    @unittest.skipUnless(can_hide(), "no mount namespace may be made here")
    def test_folders_of_toolkits_are_empty_for_the_command_and_untouched_outside(self):
        toolkit = self.root.parent / "toolkit"
        (toolkit / "include").mkdir(parents=True)
        status, out = run(self.root / "tools/bare", "sh", "-c", f"echo $BARE; ls -A {toolkit} /usr/local | grep -v :",
                          environment={"CUDA_HOME": str(toolkit), "TMPDIR": "/var/tmp"})
        self.assertEqual(out.split(), ["hidden"])
        self.assertTrue((toolkit / "include").is_dir())

    # A build of one file by the real ninja and the real compiler.
    def build(self, *include_folders, linked=""):
        (self.root / ".venv/bin").mkdir(parents=True)
        if (ROOT / ".venv/bin/ninja").exists():
            (self.root / ".venv/bin/ninja").symlink_to(ROOT / ".venv/bin/ninja")
        build = self.root / "build/release"
        build.mkdir(parents=True)
        (self.root / "a.cpp").write_text("#include <cstdio>\n#include <own.h>\n")
        flags = " ".join(f"-I{folder}" for folder in include_folders)
        (build / "build.ninja").write_text(
            f"rule cc\n  command = c++ {flags} -MD -MF $out.d -c $in -o $out\n  deps = gcc\n  depfile = $out.d\n"
            f"build a.o: cc ../../a.cpp | {linked}\n")
        ninja = shutil.which("ninja", path=f"{self.root}/.venv/bin:{os.environ['PATH']}")
        self.assertEqual(run(ninja, "-C", build)[0], 0)
        return run(self.root / "tools/check_build_inputs", build)

    def test_a_build_of_the_checkout_and_of_debians_headers_passes(self):
        (self.root / "include").mkdir()
        (self.root / "include/own.h").write_text("")
        self.assertEqual(self.build(self.root / "include"), (0, ""))

    def test_a_header_from_elsewhere_is_named_with_the_object_that_includes_it(self):
        elsewhere = self.root.parent / "toolkit/include"
        elsewhere.mkdir(parents=True)
        (elsewhere / "own.h").write_text("")
        status, out = self.build(elsewhere)
        self.assertEqual(status, 1)
        self.assertIn(f"{elsewhere}/own.h: read for a.o, and neither Debian's", out)
        self.assertEqual(len(out.splitlines()), 1)

    def test_a_link_out_of_the_checkout_does_not_hide_where_a_header_is(self):
        elsewhere = self.root.parent / "toolkit"
        elsewhere.mkdir()
        (elsewhere / "own.h").write_text("")
        (self.root / "include").symlink_to(elsewhere)
        self.assertEqual(self.build(self.root / "include")[0], 1)

    def test_a_library_from_elsewhere_is_named(self):
        (self.root / "own.h").write_text("")
        library = self.root.parent / "libx.so"
        library.write_text("")
        status, out = self.build(self.root, linked=str(library))
        self.assertEqual(status, 1)
        self.assertIn(str(library), out)

    def test_a_folder_without_a_build_is_refused(self):
        status, out = run(self.root / "tools/check_build_inputs", self.root)
        self.assertNotEqual(status, 0)
        self.assertIn("check_build_inputs: ", out)


if __name__ == "__main__":
    unittest.main()
