"""Python values inside a checkpoint's JSON: plain ones as they are, others as the bytes of torch.save, read back
without running code (weights_only)."""
import base64
import io
import json

import torch

from .. import config as configs
from ..errors import CheckpointError, ConfigError

_BYTES = "torch.save/base64"


def _pack(key, value):
    try:
        if configs.unwritable(value, "") is None and json.loads(json.dumps(value)) == value:
            return value
    except (RecursionError, ValueError) as error:  # too deep, or inside of itself
        raise ConfigError(f"client_state['{key}']: {error}; keep containers that are nested less deeply in it") from None
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise ConfigError(f"client_state['{key}'] ({_culprit(value)}) could not be read back without running code; keep tensors, "
                          "numbers, texts and plain containers in it") from error
    return {_BYTES: base64.b64encode(buffer.getvalue()).decode("ascii")}


def _unpack(name, value):
    if not (isinstance(value, dict) and set(value) == {_BYTES}):
        return value
    try:
        return torch.load(io.BytesIO(base64.b64decode(value[_BYTES])), weights_only=True)
    except Exception as error:
        raise CheckpointError(f"client_state['{name}']: {error}; what is read back without running code are tensors and plain "
                              "containers: keep these in client_state") from error


def _culprit(value):
    """The innermost thing that is no plain container."""
    inner = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, (list, tuple, set)) else []
    odd = [one for one in inner if configs.unwritable(one, "") is not None and not isinstance(one, torch.Tensor)]
    return _culprit(odd[0]) if odd else f"a {type(value).__module__}.{type(value).__qualname__}"


def is_plain(value):
    """Whether a value, or what it contains, is a number, a text, None or a tensor: from_text() reads it back."""
    if isinstance(value, dict):
        return all(map(is_plain, (*value.keys(), *value.values())))
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.Tensor))


def check_keys(values):
    """Raises ConfigError: no dict, or a key that is no string."""
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"client_state: expected a dict with strings as keys, got {values!r:.80}")


def to_text(values):
    """JSON text of a dict with string keys. Raises ConfigError: what cannot be read back."""
    return json.dumps({key: _pack(key, value) for key, value in values.items()})


def from_text(text):
    """The dict again."""
    return {key: _unpack(key, value) for key, value in json.loads(text).items()}
