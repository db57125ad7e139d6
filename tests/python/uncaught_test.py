"""Errors that the program does not catch, as a user reads them."""
import re

from harness import PROGRAM, PYTHON, Case, main, run

_PROGRAM = """
import sys
import torch, trireme as deepspeed

def start(config):
    return deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)

def main():
    {}

main()
"""
_WRONG = "{'train_micro_batch_size_per_gpu': 1, 'zero_optimization': {'stgae': 2}}"
_MESSAGE = "trireme.errors.ConfigError: config: unknown key `zero_optimization.stgae`. Did you mean `stage`?"


class Uncaught(Case):
    def said(self, body, ranks=2, flags=(), **environment):
        """(exit status, lines of stderr) of a program that does `body`, by `ranks` ranks; 0 ranks: without a
        launcher."""
        script = self.write("program.py", _PROGRAM.format(body.replace("\n", "\n    ")))
        launcher = [PROGRAM, "launch", "--num_gpus", ranks, *flags] if ranks else []
        status, _, err = run([*launcher, PYTHON, "-B", script], environment={"TRIREME_LOG_LEVEL": "WARNING", **environment})
        # which torch puts before what a hook writes
        return status, [re.sub(r"^\[rank0\]: ", "", line) for line in err.splitlines()]

    def test_a_wrong_configuration_is_one_message_with_the_frames_of_the_program(self):
        for ranks in (0, 2):
            with self.subTest(ranks=ranks):
                status, lines = self.said(f"start({_WRONG})", ranks)
                self.assertEqual(status, 1)
                if ranks:
                    self.assertRegex(lines.pop(0), r"^trireme launch: ranks? 0?[0-9, ]* ended with an error:$")
                self.assertEqual([line.strip() for line in lines if line.strip().startswith(("File", "trireme"))], [
                    f'File "{self.folder}/program.py", line {line}, in {name}' for line, name in ((11, "<module>"), (9, "main"), (6, "start"))] + [_MESSAGE])
                self.assertLessEqual(len(lines), 9)

    def test_every_frame_is_there_on_request(self):
        _, lines = self.said(f"start({_WRONG})", 0, TRIREME_TRACEBACK="full")
        self.assertGreater(len([line for line in lines if re.search(r"trireme/\w+.*\.py", line)]), 2)
        self.assertEqual(lines[-1], _MESSAGE)

    def test_errors_that_differ_are_all_there(self):
        _, lines = self.said("import os, time, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nrank = int(os.environ['RANK'])\ntime.sleep(rank)\n"
                             "raise deepspeed.errors.ConfigError(f'of rank {rank}')")
        self.assertEqual([line.strip() for line in lines if "Error: " in line], [f"trireme.errors.ConfigError: of rank {rank}" for rank in (1, 0)])

    def test_other_exceptions_keep_every_frame(self):
        for name, body in (("another", "import json\njson.loads('{')"), ("cause", f"try:\n    {{}}['key']\nexcept KeyError as error:\n    start({_WRONG})"),
                           ("lost", "raise deepspeed.errors.PeerLostError('gone')"), ("bug", "raise deepspeed.errors.InternalError('bug')")):
            with self.subTest(name):
                _, lines = self.said(body, 0)
                text = "\n".join(lines)
                self.assertEqual(text.count("Traceback (most recent call last)"), 2 if name == "cause" else 1)
                self.assertEqual("json/decoder.py" in text, name == "another")
                self.assertEqual("KeyError: 'key'" in text, name == "cause")

    def test_out_of_memory_says_what_to_lower_in_a_program(self):
        _, lines = self.said("torch.empty(2**55)", 0)
        self.assertEqual("DefaultCPUAllocator" in "".join(lines), True)
        self.assertRegex(lines[-1], "^trireme: out of memory: lower train_micro_batch_size_per_gpu")

    def test_a_hook_of_the_program_stays(self):
        _, lines = self.said(f"sys.excepthook = lambda kind, error, trace: print('mine:', error, file=sys.stderr)\nstart({_WRONG})", 0)
        self.assertEqual(lines, ["mine: " + _MESSAGE.partition(": ")[2]])

    def test_what_a_rank_says_before_is_kept(self):
        _, lines = self.said(f"print('before', file=sys.stderr, flush=True)\nstart({_WRONG})", 1)
        self.assertEqual(lines[0], "[rank 0] before")

    def test_torchs_hook_shows_it_too(self):
        _, lines = self.said("torch.distributed.init_process_group('gloo')\n" f"start({_WRONG})", 2)
        self.assertEqual(sum(_MESSAGE in line for line in lines), 1, lines)


if __name__ == "__main__":
    main()
