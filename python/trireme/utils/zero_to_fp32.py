"""Weights in fp32 out of a checkpoint of any number of ranks, without an engine."""
import os

from .._native import core


def get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag=None, exclude_frozen_parameters=False, lazy_mode=False):
    """The state dict: masters where there are any, buffers and frozen weights too. `tag` None is the latest; lazy_mode is accepted.

    Raises  CheckpointError, IoError: there is none, or it is damaged.
    """
    # pylint: disable=unused-argument
    return core.fp32_state_dict(os.fspath(checkpoint_dir), "" if tag is None else str(tag), exclude_frozen_parameters)


def load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag=None):
    """Fills `model`, which is no engine's any more, and returns it."""
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir, output_dir, max_shard_size="5GB", safe_serialization=False, tag=None,
                                               exclude_frozen_parameters=False):
    """Writes pytorch_model.bin or, with safe_serialization, model.safetensors: several files and an index above max_shard_size."""
    name = "model.safetensors" if safe_serialization else "pytorch_model.bin"
    core.consolidate(os.fspath(checkpoint_dir), os.fspath(output_dir), "" if tag is None else str(tag), name,
                     "1000000TB" if max_shard_size is None else str(max_shard_size), exclude_frozen_parameters)
