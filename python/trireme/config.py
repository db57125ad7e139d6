"""Where configurations come from: a dict, a file or base64; and what one means for the ranks of the job."""
import base64
import binascii
import dataclasses
import json
import math
import os
import pathlib
from typing import Any

from ._native import core
from .errors import ConfigError, IoError


def _from_text(text, origin):
    config = core.options_of_text(text, origin)
    if not isinstance(config, dict):
        raise ConfigError(f"{origin}: expected an object, {{…}}, found {json.dumps(config)[:40]}")
    return config


def origin_of(config):
    """The text that opens errors about a configuration: its path, or that it is a dict or base64."""
    if not isinstance(config, (str, os.PathLike)):
        return "config"
    return str(config) if pathlib.Path(config).suffix else "<base64>"


def unwritable(value, path):
    """Where in `value`, which stands at `path`, something is that JSON has not: "config['a'] is a torch.Tensor". None:
    nowhere."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                return f"{path} has the key {key!r}, which is no string"
        return next(filter(None, (unwritable(inner, f"{path}['{key}']") for key, inner in value.items())), None)
    if isinstance(value, (list, tuple)):
        return next(filter(None, (unwritable(inner, f"{path}[{index}]") for index, inner in enumerate(value))), None)
    if value is None or isinstance(value, (bool, int, float, str)) or hasattr(value, "as_given"):
        return None
    return f"{path} is a {type(value).__module__}.{type(value).__qualname__}"


def _nan_in(value, path):
    """Where in `value`, which stands at `path`, a NaN is: "config['gradient_clipping']". None: nowhere."""
    if isinstance(value, dict):
        return next(filter(None, (_nan_in(inner, f"{path}['{key}']") for key, inner in value.items())), None)
    if isinstance(value, (list, tuple)):
        return next(filter(None, (_nan_in(inner, f"{path}[{index}]") for index, inner in enumerate(value))), None)
    return path if isinstance(value, float) and math.isnan(value) else None


def _check_nesting(config):
    """Raises ConfigError: dicts and lists deeper than functions over them can go, or inside of themselves."""
    most, level = 100, [config]
    for _ in range(most):
        inner = (one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer))
        level = list({id(one): one for one in inner if isinstance(one, (dict, list, tuple))}.values())
        if not level:
            return
    raise ConfigError(f"config: dicts and lists inside of each other, nested deeper than {most} levels, or inside of themselves")


def _as_given(value):
    """A section that is an object (runtime/sections.py), as a dict."""
    if hasattr(value, "as_given"):
        return value.as_given()
    raise TypeError


def _what_else_it_is(config):
    if not isinstance(config, (str, os.PathLike)):
        return ""
    if str(config).lstrip().startswith("{"):
        return "; pass json.loads() of such a text"
    return "; this is a folder" if os.path.isdir(config) else "; there is no such file"


def read(config):
    """The configuration as a dict of its own.

    `config` is a dict, the path of a file with JSON or Hjson, or with YAML of Accelerate, or URL-safe base64 of JSON or
    Hjson. Keys of Accelerate become DeepSpeed's.

    Raises  ConfigError (a ValueError): none of these, or a syntax error, with its place.
    """
    if isinstance(config, dict):
        _check_nesting(config)
        if where := _nan_in(config, "config"):
            raise ConfigError(f"{where} is NaN; give it a number")
        try:
            options = json.loads(json.dumps(config, default=_as_given))
        except TypeError:
            raise ConfigError(f"{unwritable(config, 'config')}; use what JSON has: dicts, lists, strings, numbers, booleans and None") from None
        return core.options_of(options) if core.is_accelerates(options) else options
    if isinstance(config, (str, os.PathLike)):
        path = pathlib.Path(config)
        try:
            is_there = path.exists() and not path.is_dir()
        except (OSError, ValueError):  # base64 may be longer than a file name
            is_there = False
        if is_there:
            try:
                return _from_text(core.read_config_text(str(path)).decode("utf-8"), str(path))
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path}: not UTF-8, {error.reason} at byte {error.start}; save it as UTF-8") from None
            except IoError as error:  # a pipe, a device, or a file of another kind by its size
                raise ConfigError(str(error)) from None
        try:
            return _from_text(base64.urlsafe_b64decode(str(config)).decode("utf-8"), "<base64>")
        except (binascii.Error, UnicodeDecodeError, ConfigError):
            pass
    raise ConfigError("Expected a string path to an existing deepspeed config, or a dictionary or a valid base64. "
                      f"Received: {config!r}{_what_else_it_is(config)}")


_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def check_filled(config, origin):
    """Raises ConfigError: keys of the top level that are still "auto", and what else is wrong with `config`."""
    autos = [key for key, value in config.items() if value == "auto"]
    if not autos:
        return
    one = len(autos) == 1
    names = ", ".join(f"`{key}`" for key in autos)
    text = (f"{origin}: {names} {'is' if one else 'are'} \"auto\", which transformers or Accelerate fill in before initialize(); "
            f"without them {'give it a value, or leave it out' if one else 'give them values, or leave them out'}")
    rest = {key: value for key, value in config.items() if value != "auto" and key not in _BATCH_KEYS}
    try:
        resolve({**rest, "train_micro_batch_size_per_gpu": 1}, 1, origin)
    except ConfigError as others:
        text += f"\n{others}"
    raise ConfigError(text)


def without_auto(section, depth=0):
    """A section in which "auto" stands for the default, as in DeepSpeed; at the top level somebody must have filled
    it."""
    if not isinstance(section, dict):
        return section
    return {key: without_auto(value, depth + 1) for key, value in section.items() if depth == 0 or value != "auto"}


def tensor_degree(options):
    """Ranks that share each layer, of resolved options."""
    return max(1, (options.get("tensor_parallel") or {}).get("autotp_size") or 1)


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A configuration, read once for the ranks of the job."""

    core: core.Config  # for the library
    options: dict[str, Any]  # every option, spelled out


def resolve(config, world_size, origin, stages=1, program_slices=1):
    """The dict `config` as a Resolved, for pipelines of `stages`, of a model that its program has cut into
    `program_slices`.

    Raises  ConfigError and its subclasses, which open with `origin`.
    """
    is_file = bool(pathlib.Path(origin).suffix) and os.path.isfile(origin)
    read = core.Config(config, world_size, origin, stages, is_file, program_slices)
    return Resolved(read, read.options)
