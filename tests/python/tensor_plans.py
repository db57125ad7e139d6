"""Partition rules on every class of transformers that has a tp_plan: which are planned, and why others are refused.

    tensor_plans.py [RANKS] [NAME ...]     a line for each class, and the totals
"""
import collections
import re
import sys
import warnings

import torch
import transformers
from trireme.errors import ConfigError
from trireme.tensor import model_facts
from trireme.tensor.plan import partition_text
from zoo import classes


def _configurations(make):
    """Configurations with few layers, and what defaults leave out; those in them for models of one of their parts."""
    for sizes in ({"num_hidden_layers": 2}, {"num_hidden_layers": 4}, {}):
        for more in ({}, {"head_dim": 128}, {"pad_token_id": 0}, {"head_dim": 128, "num_key_value_heads": 8, "pad_token_id": 0}):
            try:
                config = make(**sizes, **more)
            except Exception:  # pylint: disable=broad-exception-caught
                continue
            yield config
            text = config.get_text_config()
            if text is not config:
                yield text


def build(name, configuration):
    """The model on the device "meta"; None: its configuration has no plan. Raises RuntimeError: transformers cannot
    build it so."""
    error = None
    for config in _configurations(getattr(transformers, configuration)):
        if error is None and not classes.has_plan(config):
            return None
        try:
            with torch.device("meta"):
                return getattr(transformers, name)(config)
        except Exception as raised:  # pylint: disable=broad-exception-caught
            error = error or raised
    raise RuntimeError(f"not built: {type(error).__name__}: {error}".partition("\n")[0])


def planned(name, configuration, ranks):
    """"ok", or why not; None: without a plan."""
    try:
        model = build(name, configuration)
    except RuntimeError as error:
        return str(error)
    if model is None:
        return None
    try:
        if not model_facts.facts_of(model).tp_plan:
            return None
        partition_text(model, ranks)
    except ConfigError as error:
        return str(error)
    return "ok"


def reason(text):
    """A refusal without its names and numbers, so that alike ones are counted together."""
    if text == "ok" or text.startswith("not built"):
        return text.partition(":")[0]
    text = re.sub(r'tp_plan\["[^"]*"\]', "tp_plan[…]", text.removeprefix("tensor_parallel: ").removeprefix("tensor_parallel."))
    return re.sub(r"\d+", "N", re.sub(r"'[^']*'|`[^`]*`|[\w.*]+\.[\w.*]+", "…", text))[:150]


def table(ranks, names=()):
    """[(class, "ok" or why not)] of the classes that have a plan."""
    # The first configuration of a class counts.
    configurations = {name: configuration for configuration, name in reversed([*classes.classes()])}
    return [(name, found) for name, configuration in sorted(configurations.items()) if not names or name in names
            if (found := planned(name, configuration, ranks)) is not None]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows = table(int(sys.argv[1]) if len(sys.argv) > 1 else 2, sys.argv[2:])
    for row in rows:
        print(*row, sep="\t")
    print()
    for why, count in collections.Counter(reason(found) for _, found in rows).most_common():
        print(f"{count:4} {why}")
