"""How the programs of this folder tell a test what they computed."""
import json
import os


def report(**numbers):
    """Lists of numbers, by name: those of rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print("\nTEST_RESULT " + json.dumps(numbers), flush=True)
