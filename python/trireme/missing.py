"""Names that DeepSpeed has and this package has not yet: importable, and a NotImplementedError that names them where they are used.

A program often imports more than it uses, and asks isinstance() about the rest.
"""
import importlib.abc
import importlib.machinery
import sys
import types

from .errors import UnsupportedError

# Packages of DeepSpeed without a counterpart here: whatever is imported from them is a stub.
_PACKAGES = frozenset("""
    autotuning compile compile.passes compile.passes.sp_compile compression compression.compress datastates elasticity inference
    inference.engine inference.v2 io linear model_implementations module_inject moe moe.layer moe.utils moe.sharded_moe
    monitor monitor.monitor nebula nvme pipe profiling profiling.flops_profiler ops.op_builder ops.transformer ops.sparse_attention
    ops.fp_quantizer ops.aio runtime.bf16_optimizer runtime.fp16 runtime.fp16.loss_scaler runtime.fp16.fused_optimizer
    runtime.fp16.onebit runtime.fp16.onebit.adam runtime.fp16.onebit.lamb runtime.fp16.onebit.zoadam
    runtime.hybrid_engine
    runtime.pipe runtime.pipe.module runtime.pipe.engine runtime.pipe.topology runtime.swap_tensor runtime.progressive_layer_drop
    runtime.zero.stage3 runtime.zero.stage_1_and_2 runtime.zero.tiling runtime.zero.config runtime.zero.offload_config
    runtime.zero.mics runtime.zero.parameter_offload runtime.data_pipeline runtime.domino runtime.eigenvalue
    runtime.sequence_parallel runtime.sequence_parallel.ulysses_sp runtime.tensor_parallel sequence sequence.layer
    sequence.fpdt_layer sequence.cross_entropy utils.timer
""".split())


def _refuse(name):
    raise UnsupportedError(f"{name} is not there yet in Trireme; docs/python.md lists what is")


class _Stub(type):
    """A class that may be named, asked about and inherited from; anything else raises."""

    def __call__(cls, *args, **kwargs):
        _refuse(cls.__qualname__)

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"{cls.__qualname__}.{name}")


def stub(module, name):
    """What stands for `name` of a module."""
    dotted = f"{module.replace('trireme', 'deepspeed', 1)}.{name}"
    return _Stub(name, (), {"__qualname__": dotted, "__module__": module, "__doc__": f"{dotted}: not there yet."})


def names_of(module, names):
    """A module's `__getattr__`: stubs for `names`, an AttributeError for others."""
    known, made = frozenset(names.split()), {}

    def find(name):
        if name not in known:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        return made.setdefault(name, stub(module, name))

    return find


class _StubModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = stub(self.__name__, name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Of the packages that are not there; after those that are."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[2] in _PACKAGES and fullname.startswith("trireme."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StubModule(spec.name, f"{spec.name}: not there yet.")

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
