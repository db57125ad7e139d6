"""The zoo: programs that users write, in one list, from which tests take by tags.

    features                                    its MODELS are drawn by random tests of pipelines, sequences, tensor
                                                parallelism and FSDP (a new one: FROM_HUB; _STACKS for pipelines too)
    layers, operators, loops, families, padded  trained by tensor parallelism at fixed degrees; a model for these and
                                                for random tests is entered in both, under two names
    sequence, samples                           by sequence parallelism; known models of `sequence` as slices, too
    models                                      in which others are tried
    optimizers                                  of programs, at every ZeRO stage

    zoo.programs()                      all
    zoo.programs("operators", "mlp")    those that have both tags

A program says how its model, a batch and a loss are made, so that an axis can train it beside plain PyTorch without
knowing it. Its tags are its collection, which is the file or folder that it stands in, and its file in a folder, or the
first word of its name where the collection is sorted by these. One that makes engines itself (it saves, resumes,
evaluates between) has `run` instead, and is for tensor parallelism.
"""
import importlib
from typing import Callable, NamedTuple

COLLECTIONS = ("models", "layers", "operators", "loops", "families", "sequence", "padded", "features", "samples", "optimizers")
ENGINES = "engines"  # the tag of a program that makes them itself


class Program(NamedTuple):
    name: str
    tags: frozenset
    build: Callable = None  # () -> nn.Module
    batch: Callable = None  # number -> arguments of the loss
    loss: Callable = None   # (what is called: the module or an engine, the module, *batch) -> the loss
    options: dict = {}      # of its training, as tensor_compare.compare() takes them
    unavailable: str = ""   # why it cannot run beside the packages that are here
    run: Callable = None    # (ranks that share a layer, ZeRO stage) -> differences from plain PyTorch


class Collection(dict):
    """Programs of one file, by name."""

    def __init__(self, tag, batch=None, loss=None, sorted_by_words=True):
        super().__init__()
        self.tag, self.batch, self.loss, self.sorted_by_words = tag, batch, loss, sorted_by_words

    def add(self, name, build, loss=None, batch=None, tags=(), unavailable="", **options):
        """A program that any axis can train. Raises ValueError: there is one of that name."""
        self._put(Program(name, self._tags(name).union(tags), build, batch or self.batch, loss or self.loss, options, unavailable))

    def own(self, run, name=None):
        """A program that makes engines itself; by default its name is its function's."""
        name = name or run.__name__
        self._put(Program(name, self._tags(name) | {ENGINES}, run=run))
        return run

    def _tags(self, name):
        return frozenset({self.tag, *([name.partition("_")[0]] if self.sorted_by_words else ())})

    def _put(self, program):
        if program.name in self:
            raise ValueError(f"'{program.name}' is in the zoo's collection '{self.tag}' already")
        self[program.name] = program


def collection(tag):
    return importlib.import_module(f"zoo.{tag}").PROGRAMS


def programs(*tags):
    """{name: Program} of those that have all tags."""
    found = {}
    for tag in COLLECTIONS:
        for name, program in collection(tag).items():
            if name in found:
                raise ValueError(f"'{name}' is in two collections of the zoo")
            found[name] = program
    return {name: program for name, program in found.items() if program.tags.issuperset(tags)}
