"""Logging, groups, and what training holds of single parameters."""
from ..missing import names_of
from . import groups, leaf_modules, zero_to_fp32
from .leaf_modules import (get_z3_leaf_modules, set_z3_leaf_module, set_z3_leaf_modules, set_z3_leaf_modules_by_name,
                           set_z3_leaf_modules_by_suffix, unset_z3_leaf_modules, z3_leaf_module, z3_leaf_parameter)
from .logging import log_dist, log_dist_once, logger, print_rank_0, set_log_level_from_string, warning_once
from .parameters import (safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state, safe_get_local_fp32_param,
                         safe_get_local_grad, safe_get_local_optimizer_state, safe_set_full_fp32_param, safe_set_full_grad,
                         safe_set_full_optimizer_state, safe_set_local_fp32_param, safe_set_local_grad,
                         safe_set_local_optimizer_state, safe_update_full_grad_vectorized)
from .programs import OnDevice, RepeatingLoader, instrument_w_nvtx

# No module but `groups`: a program that imports all of them has names of its own, such as `config`.
__all__ = ["OnDevice", "RepeatingLoader", "get_z3_leaf_modules", "groups", "instrument_w_nvtx", "is_initialized", "log_dist", "log_dist_once", "logger", "print_rank_0",
           "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state", "safe_get_local_fp32_param", "safe_get_local_grad",
           "safe_get_local_optimizer_state", "safe_set_full_fp32_param", "safe_set_full_grad", "safe_set_full_optimizer_state", "safe_set_local_fp32_param",
           "safe_set_local_grad", "safe_set_local_optimizer_state", "safe_update_full_grad_vectorized", "set_log_level_from_string", "set_z3_leaf_module",
           "set_z3_leaf_modules", "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix", "unset_z3_leaf_modules", "warning_once", "z3_leaf_module",
           "z3_leaf_parameter"]
__getattr__ = names_of(__name__)


def is_initialized():
    """Whether init_distributed() was called, as comm.is_initialized()."""
    from .. import comm  # which logs by this package  # pylint: disable=import-outside-toplevel
    return comm.is_initialized()
