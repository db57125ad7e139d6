"""Which torch a wheel is built against and runs with: the one that is installed, for pyproject.toml.

pip builds beside a torch of its own, in an environment that does not see what is installed; where that lies is known.
"""
import importlib.metadata
import pathlib
import re
import sys
import sysconfig

_TESTED = pathlib.Path(__file__).resolve().parent.parent / "scripts/torch-versions.txt"


def _numbers(version):
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def torch_requirement(folders):
    """`torch==VERSION` of the torch in `folders`; of the oldest that is tested where there is none, or an older one."""
    oldest = re.search(r"^\d.*$", _TESTED.read_text(), re.MULTILINE).group()
    for found in importlib.metadata.distributions(name="torch", path=list(folders)):
        version = found.version.partition("+")[0]  # without the name of a build, which another index has
        if _numbers(version) >= _numbers(oldest):
            return f"torch=={version}"
    return f"torch=={oldest}"


def _folders():
    return [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]


def get_requires_for_dynamic_metadata(_settings):
    return [torch_requirement(_folders())]


def dynamic_metadata(_field, _settings):
    # Where NumPy is not there, torch warns on every rank.
    return [torch_requirement(_folders()), "numpy"]
