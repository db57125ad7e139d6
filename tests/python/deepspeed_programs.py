"""The programs of programs/for_deepspeed, which know nothing of Trireme: at which stages they run, and what they say
under DeepSpeed."""
import json
import os
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "peers"))
import environments  # pylint: disable=wrong-import-position
from harness import PROGRAM  # pylint: disable=wrong-import-position

_PACKAGES = ("deepspeed==0.19.8", environments.TRANSFORMERS)
FOLDER = pathlib.Path(__file__).parent / "programs" / "for_deepspeed"
RECORD = FOLDER / "recorded.json"  # what DeepSpeed 0.19.8 says on two ranks; deepspeed_programs_slow_test.py writes it
RANKS = 2
# The first stage of each is the one of the quick test and of the record. Missing ones are those that DeepSpeed refuses.
STAGES = {
    "accumulation": (2, 3),
    "activation_checkpointing": (2,),
    "autograd_function": (3,),
    "batch_curriculum": (1,),
    "bert_pretraining": (1, 2),
    "cifar": (0, 2),
    "client_optimizer": (1, 3),
    "client_scheduler": (2,),
    "dataloader": (1,),
    "dictionary_outputs": (3,),
    "direct_backward": (3, 2),
    "distillation": (2,),
    "evaluation": (3,),
    "frozen_layers": (0, 2),
    "gan": (0,),
    "lora": (3, 0, 2),
    "no_sync": (1, 0),
    "resume": (2, 3),
    "schedules": (1,),
    "siamese": (1, 3),
    "sweep": (0, 3),
    "tied_weights": (3,),
    "unmanaged_accumulation": (2,),
    "zero_init": (3,),
}
_WRITE = ("lora", "resume")  # what they save, into a folder that they are given


def python_with_deepspeed():
    """A Python that has DeepSpeed itself. Raises SkipTest where it cannot be had."""
    folder = os.environ.get("TRIREME_PEERS", str(PROGRAM.parent.parent / "peers"))
    try:
        return environments.python_with(folder, *_PACKAGES)
    except environments.Unreachable:
        raise unittest.SkipTest("the package index cannot be reached, so there is nothing to compare with") from None


def words_of(name, stage):
    """A program and its arguments, as run_all.py wants them."""
    return f"{name},--stage,{stage}" + (",--output_dir,FOLDER" if name in _WRITE else "")


def recorded():
    """The record of each program, by its name: lists of numbers by name."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def write_record(said):
    """The reverse of recorded(), a list a line."""
    programs = []
    for name, lists in sorted(said.items()):
        lines = ",\n".join(f'  "{key}": {json.dumps([float(f"{number:.8g}") for number in numbers])}' for key, numbers in lists.items())
        programs.append(f' "{name}": {{\n{lines}\n }}')
    RECORD.write_text("{\n" + ",\n".join(programs) + "\n}\n", encoding="utf-8")


def difference(found, expected):
    """The largest one between two reports, of a list against the largest number of the list; infinite where lists
    differ in kind."""
    if {name: len(numbers) for name, numbers in found.items()} != {name: len(numbers) for name, numbers in expected.items()}:
        return float("inf")
    return max(abs(one - other) / (max(map(abs, numbers)) or 1)
               for name, numbers in expected.items() for one, other in zip(found[name], numbers))
