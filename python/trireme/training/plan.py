"""The plan of an engine's training: groups of parameters, who updates them, and who sets their learning rates."""
import dataclasses
from typing import Any

import torch

from ..errors import ConfigError
from ..log import logger
from . import optimizers, schedules
from .client_optimizer import ClientOptimizer
from .optimizer_copy import Beginnings, is_optimizer


@dataclasses.dataclass(frozen=True)
class Plan:
    """Made of a configuration and what a program has made itself; see plan()."""

    # The library's configuration: its optimizer section updates as the program's object does, and leaves out torch's
    # part
    config: dict[str, Any]
    groups: list[dict[str, Any]]  # of parameters, with hyperparameters of their own
    others: list[dict[str, Any]]  # groups 1 and up, as the library takes them
    client: torch.optim.Optimizer | None  # the program's, or one of torch.optim that the configuration names
    steps_itself: bool  # the library has no update for `client`
    # A scheduler of the program, a callable that makes one, or torch's that the configuration names; None: the
    # library's
    scheduler: Any
    torch_section: dict[str, Any] | None  # of the latter
    unmanaged: frozenset[torch.nn.Parameter]  # parameters that the engine does not train

    has_optimizer = property(lambda self: self.steps_itself or "optimizer" in self.config)

    def trial(self, model, is_sharded):
        """The ClientOptimizer of an optimizer that steps itself; None: the library updates. Raises UnsupportedError: it
        cannot."""
        return ClientOptimizer(self.client, model, is_sharded) if self.steps_itself else None

    def frozen(self, model):
        """{name: parameter} that require grad and are in no group: nobody trains them."""
        if not self.has_optimizer:
            return {}
        chosen = {p for group in self.groups for p in group["params"]}
        return {name: p for name, p in model.named_parameters() if p.requires_grad and p not in chosen and p not in self.unmanaged}


def plan(model, config, *, optimizer, model_parameters, lr_scheduler, over_stages, unmanaged=frozenset()):
    """A Plan, by the arguments of an engine. Nothing has changed yet. Collective over the stages.

    Raises  ConfigError: groups, an optimizer or a scheduler that does not fit the model. What a callable raises.
    """
    groups, client = _choose_optimizer(model, config, optimizer, model_parameters, over_stages)
    groups = optimizers.managed_groups(groups, unmanaged, over_stages)
    schedules.check(lr_scheduler, client)
    native, others, torch_section = dict(config), [], None
    if lr_scheduler is None and (lr_scheduler := schedules.of_torch(native.get("scheduler"), groups)) is not None:
        torch_section = native.pop("scheduler")
    if client is not None:
        native["optimizer"] = optimizers.section_of(client)
    if lr_scheduler is not None and native.pop("scheduler", None) is not None:
        logger.info("initialize: lr_scheduler is used, not the configuration's scheduler section")
    steps_itself = client is not None and native["optimizer"] is None
    if native.get("optimizer") is not None:
        native["optimizer"], others = optimizers.native_groups(model, groups, native["optimizer"], over_stages)
    if client is None:
        schedules.check_callable(lr_scheduler, groups)
    native = {key: value for key, value in native.items() if value is not None}
    return Plan(native, groups, others, client, steps_itself, lr_scheduler, torch_section, unmanaged)


def _choose_optimizer(model, config, optimizer, model_parameters, over_stages):
    """Parameter groups, and the optimizer object where there is one."""
    is_given = optimizer is not None
    if not is_given:
        optimizer = optimizers.of_torch(config.get("optimizer"))
    if optimizer is None:
        return optimizers.group_parameters(model, model_parameters, over_stages), None
    if not is_optimizer(optimizer):
        if not callable(optimizer):
            raise ConfigError(f"optimizer: {type(optimizer).__name__} is neither a torch.optim.Optimizer nor a callable that makes one")
        optimizer = optimizers.made_by(optimizer, optimizers.group_parameters(model, model_parameters, over_stages))
        if not is_optimizer(optimizer):
            raise ConfigError(f"optimizer: the callable gave {optimizer!r:.60}; expected a torch.optim.Optimizer")
    if is_given and config.get("optimizer") is not None:
        logger.info("initialize: the optimizer object is used, not the configuration's optimizer section")
    groups = optimizers.group_parameters(model, optimizer.param_groups, over_stages)
    if Beginnings(optimizer, {p for group in groups for p in group["params"]}).has_stepped:
        logger.warning("initialize: the optimizer has states already, which are dropped; load them with load_checkpoint()")
    return groups, optimizer
