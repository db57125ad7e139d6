"""All programs that look at what they compute with, on each cut, at every ZeRO stage.

    parts_programs_slow_test.py PROGRAM All.test_2_2_OwnCheckpoint    one of them on two parts × two slices
"""
import sys

from harness import main
import parts_programs_test as quick

sys.path.insert(0, str(quick.HERE))
import parts_programs  # pylint: disable=wrong-import-position


class All(quick.Programs):
    """A test for each program and cut."""


def _of(name, sequence, tensor, first):
    def test(self):
        for stage in range(4):
            self.assert_right(sequence, tensor, [(name, stage, ("SGD", "AdamW")[(first + stage) % 2])])
    return test


for _place, (_name, (_, _options)) in enumerate(parts_programs.PROGRAMS.items()):
    for _sequence, _tensor in ((2, 1), (1, 2), (2, 2)):
        if (_sequence, _tensor) in _options.get("cuts", ((2, 1), (1, 2), (2, 2))):
            setattr(All, f"test_{_sequence}_{_tensor}_{_name}", _of(_name, _sequence, _tensor, _place))


if __name__ == "__main__":
    main()
