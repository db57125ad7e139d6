"""Tree: a wrapped module with all inside, its parameters, and the engine once it is sharded."""
import torch
from torch.distributed.device_mesh import init_device_mesh

from .. import ranks
from ..errors import StateError
from .policies import Dtypes


def managed_parameters(module):
    """Parameters of the units in `module`, itself included, in the order of parameters(): without those that the
    program keeps."""
    managed = set().union(*(part.fsdp_wrap.managed() for part in module.modules() if hasattr(part, "fsdp_wrap")))
    return [parameter for parameter in module.parameters() if parameter in managed]


class Tree:
    """An outermost wrapped module: which of its parameters are whose, their dtypes, and the mesh."""

    def __init__(self, module):
        self.module, self.dtypes = module, Dtypes()
        self.engine = None  # until it is sharded
        self.managed, self._parameters, self._frozen_at_first = [], set(), set()  # those of the first use, from then on
        self._mesh = None

    is_sharded = property(lambda self: self.engine is not None, doc="Whether there is an engine.")
    is_gone = property(lambda self: self.is_sharded and self.engine.is_spent, doc="Whether nothing can be computed with the model any more.")
    choice = property(lambda self: self.module.fsdp_wrap.choice, doc="The arguments of the outermost call of fully_shard().")

    def set_engine(self, engine):
        """The tree is sharded; parameters are its own as they are now."""
        self.engine, self._parameters, self.managed = engine, set(self.module.parameters()), managed_parameters(self.module)
        self._frozen_at_first = {p for p in self.managed if not p.requires_grad}

    def living_engine(self):
        """The engine of a tree that is sharded. Raises StateError: its ranks have gone."""
        if self.is_gone:
            raise StateError("this model's ranks have gone; nothing can be computed with it any more")
        return self.engine

    def named_managed(self):
        """{name: parameter} of those that are sharded, or will be."""
        managed = set(managed_parameters(self.module))
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter in managed}

    def ignored(self):
        """Parameters of the module that the program keeps: whole tensors of each rank."""
        return set(self.module.parameters()).difference(self.managed or managed_parameters(self.module))

    def trained(self):
        """Sharded parameters that require gradients now."""
        return [p for p in self.managed if p.requires_grad]

    def was_frozen(self, parameter):
        """Whether it required no gradients at the first use, so that nothing was laid out for them."""
        return parameter in self._frozen_at_first

    def name(self, parameter):
        """The name of a parameter, for errors."""
        return next((name for name, one in self.module.named_parameters() if one is parameter), "?")

    def require_same_parameters(self):
        """Raises StateError: a parameter is another one than at the first use, or thawed."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and self.was_frozen(parameter):
                raise StateError(f"optimizer.step(): '{name}' was frozen when the model was first used, and requires gradients now, so nothing was laid out for them; "
                                 "call requires_grad_(True) before the first forward and freeze it after the first step, or freeze it again")
            if parameter not in self._parameters:
                raise StateError(f"optimizer.step(): '{name}' is another parameter than at the first forward, which nobody trains; give models their final form "
                                 "before fully_shard()")

    def mesh(self):
        """The program's mesh, or one of all ranks."""
        if self.choice.mesh is None and self._mesh is None:
            self._mesh = init_device_mesh(self._device_type(), (ranks.world().size,))
        return self._mesh if self.choice.mesh is None else self.choice.mesh

    def _device_type(self):
        found = next((one.device.type for one in self.module.parameters() if not one.is_meta), None)
        return found or (torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu")
