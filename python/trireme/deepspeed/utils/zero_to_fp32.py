"""Weights in fp32 out of a checkpoint of any number of ranks, without an engine."""
import glob
import os
import re

from ..._native import core
from ...training.model_files import wait_for_writers
from ..missing import names_of

__getattr__ = names_of(__name__)


def get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag=None, exclude_frozen_parameters=False, lazy_mode=False):
    """The state dict: masters where there are any, buffers and frozen weights too. `tag` None is the latest; lazy_mode
    is accepted.

    Raises  CheckpointError, IoError: there is none, or it is damaged.
    """
    # pylint: disable=unused-argument
    wait_for_writers()
    return core.fp32_state_dict(os.fspath(checkpoint_dir), "" if tag is None else str(tag), exclude_frozen_parameters)


def load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag=None):
    """Fills `model`, which is no engine's any more, and returns it."""
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir, output_dir, max_shard_size="5GB", safe_serialization=False, tag=None,
                                               exclude_frozen_parameters=False):
    """Writes pytorch_model.bin or, with safe_serialization, model.safetensors: several files and an index above
    max_shard_size."""
    name = "model.safetensors" if safe_serialization else "pytorch_model.bin"
    core.consolidate(os.fspath(checkpoint_dir), os.fspath(output_dir), "" if tag is None else str(tag), name,
                     "1000000TB" if max_shard_size is None else str(max_shard_size), exclude_frozen_parameters)


# --- files of a checkpoint that DeepSpeed, or `trireme convert --to deepspeed`, has written -------------------------

def atoi(text):
    """A number for digits; other text as it is."""
    return int(text) if text.isdigit() else text


def natural_keys(text):
    """A key for sorted(): numbers in a text count as numbers."""
    return [atoi(part) for part in re.split(r"(\d+)", text)]


def get_checkpoint_files(checkpoint_dir, glob_pattern):
    """The files of a folder that fit a pattern, in natural order. Raises FileNotFoundError: there are none."""
    files = sorted(glob.glob(os.path.join(checkpoint_dir, glob_pattern)), key=natural_keys)
    if not files:
        raise FileNotFoundError(f"can't find {glob_pattern} files in directory '{checkpoint_dir}'")
    return files


def get_optim_files(checkpoint_dir):
    """Those with optimizer states. Raises FileNotFoundError: there are none."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir):
    """Those with weights. Raises FileNotFoundError: there are none."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def get_model_state_file(checkpoint_dir, zero_stage):
    """Rank 0's weights at a ZeRO stage. Raises FileNotFoundError: there is no such folder or file."""
    if not os.path.isdir(checkpoint_dir):
        raise FileNotFoundError(f"Directory '{checkpoint_dir}' doesn't exist")
    file = os.path.join(checkpoint_dir, f"{'zero_pp_rank_0_' if zero_stage == 3 else ''}mp_rank_00_model_states.pt")
    if not os.path.exists(file):
        raise FileNotFoundError(f"can't find model states file at '{file}'")
    return file
