"""Modules under more than one name, the same module objects: trireme.zero is trireme.deepspeed.zero, and so is
trireme.runtime.zero, as DeepSpeed calls it, too."""
import sys

from ..aliases import AliasFinder

# Modules that lie in this folder, and are found in the package `trireme` itself.
_HERE = frozenset("accelerator checkpoint checkpointing comm git_version_info launcher monitor ops pipe profiling runtime utils zero".split())

# DeepSpeed's longer names, and the module of this folder that each is. The modules of missing.py are found after these.
_LONGER = {
    "accelerator.abstract_accelerator": "accelerator",
    "accelerator.cpu_accelerator": "accelerator",
    "accelerator.cuda_accelerator": "accelerator",
    "accelerator.real_accelerator": "accelerator",
    "checkpoint.utils": "checkpoint",
    "comm.comm": "comm",
    "compile.passes.sp_compile": "autosp",
    "constants": "comm",
    "git_version_info_installed": "git_version_info",
    "module_inject.layers": "autotp",
    "ops.adagrad.cpu_adagrad": "ops.adagrad",
    "ops.adam.cpu_adam": "ops.adam",
    "ops.adam.fused_adam": "ops.adam",
    "ops.lamb.fused_lamb": "ops.lamb",
    "ops.lion.cpu_lion": "ops.lion",
    "ops.lion.fused_lion": "ops.lion",
    "runtime.activation_checkpointing": "checkpointing",
    "runtime.activation_checkpointing.checkpointing": "checkpointing",
    "runtime.base_optimizer": "runtime",
    "runtime.config_utils": "runtime.sections",
    "runtime.dataloader": "utils.programs",
    "runtime.precision_config": "runtime.sections",
    "runtime.tensor_parallel": "autotp",
    "runtime.tensor_parallel.config": "autotp",
    "runtime.tensor_parallel.init_utils": "autotp",
    "runtime.zero": "zero",
    "runtime.zero.config": "runtime.sections",
    "runtime.zero.leaf_module_config": "runtime.sections",
    "runtime.zero.mics": "zero",
    "runtime.zero.muon": "ops.muon",
    "runtime.zero.muon.muon_optimizer": "ops.muon",
    "runtime.zero.offload_config": "runtime.sections",
    "runtime.zero.partition_parameters": "zero",
    "runtime.zero.stage3": "zero",
    "runtime.zero.stage_1_and_2": "zero",
    "runtime.zero.utils": "zero",
    "utils.bwc": "utils.groups",
    "utils.init_on_device": "utils.programs",
    "utils.nvtx": "utils.programs",
    "utils.tensor_fragment": "utils",
    "utils.z3_leaf_module": "utils.leaf_modules",
    "zero.partition_parameters": "zero",
}
# Names that modules of the other rooms had.
_MOVED = {"sequences.wholes": "activations.wholes"}
_BUILDERS = "ops.op_builder"  # every module in it is this one


def real_name(name):
    """The module of this folder that has the longer name; None: the name is no longer one."""
    return _BUILDERS if name.startswith(_BUILDERS + ".") else _LONGER.get(name)


def deepspeeds_name(module):
    """DeepSpeed's name of a module, "trireme.zero" or "trireme.deepspeed.zero", without "deepspeed."."""
    return module.removeprefix("trireme").removeprefix(".deepspeed").removeprefix(".")


def _of_this_package(fullname):
    if not fullname.startswith("trireme."):
        return None
    name = fullname.removeprefix("trireme.")
    if name in _MOVED:
        return f"trireme.{_MOVED[name]}"
    real = real_name(name) or (name if name.partition(".")[0] in _HERE else None)
    return real and f"trireme.deepspeed.{real}"


# Before the finder of files, which would find trireme.runtime.utils in the folder of trireme.runtime, and make a second
# module of it.
sys.meta_path.insert(0, AliasFinder(_of_this_package))
