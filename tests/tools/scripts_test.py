"""scripts/ and the Makefile, with stand-ins for what they run."""
import os
import pathlib
import pty
import re
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ECHO = '#!/bin/sh\necho "$@"\n'


def run(*command, environment=None):
    done = subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, "TORCH": "", **(environment or {})})
    return done.returncode, done.stdout


def run_on_terminal(*command, environment):
    """The text that `command` prints when its output is a terminal."""
    main, side = pty.openpty()
    with subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=side, stderr=side,
                          env={**os.environ, "TORCH": "", **environment}) as process:
        os.close(side)
        out = b""
        try:
            while piece := os.read(main, 4096):
                out += piece
        except OSError:  # how Linux tells that the last writer is gone
            pass
        os.close(main)
    return process.returncode, out.decode().replace("\r\n", "\n")


class Scripts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="trireme-scripts-")
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        shutil.copytree(ROOT / "scripts", self.root / "scripts")

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def test_train_passes_flags_on_behind_its_own(self):
        self.write(".venv/bin/python", "#!/bin/sh\necho /the/library\n")
        self.write("build/debug/bin/trireme", ECHO)
        status, out = run(self.root / "scripts/train", "--steps", "9", "--prompt", "a b", environment={"PRESET": "debug"})
        self.assertEqual(status, 0, out)
        own, flags = out.splitlines()[1].split(" --steps 9 ")
        self.assertEqual(flags, "--prompt a b")
        for words in ("train --config examples/train/ds_config.json", "--data /the/library/*.py", "--ranks 2"):
            self.assertIn(words, own)

    # A compiler that finds every header, so that no package is missing, and a .venv that is not yet stamped as
    # complete.
    def stand_ins_of_setup(self):
        shutil.rmtree(self.root / ".venv", ignore_errors=True)
        self.write(".venv/bin/pip", f"#!{self.root}/.venv/bin/python\n")
        self.write(".venv/bin/python", '#!/bin/sh\n[ "$3" != install ] || echo "$@"\n')
        self.write("compiler", "#!/bin/sh\necho '#define __GNUC__ 12'\n")
        return {"CXX": str(self.root / "compiler"), "PYTHON": "", "TORCH_PYTHON": "", "WITH_MPI": "", "WITH_CHROMIUM": ""}

    def test_setup_shows_the_download_to_who_watches_it(self):
        status, out = run_on_terminal(self.root / "scripts/setup", environment=self.stand_ins_of_setup())
        self.assertEqual(status, 0, out)
        self.assertRegex(out, r"-m pip install (?!--quiet)")
        status, out = run(self.root / "scripts/setup", environment=self.stand_ins_of_setup())
        self.assertEqual(status, 0, out)
        self.assertIn("-m pip install --quiet ", out)

    def test_setup_installs_another_torch_beside_the_one_of_the_list(self):
        environment = self.stand_ins_of_setup()
        self.write(".venv/torch-2.15.0/bin/pip", f"#!{self.root}/.venv/torch-2.15.0/bin/python\n")
        shutil.copy(self.root / ".venv/bin/python", self.root / ".venv/torch-2.15.0/bin")
        def setup(**more):
            status, out = run(self.root / "scripts/setup", environment={**environment, **more})
            self.assertEqual(status, 0, out)
            return re.findall(r"^setup: installing .*?(torch==\S+) into (\S+)", out, re.MULTILINE)
        other = [("torch==2.15.0", ".venv/torch-2.15.0")]
        self.assertEqual(setup(TORCH="2.15.0"), other)
        self.assertEqual(setup(TORCH="2.15.0"), [])
        self.assertEqual(setup(), [("torch==2.11.0", ".venv")])
        self.assertEqual(setup(TORCH="2.15.0"), [])
        self.assertEqual(setup(), [])

    def test_a_torch_that_is_no_version_is_refused_by_name(self):
        for named, message in (({"TORCH": "newest"}, "TORCH=newest: expected the number of a version, as in: make TORCH=2.11.0"),
                               ({"TORCH": "2.15.0", "TORCH_PYTHON": "/a/python"}, "TORCH=2.15.0 and TORCH_PYTHON=/a/python: expected one of them")):
            status, out = run(self.root / "scripts/setup", environment={**self.stand_ins_of_setup(), **named})
            self.assertEqual(status, 1)
            self.assertIn(message, out)

    def test_a_build_against_another_torch_has_a_folder_of_its_own(self):
        self.write(".venv/bin/cmake", ECHO)
        status, out = run(self.root / "scripts/build", environment={"PRESET": "release", "JOBS": "2", "TORCH": "2.15.0"})
        self.assertEqual((status, out), (1, "build: error: torch 2.15.0 is not there yet: run `make setup TORCH=2.15.0`.\n"))
        self.write(".venv/torch-2.15.0/bin/python", ECHO)
        status, out = run(self.root / "scripts/build", environment={"PRESET": "release", "JOBS": "2", "TORCH": "2.15.0"})
        self.assertEqual(status, 0, out)
        self.assertIn("-B build/release-torch-2.15.0 ", out)
        self.assertIn(f"-DTRIREME_PYTHON={self.root}/.venv/torch-2.15.0/bin/python", out)
        self.assertIn("--build build/release-torch-2.15.0 ", out)

    def test_the_other_torches_are_tested_too(self):
        status, out = run("make", "-n", "-C", ROOT, "PRESET=release", "test-torch")
        self.assertEqual(status, 0, out)
        self.assertIn("for torch in 2.15.0; do", out)
        self.assertIn("ctest --test-dir build/release-torch-2.15.0 ", out)

    def test_setup_installs_the_headers_of_debians_python(self):
        environment = self.stand_ins_of_setup()
        self.write(".venv/bin/python", f"""#!/bin/sh
            case "$2" in *Python.h*) [ -e {self.root}/Python.h ] || echo python3.99-dev ;; esac""")
        self.write("bin/apt-get", f'#!/bin/sh\n[ "$1" != install ] || {{ echo "$@" >{self.root}/asked; touch {self.root}/Python.h; }}\n')
        self.write("bin/id", "#!/bin/sh\necho 0\n")
        environment["PATH"] = f"{self.root}/bin:{os.environ['PATH']}"
        status, out = run(self.root / "scripts/setup", environment=environment)
        self.assertEqual(status, 0, out)
        self.assertRegex((self.root / "asked").read_text(), r"^install .* python3\.99-dev\b")

    def test_make_install_builds_the_library_and_the_program_alone(self):
        status, out = run("make", "-n", "-C", ROOT, "install")
        self.assertEqual(status, 0, out)
        self.assertEqual(re.findall(r"JOBS=\d+ scripts/build *(.*)", out), ["trireme_program"])

    # A CMake that prints `text` when it is called with `word`, and ends with `status`.
    def build(self, text, word="--build", status=1, on=run):
        shutil.copy(ROOT / "scripts/build", self.root / "scripts")
        (self.root / "said").write_text(text)
        self.write(".venv/bin/cmake", f'#!/bin/sh\n[ "$1" != {word} ] || {{ cat {self.root}/said; exit {status}; }}\n')
        return on(self.root / "scripts/build", environment={"PRESET": "release", "JOBS": "2"})

    def test_a_failed_build_ends_with_one_sentence_that_says_what_to_do(self):
        for printed, advice in (
                ("a.h:1:10: fatal error: nlohmann/json.hpp: No such file or directory\ncompilation terminated.\n", "apt-get install nlohmann-json3-dev"),
                ("a.h:1:10: fatal error: 'CLI/CLI.hpp' file not found\n", "apt-get install libcli11-dev"),
                ("a.h:1:10: fatal error: yaml-cpp/yaml.h: No such file or directory\n", "apt-get install libyaml-cpp-dev"),
                ("a.h:1:10: fatal error: zstd.h: No such file or directory\n", "apt-get install libzstd-dev"),
                ("a.h:1:10: fatal error: pcre2.h: No such file or directory\n", "apt-get install libpcre2-dev"),
                ("a.h:1:10: fatal error: crt/host_config.h: No such file or directory\n", "a header of NVIDIA's, which this project includes nowhere"),
                ("a.h:1:10: fatal error: curl/curl.h: No such file or directory\n", "<curl/curl.h> is missing: install the Debian package that holds it,"),
                ("a.h:1:10: fatal error: base/file.h: No such file or directory\n", "git status"),
                ("a.h:1:10: fatal error: ATen/Tensor.h: No such file or directory\n", "TORCH_PYTHON="),
                ("a.h:1:10: fatal error: trireme/engine.h: No such file or directory\n", "git status"),
                ("a.h:1:10: fatal error: span: No such file or directory\n", "apt-get install g++"),
                ("c++: fatal error: Killed signal terminated program cc1plus\n", "make JOBS=1"),
                ("a.o: No space left on device\n", "The disk is full"),
                ("/usr/bin/ld: cannot find -lz: No such file or directory\n", "libz.so"),
                ("a.cpp: internal compiler error: Segmentation fault\n", "another compiler by CXX="),
                ("a.cpp:1:1: error: 'x' was not declared in this scope\n", "The first error above is the cause")):
            with self.subTest(printed=printed):
                status, out = self.build(printed)
                self.assertEqual(status, 1)
                self.assertTrue(out.startswith("Building into build/release with 2 jobs.\n" + printed), out)
                last = out.splitlines()[-1]
                self.assertTrue(last.startswith("build: error: "), out)
                self.assertIn(advice, last)

    def test_a_failed_configuration_does_so_too(self):
        for printed, advice in (
                ('  Could not find a package configuration file provided by "CLI11" with any of\n', "apt-get install libcli11-dev"),
                ("  Could NOT find GTest (missing: GTEST_LIBRARY)\n", "apt-get install libgtest-dev"),
                ("  No CMAKE_CXX_COMPILER could be found.\n", "apt-get install g++"),
                ('CMake Error: No such configure preset in /a: "release"\n', "PRESET=release is no preset of this project: choose one of those above"),
                ("  Could NOT find Threads (missing: Threads_FOUND)\n", "CMake finds no Threads: install its Debian package, then"),
                ("/usr/bin/python3 has no torch. Install it\n", "make clean")):
            with self.subTest(printed=printed):
                status, out = self.build(printed, word="--preset")
                self.assertEqual((status, out.count("build: error: ")), (1, 1))
                self.assertIn(advice, out.splitlines()[-1])

    def test_jobs_that_are_no_number_are_refused_by_name(self):
        for jobs in ("abc", "0", "2x", "-1"):
            with self.subTest(jobs=jobs):
                status, out = run(self.root / "scripts/build", environment={"JOBS": jobs})
                self.assertEqual((status, out), (1, f"build: error: JOBS={jobs}: expected a whole number of at least 1, as in: make JOBS=2\n"))

    def test_a_build_that_succeeds_adds_no_word(self):
        self.assertEqual(self.build("[1/1] Linking\n", status=0), (0, "Building into build/release with 2 jobs.\n[1/1] Linking\n"))

    def test_who_watches_a_build_sees_what_a_terminal_shows_and_the_same_sentence(self):
        status, out = self.build("\x1b[1mfatal error: \x1b[0mspan: No such file\n", on=run_on_terminal)
        self.assertEqual(status, 1)
        self.assertIn("\x1b[1mfatal error", out)
        self.assertIn("build: error: ", out.splitlines()[-1])
        self.assertIn("apt-get install g++", self.build("a: fatal error: span: No such file\n", on=run_on_terminal)[1])

    def test_a_build_before_setup_says_so(self):
        shutil.copy(ROOT / "scripts/build", self.root / "scripts")
        status, out = run(self.root / "scripts/build")
        self.assertEqual(status, 1)
        self.assertIn("make setup", out)


if __name__ == "__main__":
    unittest.main()
