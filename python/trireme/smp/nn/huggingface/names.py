"""The check behind all translations of state dicts."""
import collections.abc

from ....errors import ConfigError, UnsupportedError


def kept(call, state_dict, max_seq_len=None):
    """`state_dict` itself. `max_seq_len` changes nothing: buffers that depend on it are the model's own.

    Raises  ConfigError: not a state dict of transformers' names. UnsupportedError: that of a module of smp.nn.
    """
    if not isinstance(state_dict, collections.abc.Mapping):
        raise ConfigError(f"{call}: expected a state dict, got {type(state_dict).__name__}")
    if max_seq_len is not None and (not isinstance(max_seq_len, int) or isinstance(max_seq_len, bool) or max_seq_len < 1):
        raise ConfigError(f"{call}(max_seq_len={max_seq_len!r}): expected a whole number of 1 or more, or None")
    for name in state_dict:
        if "seq_layers" in str(name).split("."):
            raise UnsupportedError(f"{call}: '{name}' is of smp.nn.DistributedTransformer, and its names in a model of transformers are not there yet; train the model "
                                   "of transformers itself, which keeps its names")
    return state_dict
