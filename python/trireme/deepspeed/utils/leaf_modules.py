"""Modules whose parameters are gathered together: those that use different submodules on different ranks (experts).

A mark on a module object, read by initialize().
"""
from ..missing import names_of

__getattr__ = names_of(__name__)
_MARK = "_z3_leaf"


def z3_leaf_module(model):
    """Whether a module is marked."""
    return bool(getattr(model, _MARK, False))


def z3_leaf_parameter(model):
    """Whether a parameter is in a marked module: not known from the parameter alone, as DeepSpeed's mark on it is not
    made here."""
    return getattr(model, "ds_z3_leaf_module", None) is not None


def get_z3_leaf_modules(model):
    """Those of `model` that are marked."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model, flag):
    """Marks one module, or takes its mark away."""
    setattr(model, _MARK, bool(flag))


def _named(module, wanted):
    kind = type(module)
    names = {cls.__name__ for cls in kind.__mro__} | {f"{cls.__module__}.{cls.__qualname__}" for cls in kind.__mro__}
    return any(name in names for name in wanted if isinstance(name, str)) or \
        isinstance(module, tuple(cls for cls in wanted if isinstance(cls, type)))


def _set_by_class(model, classes, flag, raise_if_not_found):
    classes = [classes] if isinstance(classes, (str, type)) else list(classes)
    for wanted in classes:
        if not isinstance(wanted, (str, type)):
            raise TypeError(f"expected a class or its name, got {type(wanted).__name__}")
    found = [module for module in model.modules() if _named(module, classes)]
    for module in found:
        set_z3_leaf_module(module, flag)
    if not found and raise_if_not_found:
        raise ValueError(f"No modules of type {classes} found in model {type(model).__name__}")
    return found


def set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found=True):
    """Marks the modules of these classes (or class names, bare or dotted), and returns them. Raises ValueError: none is
    found."""
    return _set_by_class(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found=True):
    """The reverse of set_z3_leaf_modules()."""
    return _set_by_class(model, leaf_module_classes, False, raise_if_not_found)


def _set_by(model, wanted, matches, flag, raise_if_not_found):
    wanted = [wanted] if isinstance(wanted, str) else list(wanted)
    found, missing = [], []
    for name in wanted:
        modules = [module for path, module in model.named_modules() if matches(path, name)]
        found += modules
        if not modules:
            missing.append(name)
    for module in found:
        set_z3_leaf_module(module, flag)
    if missing and raise_if_not_found:
        raise ValueError(f"No modules named {missing} found in model {type(model).__name__}")
    return found, missing


def set_z3_leaf_modules_by_name(model, module_names, flag=True, raise_if_not_found=True):
    """Marks modules by their names in named_modules(); returns (modules, names without one). Raises ValueError: there
    are such."""
    return _set_by(model, module_names, lambda path, name: path == name, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(model, module_name_suffixes, flag=True, raise_if_not_found=True):
    """The same by how names end."""
    return _set_by(model, module_name_suffixes, lambda path, name: path.endswith(name), flag, raise_if_not_found)
