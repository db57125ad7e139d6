"""DeepSpeed's public names and configurations, read from the installed DeepSpeed, beside this package's."""
import json
import os
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "peers"))
from deepspeed_programs import python_with_deepspeed  # pylint: disable=wrong-import-position
from harness import PROGRAM, PYTHON, Case, main, result_of, run  # pylint: disable=wrong-import-position

TOOL = pathlib.Path(__file__).parents[2] / "tools/deepspeed_names"
ON_HOST = {"DS_ACCELERATOR": "cpu", "TRIREME_DEVICE": "cpu"}

# Getters of the engine that tell a configuration, in both packages. Written for either.
_GETTERS = """
import json, os
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import torch, deepspeed
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
NAMES = sorted(json.loads(os.environ["NAMES"]))
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2, "reduce_bucket_size": 12345, "overlap_comm": 0},
          "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": 1, "prescale_gradients": 0}
engine = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)[0]
found = {}
for name in NAMES:
    value = getattr(engine, name)
    value = value() if callable(value) else value
    found[name] = value if isinstance(value, (bool, int, float, str, list, dict, type(None))) else str(value)
print("\\nTEST_RESULT " + json.dumps(found))
"""

# Texts that are nearly Hjson, from a seed, and what Python's hjson makes of them. It refuses ''' on the first line,
# which is a comment here, and takes blanks inside of \u escapes, which these texts do not have.
_HJSON = r"""
import json, random, sys
try:
    import hjson
except ImportError:
    hjson = None
PIECES = ["{", "}", "[", "]", ":", ",", "\n", "\n", " ", "a", "key", "b c", "'x'", "\"y\"", "1", "-2.5", "1e3", "007", "true", "null", "falsey",
          "# c", "// d", "/* e */", "'''\n  m\n  n\n  '''", "\"z\\n\"", "\\", "C:/x", "\t", "\r\n"]
def value(rng, depth):
    kind = rng.randrange(12 if depth else 9)
    if kind >= 9 and depth < 4:
        return list_of(rng, depth) if kind == 9 else object_of(rng, depth, True)
    return rng.choice(["1", "-2.5", "1e3", "0", "007", "true", "false", "null", "text", "two words", "'q'", "\"d\"", "\"\\tz\"", "a, b # c",
                       "'''x'''", "+1", ".5", "5.", "-", "nullx", "http://h/p"])
def gap(rng):
    return rng.choice(["", " ", "\n", " \n ", " # c\n", " // c\n", " /* c */ ", "\t"])
def object_of(rng, depth, braces):
    text = ""
    for n in range(rng.randrange(4)):
        key = rng.choice([f"k{n}", f"\"k{n}\"", f"'k{n}'"])
        text += f"{gap(rng)}{key}{rng.choice(['', ' '])}:{rng.choice(['', ' ', chr(10)])}{value(rng, depth + 1)}{rng.choice([chr(10), chr(10), ',', ' , ', '', chr(10) + ','])}"
    return "{" + text + gap(rng) + "}" if braces else text
def list_of(rng, depth):
    return "[" + "".join(gap(rng) + value(rng, depth + 1) + rng.choice([",", "\n", "\n,"]) for _ in range(rng.randrange(4))) + gap(rng) + "]"
def text_of(seed):
    rng = random.Random(seed)
    text = "# a comment\n" + object_of(rng, 0, rng.random() < 0.7)
    if seed % 3 == 0:  # one change
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(PIECES) + text[at + rng.randrange(2):]
    return text
def once(pairs):
    if len(dict(pairs)) < len(pairs):
        raise ValueError
    return dict(pairs)
def read(text):
    try:
        return hjson.loads(text, object_pairs_hook=once)
    except Exception:
        return "refused"
"""


class Names(Case):
    """Made once: an environment with DeepSpeed."""

    @classmethod
    def setUpClass(cls):
        cls.python = python_with_deepspeed()

    def test_each_public_name_works_or_is_refused_by_name(self):
        status, table, err = run([self.python, "-B", TOOL, "survey"], environment=ON_HOST, timeout_s=600)
        self.assertEqual(status, 0, err)
        names = self.write("names.json", table)
        self.assertGreater(len(json.loads(table)), 740, err)
        status, out, err = run([PYTHON, "-B", TOOL, "compare", names], environment=ON_HOST, timeout_s=600)
        self.assertEqual(status, 0, out[-6000:] + err[-2000:])
        print(out)

    def test_an_engines_getters_tell_the_same(self):
        import trireme.deepspeed.engine_getters as getters  # pylint: disable=import-outside-toplevel
        # The leaves of offload sections are objects of either package.
        names = {*getters._ZERO, *getters._TOP, *getters._OFF, "zero_offload_param", "zero_offload_optimizer",  # pylint: disable=protected-access
                 "zero_partial_offload", "zero_use_cpu_optimizer", "checkpoint_tag_validation_enabled", "checkpoint_tag_validation_fail",
                 "checkpoint_serialization_enabled", "communication_data_type", "postscale_gradients", "initial_dynamic_scale",
                 "dynamic_loss_scale_args", "torch_autocast_lower_precision_safe_modules"} - {"load_universal_checkpoint"}
        script = self.write("getters.py", _GETTERS)
        environment = {**ON_HOST, "NAMES": json.dumps(sorted(names))}
        expected = result_of(run([self.python, "-B", script], environment=environment))
        found = result_of(run([PYTHON, "-B", "-m", "trireme.as_deepspeed", script], environment=environment))
        self.assertEqual(found, expected)

    def test_configurations_are_read_as_pythons_hjson_reads_them(self):
        script = self.write("texts.py", _HJSON + "print('TEST_RESULT ' + json.dumps([read(text_of(seed)) for seed in range(int(sys.argv[1]))]))\n")
        count = int(os.environ.get("TRIREME_HJSON_TEXTS", "3000"))
        expected = result_of(run([self.python, "-B", script, count]))
        made = {}
        exec(_HJSON, made)  # the texts are those of the script  # pylint: disable=exec-used
        from trireme._native import core  # pylint: disable=import-outside-toplevel
        from trireme.errors import ConfigError  # pylint: disable=import-outside-toplevel
        for seed, value in enumerate(expected):
            text = made["text_of"](seed)
            try:
                found = core.options_of_text(text, "text")
            except ConfigError:
                found = "refused"
            if isinstance(value, dict) or found != "refused":  # hjson reads "word", too, which is no configuration
                self.assertEqual(found, value, f"seed {seed}:\n{text}")
        self.assertGreater(sum(value != "refused" for value in expected), count / 2)


if __name__ == "__main__":
    main()
