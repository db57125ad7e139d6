#!/usr/bin/env python3
"""Runs a test of the Python package beside pinned packages of other projects.

    with_packages.py ENVIRONMENTS PACKAGE TEST ARGUMENT ...     exits 77 when PyPI cannot be reached

PACKAGE is the folder that has the built package `trireme`. Of a test the argument is the program of that name.
"""
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "peers"))
import environments  # pylint: disable=wrong-import-position

PACKAGES = (environments.TRANSFORMERS, *(("accelerate==1.15.0", "peft==0.21.2") if environments.HAS_TRANSFORMERS_5 else
                                         ("accelerate==1.11.0", "peft==0.18.0")))


def main():
    folder, package, test, *arguments = sys.argv[1:]
    try:
        python = environments.python_with(folder, *PACKAGES)
    except environments.Unreachable as reason:
        print(f"the package index cannot be reached: {reason}")
        sys.exit(77)
    os.environ["PYTHONPATH"] = os.pathsep.join(str(folder.resolve()) for folder in (pathlib.Path(package), pathlib.Path(test).parent))
    os.execv(python, [str(python), "-B", test, *arguments])


if __name__ == "__main__":
    main()
