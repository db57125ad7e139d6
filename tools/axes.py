"""The axes along which a run is cut, and the disk: which rooms are theirs, and which other files name them. Used by
count_concepts.

Files name an axis by identifiers, includes, and literals of one word (keys, names of axes). Comments and other literals
do not count. A file with the axis in its name (src/python/pipeline.cpp, src/optim/disk_states.h) is its own.
"""
import re
from typing import NamedTuple

from rooms import room_of
from sources import code_of


class Axis(NamedTuple):
    rooms: tuple  # folders, or files without their ending
    pattern: str  # how other files name the axis


# The plan of all axes (parallel) is a room of each. The disk keeps states and weights there: its rooms are device/disk,
# optim/disk_states, pager/weights/disk_home, all by their names, and the places of its files.
AXES = {
    # A tokenizer's "Sequence" is a list of its steps.
    "sequence": Axis(("sequence", "parallel", "data/tokenizers"), r"(?<!index_)(?<!Is)(?<!On)[Ss]equence(?!_length)(?!_nr\b|_number\b|Number\b)(?!_parallel(?!_size))"),
    "pipeline": Axis(("pipeline", "stages", "schedule", "parallel", "python/step_engine", "smp"),
                     r"[Pp]ipeline|(?<!fail\()\"pipe\"|\.pipe\b|\bStage(?:Runner|Model|Work)\b"),
    "tensor": Axis(("tensor", "parallel"), r"[Tt]ensor_?[Pp]arallel|\bdegrees\.tensor\b|\bint tensor = 1\b"),
    "disk": Axis(("device/extents", "parallel"), r"[Dd]isk|[Nn]vme"),
}
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"')


def _is_own(name, axis):
    place = re.sub(r"^(?:src|include/trireme)/", "", name).rpartition(".")[0]
    rooms = AXES[axis].rooms
    is_in = any(place == room or place.startswith(room + "/") for room in rooms)
    return room_of(name) in rooms or is_in or axis in name.rpartition("/")[2]


def axis_places(root, tree):
    """{axis: {file outside of its rooms: how often it names the axis}}"""
    places = {axis: {} for axis in AXES}
    for name in tree.lines:
        code = _LITERAL.sub(lambda literal: literal.group() if re.fullmatch(r"\S+", literal.group()) else '""',
                            code_of((root / name).read_text(), keeps_literals=True))
        for axis, (_, pattern) in AXES.items():
            if not _is_own(name, axis) and (count := len(re.findall(pattern, code))):
                places[axis][name] = count
    return places
