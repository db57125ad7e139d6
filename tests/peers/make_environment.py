#!/usr/bin/env python3
"""Makes the virtual environment that DeepSpeed runs in, with the torch of the Python that runs this.

    make_environment.py FOLDER

Nothing to do where FOLDER is complete. Exits 77 when the package index cannot be reached, 1 for any other failure.
"""
import fcntl
import os
import pathlib
import re
import subprocess
import sys
import venv

import torch

PACKAGES = ["deepspeed==0.19.8"]
BUILD_TOOLS = ["setuptools==80.9.0", "wheel==0.45.1", "packaging==25.0", "ninja==1.13.0", "numpy==2.3.5"]
UNREACHABLE = re.compile(r"NewConnectionError|ConnectTimeout|ReadTimeout|Temporary failure in name resolution|ProxyError|"
                         r"Network is unreachable|Max retries exceeded")


def install(folder, arguments):
    environment = dict(os.environ, DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
    command = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode == 0:
        return
    sys.stderr.write(done.stdout)
    sys.exit(77 if UNREACHABLE.search(done.stdout) else 1)


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch_folder = pathlib.Path(torch.__file__).parents[1]
    stamp = "\n".join([*BUILD_TOOLS, *PACKAGES, str(torch_folder)])
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run side by side
        ready = folder / "ready"
        if ready.exists() and ready.read_text() == stamp:
            return
        venv.create(folder, with_pip=True)
        site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (site / "torch_of_the_project.pth").write_text(f"{torch_folder}\n")
        install(folder, BUILD_TOOLS)
        install(folder, ["--no-build-isolation", *PACKAGES])
        ready.write_text(stamp)


if __name__ == "__main__":
    main()
