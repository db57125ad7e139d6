"""The memory of a program's objects while they live: its wrapped modules, and optimizers of their parameters. Other
modules of fsdp remember nothing beside these objects."""
import dataclasses
import weakref

modules = weakref.WeakSet()  # that are wrapped
_attachments = weakref.WeakKeyDictionary()  # by optimizer


@dataclasses.dataclass
class Attachment:
    """A record of an optimizer."""

    root: object  # the Root of its sharded parameters
    shows_states: bool = False  # its `state` is an optimizers.States
    kept_states: dict | None = None  # by parameter that the program keeps; kept.py has them


def attach(optimizer, root):
    """`optimizer` has parameters of `root`."""
    if optimizer not in _attachments:
        _attachments[optimizer] = Attachment(root)


def attachment(optimizer):
    """The Attachment of an optimizer; None: it has no parameters of a wrapped module."""
    return _attachments.get(optimizer)


def root_of(optimizer):
    """The Root of an optimizer that has an Attachment."""
    return _attachments[optimizer].root


def attached(optimizer):
    """The optimizer itself, or the one that it wraps, that has an Attachment; None: there is none."""
    while optimizer is not None and optimizer not in _attachments:
        optimizer = vars(optimizer).get("optimizer")
    return optimizer
