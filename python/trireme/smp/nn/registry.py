"""Marks and pairs of classes for layers that ranks share: which modules are to be cut, and what stands for them
then."""
import contextlib
import dataclasses
import difflib
import inspect
from collections.abc import Callable

import torch

from ...errors import ConfigError
from ..marks import Marks
from . import attention, layers, transformer
from .module import DistributedModule

#: Options of smp.tensor_parallelism() that are no arguments of a module.
OPTIONS = frozenset("""attention_in_fp32 distribute_embedding flash_attention fp32_residual_addition fused_bias_gelu fused_dropout fused_softmax
                       query_key_layer_scaling use_alibi zero_init""".split())
_OURS = (layers.DistributedLinear, layers.DistributedEmbedding, attention.DistributedAttentionLayer, transformer.DistributedTransformerOutputLayer,
         transformer.DistributedTransformerLayer, transformer.DistributedTransformer, transformer.DistributedTransformerLMHead)


@dataclasses.dataclass(frozen=True)
class Mark:
    """The wish of a program for a module."""

    enabled: bool
    options: dict


@dataclasses.dataclass(frozen=True)
class Pair:
    """The class that stands for another one where ranks share layers, and how arguments and results are translated."""

    distributed: type
    init_hook: Callable | None
    forward_hook: Callable | None
    return_hook: Callable | None


_marks = Marks("_smp_tensor_parallelism")
_pairs = {}  # by the class that is replaced


@contextlib.contextmanager
def tensor_parallelism(enabled=True, **options):
    """Modules that are made inside are marked; of nested contexts the innermost holds. Without effect where
    `tensor_parallel_degree` is 1.

    options     arguments of the modules that stand for them, before those of an init_hook, and smp's own

    Raises  ConfigError: an option that there is not.
    """
    with _marks.inside(_made("smp.tensor_parallelism", enabled, options)):
        yield


def set_tensor_parallelism(module, enabled=True, **options):
    """Marks `module`, and all modules in it, before it is wrapped; otherwise as tensor_parallelism()."""
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"smp.set_tensor_parallelism: {type(module).__name__} is no torch.nn.Module")
    _marks.put(module, _made("smp.set_tensor_parallelism", enabled, options))


def mark_of(module):
    """The Mark of a module itself; None: it has none."""
    return _marks.of(module)


def tp_register(dist_module, init_hook=None, forward_hook=None, return_hook=None):
    """A decorator: tp_register_with_module() of the class below it."""
    def register(module_cls):
        tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)
        return module_cls

    return register


def tp_register_with_module(module_cls, dist_module, init_hook=None, forward_hook=None, return_hook=None):
    """Where ranks share layers, a `dist_module` stands for each module of the class `module_cls`; the last pair holds.

    init_hook, forward_hook     called with the arguments of __init__() and forward() of `module_cls`, give (args,
                                kwargs) of those of `dist_module`
    return_hook                 called with the result of `dist_module`, gives that of `module_cls`

    Raises  ConfigError: another kind of class; a hook that is no function, or has other arguments.
    """
    call = "smp.tp_register_with_module"
    if not isinstance(module_cls, type) or not issubclass(module_cls, torch.nn.Module):
        raise ConfigError(f"{call}: {_shown(module_cls)} is no class of a torch.nn.Module")
    if not isinstance(dist_module, type) or not issubclass(dist_module, DistributedModule):
        raise ConfigError(f"{call}: {_shown(dist_module)} is no class that is derived from smp.nn.DistributedModule")
    for name, hook, method in (("init_hook", init_hook, module_cls.__init__), ("forward_hook", forward_hook, module_cls.forward), ("return_hook", return_hook, None)):
        if hook is None:
            continue
        if not callable(hook):
            raise ConfigError(f"{call}: {name} is {_shown(hook)}; expected a function")
        if method is not None:
            _check_arguments(f"{call}: {name}", hook, method)
    _pairs[module_cls] = Pair(dist_module, init_hook, forward_hook, return_hook)


def pair_of(module_cls):
    """The Pair of a class; None: it is not registered."""
    return _pairs.get(module_cls)


def _made(call, enabled, options):
    if not isinstance(enabled, bool):
        raise ConfigError(f"{call}(enabled={enabled!r}): expected True or False")
    known = OPTIONS.union(*(_arguments_of(kind) for kind in (*_OURS, *(pair.distributed for pair in _pairs.values()))))
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            raise ConfigError(f"{call}: there is no option `{name}`{f'; did you mean `{close[0]}`?' if close else ''}; it is an argument of no module that stands for "
                              "another one")
    return Mark(enabled, dict(options))


def _arguments_of(kind):
    return list(inspect.signature(kind.__init__).parameters)[1:]


def _check_arguments(what, hook, method):
    """Raises ConfigError: the arguments of a hook are not those of a method without `self`."""
    expected, found = list(inspect.signature(method).parameters.values())[1:], list(inspect.signature(hook).parameters.values())
    if [_plain(one) for one in expected] != [_plain(one) for one in found]:
        raise ConfigError(f"{what} has the arguments ({', '.join(map(_text, found))}); expected those of {method.__qualname__}(), ({', '.join(map(_text, expected))})")


def _plain(parameter):
    return parameter.name, parameter.kind, repr(parameter.default)


def _text(parameter):
    return str(parameter.replace(annotation=inspect.Parameter.empty))


def _shown(value):
    return value.__name__ if isinstance(value, type) else repr(value)
