"""The files and commands of README.md are run as they stand there, on two ranks."""
import os
import pathlib
import re
import shlex

from harness import PROGRAM, PYTHON, Case, main, run

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
# Commands that take minutes, with the test that runs each.
ELSEWHERE = {"pip install .": "tests/install/pip_slow_test.py", "make train": "scripts/test-fresh", "make test": "scripts/test-fresh"}


def blocks(language):
    """The code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


class Readme(Case):
    """A reader's folder, with the README's files in it."""

    def setUp(self):
        super().setUp()
        (python,), (json,) = blocks("python"), blocks("json")
        (self.folder / "train.py").write_text(python)
        (self.folder / "ds_config.json").write_text(json)
        # A user's shell finds `trireme` and the Python that it is installed in.
        path = os.pathsep.join([str(PROGRAM.parent), str(pathlib.Path(PYTHON).parent), os.environ["PATH"]])
        self.environment = {"PATH": path, "TRIREME_DEVICE": "cpu"}

    def follow(self, command):
        """Runs a command on the README's files, from their folder, and looks whether the training learned."""
        status, out, err = run(shlex.split(command), environment=self.environment, folder=self.folder)
        self.assertEqual(status, 0, out + err)
        losses = [float(text) for text in re.findall(r"last loss ([0-9.]+)", out)]
        self.assertEqual(len(losses), 2, out)  # one of each rank
        # The text says "far below 1", and 8 for the first: the variance of a sum of 8 standard normal values
        self.assertLess(max(losses), 1, out)
        self.assertTrue((self.folder / "checkpoints/latest").exists())

    def test_every_command_runs_here_or_in_the_test_that_is_named_for_it(self):
        commands = [line for block in blocks("sh") for line in block.splitlines()]
        self.assertGreaterEqual(len(commands), 6)
        for command in commands:
            with self.subTest(command):
                if command in ELSEWHERE:
                    self.assertIn(command, (ROOT / ELSEWHERE[command]).read_text())
                else:
                    self.follow(command)

    def test_the_model_begins_with_the_loss_that_the_text_says(self):
        self.write("first.py", """
            import torch
            torch.manual_seed(0)
            x = torch.randn(4096, 8)
            net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
            print(torch.nn.functional.mse_loss(net(x), x.sum(1, keepdim=True)).item())
        """)
        status, out, err = run([PYTHON, "-B", "first.py"], folder=self.folder)
        self.assertEqual(status, 0, err)
        self.assertAlmostEqual(float(out), 8, delta=1)

    def test_no_other_block_shows_code_that_nothing_runs(self):
        languages = re.findall(r"^```(.*)$", README, re.MULTILINE)[::2]
        self.assertEqual(sorted(languages), ["cpp", "json", "python", "sh", "sh", "sh"])


if __name__ == "__main__":
    main()
