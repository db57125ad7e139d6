"""Files that an engine saves and loads: checkpoints, and the model's weights alone."""
import json
import os
import sys
import weakref

from .._native import core
from ..errors import ConfigError, UnsupportedError
from . import client_state as client_states

# Keys that an engine adds to a program's client_state. An optimizer that steps itself keeps more than its states and
# groups. The model's config.json makes weights that are taken out a model that from_pretrained() opens.
_SCHEDULER, _GROUPS, _OPTIMIZER, _MODEL = "trireme.lr_scheduler", "trireme.param_groups", "trireme.optimizer", "trireme.model"


_writers = weakref.WeakSet()  # engines of this process that may be writing a checkpoint in the background


def wait_for_writers():
    """Waits until what engines of this process write in the background is complete. Raises its error. Ranks alike."""
    while _writers:
        engine = _writers.pop()
        if engine.core is not None and not engine.is_spent:
            engine.core.wait_for_checkpoint()


def _check_folder(call, argument, folder):
    if not isinstance(folder, (str, os.PathLike)):
        raise ConfigError(f"{call}: {argument} is {folder!r}; expected the path of a folder")


def _config_of(module):
    """config.json of a model of transformers, as a dict; None of other modules."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, getattr(transformers, "PreTrainedModel", ())):
        return None
    return {**json.loads(module.config.to_json_string()), "architectures": [type(module).__name__]}


class ModelFiles:
    """The files of an engine with `core`, `module`, `optimizer` and `client_lr_scheduler`."""

    # Ranks, or groups of ranks, that took different samples in the run that load_checkpoint() loaded last
    loaded_data_size = None

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
        """Saves all that training needs as save_dir/tag, by default global_stepN. Collective. Returns True.

        `client_state` is a dict, the same on every rank: what JSON has, tensors and plain containers.
        Raises  CheckpointError, IoError: nothing has changed then.
        """
        if self.optimizer is not None:
            self.optimizer.push()  # the checkpoint has the learning rates of the next step
        _check_folder("save_checkpoint", "save_dir", save_dir)
        client_states.check_keys(client_state or {})
        values = dict(client_state or {})
        config = _config_of(self.module)
        if config is not None:
            values[_MODEL] = config
        if hasattr(self.client_lr_scheduler, "state_dict"):
            values[_SCHEDULER] = self.client_lr_scheduler.state_dict()
        if self.client_steps is not None:
            values[_OPTIMIZER] = self.client_steps.values()
        elif self.optimizer is not None:
            values[_GROUPS] = self.optimizer.group_values()
        self.core.save_checkpoint(os.fspath(save_dir), tag="" if tag is None else str(tag),
                                  client_state=client_states.to_text(values),
                                  exclude_frozen_parameters=exclude_frozen_parameters, save_latest=save_latest)
        _writers.add(self)
        return True

    def load_checkpoint(self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True,
                        load_lr_scheduler_states=True, load_module_only=False, custom_load_fn=None):
        """Continues where a checkpoint was saved, at any number of ranks. Collective.

        `custom_load_fn(src, dst)` fills the module `dst`, whole while it runs, from `src`, every saved weight by name
        in fp32; rank 0's parameters become everybody's. The optimizer follows the weights.

        Returns (its path, client_state), or (None, None) where there is none.
        Raises  CheckpointError: one that does not fit or is damaged; names what. UnsupportedError: custom_load_fn where
                ranks share layers.
        """
        _check_folder("load_checkpoint", "load_dir", load_dir)
        ranks = (self.resolved_config.get("tensor_parallel") or {}).get("autotp_size", 0)
        if custom_load_fn is not None and ranks > 1:
            raise UnsupportedError(f"load_checkpoint(custom_load_fn=…): with tensor_parallel (autotp_size={ranks}) a rank has slices of parameters, "
                                   "which a program does not fill; leave custom_load_fn out, or fill the module before initialize()")
        if self.optimizer is not None:
            self.optimizer.push()  # what a checkpoint does not hold stays as the program has it
        wait_for_writers()  # another engine's files
        loaded = self.core.load_checkpoint(os.fspath(load_dir), "" if tag is None else str(tag), custom_load_fn is None,
                                           load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        if loaded is None:
            return None, None
        if custom_load_fn is not None:
            with core.GatheredContext(list(self.module.parameters()), 0):
                custom_load_fn(src=core.fp32_state_dict(os.fspath(load_dir), loaded[0], False), dst=self.module)
        values = client_states.from_text(loaded[1])
        scheduler, groups, of_optimizer = (values.pop(key, None) for key in (_SCHEDULER, _GROUPS, _OPTIMIZER))
        values.pop(_MODEL, None)
        if of_optimizer is not None and self.client_steps is not None and load_optimizer_states and not load_module_only:
            self.client_steps.load_values(of_optimizer)
        if self.optimizer is not None:
            self.optimizer.pull()
            if groups is not None and load_optimizer_states and not load_module_only:
                self.optimizer.set_group_values(groups)
        if scheduler is not None and self.client_lr_scheduler is not None and load_lr_scheduler_states and not load_module_only:
            self.client_lr_scheduler.load_state_dict(scheduler)
        self.loaded_data_size = self.core.data_size
        return os.path.join(os.fspath(load_dir), loaded[0]), values

    def wait_for_checkpoint(self):
        """Waits for a save in the background. Collective."""
        self.core.wait_for_checkpoint()

    def save_16bit_model(self, save_dir, save_filename="pytorch_model.bin", exclude_frozen_parameters=False):
        """Writes the weights, in the dtype that they have, into one file, unit by unit. Collective. Returns True."""
        return self.core.save_16bit_model(os.fspath(save_dir), save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model
