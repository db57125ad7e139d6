"""Runs programs of this folder one after the other in this process. Arguments: a folder for what they write, then NAME
or NAME,ARGUMENT,… of each; reports what they report by these words."""
import contextlib
import io
import json
import os
import pathlib
import runpy
import sys

_RESULT = "TEST_RESULT "


def arguments_of(words, folder):
    """(name, arguments) of one program; FOLDER stands for a folder of its own below `folder`."""
    name, *arguments = words.split(",")
    own = os.path.join(folder, words.replace(",", "").replace("FOLDER", ""))
    return name, [own if argument == "FOLDER" else argument for argument in arguments]


def run(words, folder):
    """The report of one program; empty on other ranks than 0."""
    name, arguments = arguments_of(words, folder)
    sys.argv = [name, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as told:
        runpy.run_path(str(pathlib.Path(__file__).with_name(f"{name}.py")), run_name="__main__")
    return [json.loads(line.partition(_RESULT)[2]) for line in told.getvalue().splitlines() if _RESULT in line]


if __name__ == "__main__":
    own_folder, *wanted = sys.argv[1:]  # which a program replaces by its own arguments
    results = {one: run(one, own_folder) for one in wanted}
    if os.environ.get("RANK", "0") == "0":
        print("\n" + _RESULT + json.dumps({words: told[-1] for words, told in results.items()}), flush=True)
