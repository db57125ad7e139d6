#!/usr/bin/env python3
"""Virtual environments with packages of other projects, beside the packages of the Python that runs this (its torch).

    environments.py FOLDER REQUIREMENT ...      prints the environment's Python; exits 77 when PyPI cannot be reached

An environment is made once: its requirements have exact versions, or its folder is new.
"""
import fcntl
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

# deepspeed builds its wheel with what is installed, because it asks for torch while it does so.
BUILD_TOOLS = ("setuptools==80.9.0", "wheel==0.45.1", "packaging==25.0", "ninja==1.13.0", "numpy==2.3.4")
# The newest transformers does without Python 3.10, which Ubuntu 22.04 has: there the last one that knows it.
HAS_TRANSFORMERS_5 = sys.version_info >= (3, 11)
TRANSFORMERS = "transformers==5.24.0" if HAS_TRANSFORMERS_5 else "transformers==4.57.1"
UNREACHABLE = re.compile("NewConnectionError|ConnectTimeout|ReadTimeout|Temporary failure in name resolution|ProxyError|"
                         "Network is unreachable|Max retries exceeded")


class Unreachable(Exception):
    """The package index."""


def must(*command, environment=None):
    done = subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, **(environment or {})})
    if done.returncode and UNREACHABLE.search(done.stdout):
        raise Unreachable(done.stdout[-1000:])
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout.strip()


def install(python, requirements):
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if any(requirement.startswith("deepspeed==") for requirement in requirements):
        must(*pip, *BUILD_TOOLS)
        must(*pip, "--no-build-isolation", *requirements, environment={"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"})
    else:
        must(*pip, *requirements)


def packages_with_torch():
    return str(pathlib.Path(importlib.util.find_spec("torch").origin).parents[1])


def python_with(root, *requirements):
    """The Python of an environment in the folder `root` that has `requirements`. Throws Unreachable."""
    name = "-".join(requirement.replace("==", "-") for requirement in requirements)
    folder = pathlib.Path(root) / name
    python, stamp, packages = folder / "bin/python", folder / "complete", packages_with_torch()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{name}.lock", "w", encoding="utf-8") as lock:  # tests run side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != packages:
            must(sys.executable, "-m", "venv", "--clear", folder)
            site = must(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
            pathlib.Path(site, "torch.pth").write_text(packages + "\n")
            install(python, requirements)
            stamp.write_text(packages)
    return python


if __name__ == "__main__":
    try:
        print(python_with(*sys.argv[1:]))
    except Unreachable as reason:
        print(reason, file=sys.stderr)
        sys.exit(77)
