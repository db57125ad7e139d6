"""The program and the commands of docs/text-to-model.md are run as they stand there, and what they make is used."""
import os
import pathlib
import re
import shlex

from harness import PROGRAM, PYTHON, Case, main, run
from transformers import AutoModelForCausalLM, AutoTokenizer

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs/text-to-model.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


class TextToModel(Case):
    """A reader's folder."""

    def follow(self, words):
        path = os.pathsep.join([str(PROGRAM.parent), os.environ["PATH"]])
        status, out, err = run(words, folder=self.folder, environment={"PATH": path, "TRIREME_DEVICE": "cpu"})
        self.assertEqual(status, 0, out + err)
        return out, err

    def test_every_command_runs(self):
        (program,) = blocks("python")
        (self.folder / "make.py").write_text(program)
        self.follow([PYTHON, "-B", "make.py"])
        commands = [line for block in blocks("sh") for line in block.splitlines()]
        said = {command.split()[1] + (" again" if "--resume" in command else ""): self.follow(shlex.split(command)) for command in commands}
        self.assertEqual(list(said), ["train", "train again", "generate", "consolidate"])
        before, after = (float(re.search(r"validation loss ([\d.]+)", said[name][0])[1]) for name in ("train", "train again"))
        self.assertLess(after, before)  # ln 1000 = 6.9 knows nothing
        self.assertLess(before, 6.7)
        self.assertTrue(said["generate"][0].startswith("def parse("), said["generate"])

        # transformers reads model and tokenizer, and continues the same prompt by the same tokens.
        tokenizer = AutoTokenizer.from_pretrained(self.folder / "exported")
        model = AutoModelForCausalLM.from_pretrained(self.folder / "exported")
        self.assertEqual(model.config.vocab_size, len(tokenizer))
        self.assertEqual(model.config.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>"))
        prompt = "<|endoftext|>def parse("
        theirs = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=12, do_sample=False)[0]
        ours, _ = self.follow([PROGRAM, "generate", "runs/python", "--prompt", "def parse(", "--tokens", "12", "--temperature", "0"])
        self.assertEqual(ours[:-1], tokenizer.decode(theirs, skip_special_tokens=True))

    def test_no_other_block_shows_code_that_nothing_runs(self):
        self.assertEqual(set(re.findall(r"^```(.+)$", PAGE, re.MULTILINE)), {"python", "sh"})


if __name__ == "__main__":
    main()
