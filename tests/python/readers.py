"""The Python packages by which others read what a run writes: TensorBoard, pandas, jsonschema."""
import json
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "peers"))
import environments  # pylint: disable=wrong-import-position

_PACKAGES = ("tensorboard==2.20.0", "pandas==3.0.3" if environments.HAS_TRANSFORMERS_5 else "pandas==2.3.3", "jsonschema==4.26.0")


def read(case, program, *arguments):
    """The JSON value that `program` prints last under a Python with these packages; skips the test `case` where the
    package index cannot be reached."""
    try:
        python = environments.python_with(pathlib.Path(sys.executable).parents[2], *_PACKAGES)
    except environments.Unreachable as reason:
        print(f"readers: none of {', '.join(_PACKAGES)}: {str(reason)[:200]}")
        return case.skipTest("the package index cannot be reached")
    done = subprocess.run([python, "-c", program, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])
