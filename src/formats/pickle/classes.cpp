#include "trireme/formats/pickle/classes.h"

#include <array>
#include <utility>

#include "trireme/base/error.h"

namespace trireme::pickle {
namespace {

struct DtypeNames {
  at::ScalarType dtype;
  const char* storage;
  const char* name;
};

constexpr std::array kDtypes{
    DtypeNames{at::kFloat, "torch.FloatStorage", "torch.float32"},
    DtypeNames{at::kDouble, "torch.DoubleStorage", "torch.float64"},
    DtypeNames{at::kHalf, "torch.HalfStorage", "torch.float16"},
    DtypeNames{at::kBFloat16, "torch.BFloat16Storage", "torch.bfloat16"},
    DtypeNames{at::kLong, "torch.LongStorage", "torch.int64"},
    DtypeNames{at::kInt, "torch.IntStorage", "torch.int32"},
    DtypeNames{at::kShort, "torch.ShortStorage", "torch.int16"},
    DtypeNames{at::kChar, "torch.CharStorage", "torch.int8"},
    DtypeNames{at::kByte, "torch.ByteStorage", "torch.uint8"},
    DtypeNames{at::kBool, "torch.BoolStorage", "torch.bool"},
    DtypeNames{at::kComplexFloat, "torch.ComplexFloatStorage", "torch.complex64"},
    DtypeNames{at::kComplexDouble, "torch.ComplexDoubleStorage", "torch.complex128"},
};

constexpr std::array<std::pair<std::string_view, Role>, 50> kClasses{{
    {"collections.OrderedDict", Role::kOrderedDict},
    {"collections.defaultdict", Role::kDefaultDict},
    {"builtins.set", Role::kSet},
    {"__builtin__.set", Role::kSet},
    {"builtins.frozenset", Role::kSet},
    {"__builtin__.frozenset", Role::kSet},
    {"builtins.bytearray", Role::kBytes},
    {"__builtin__.bytearray", Role::kBytes},
    {"__builtin__.bytes", Role::kBytes},
    {"_codecs.encode", Role::kEncode},
    {"builtins.getattr", Role::kMember},
    // Objects that users keep beside their training state.
    {"argparse.Namespace", Role::kObject},
    {"builtins.complex", Role::kObject},
    {"builtins.list", Role::kObject},
    {"builtins.dict", Role::kObject},
    {"builtins.int", Role::kObject},
    {"builtins.float", Role::kObject},
    {"pathlib.PosixPath", Role::kObject},
    {"numpy.dtype", Role::kObject},
    {"numpy.ndarray", Role::kObject},
    {"numpy.core.multiarray._reconstruct", Role::kObject},
    {"numpy._core.multiarray._reconstruct", Role::kObject},
    {"numpy.core.multiarray.scalar", Role::kObject},
    {"numpy._core.multiarray.scalar", Role::kObject},
    // torch.save()
    {"torch.Size", Role::kSize},
    {"torch.device", Role::kObject},
    {"torch.Tensor", Role::kObject},
    {"torch.nn.parameter.Parameter", Role::kObject},
    {"torch._utils._rebuild_tensor_v2", Role::kRebuildTensor},
    {"torch._utils._rebuild_tensor_v3", Role::kRebuildTensor3},
    {"torch._utils._rebuild_parameter", Role::kRebuildParameter},
    {"torch._utils._rebuild_parameter_with_state", Role::kRebuildParameter},
    {"torch._tensor._rebuild_from_type_v2", Role::kRebuildFromType},
    {"torch.storage.UntypedStorage", Role::kStorage},
    // torch.distributed.checkpoint
    {"torch.distributed.checkpoint.metadata.Metadata", Role::kObject},
    {"torch.distributed.checkpoint.metadata.MetadataIndex", Role::kObject},
    {"torch.distributed.checkpoint.metadata.TensorStorageMetadata", Role::kObject},
    {"torch.distributed.checkpoint.metadata.BytesStorageMetadata", Role::kObject},
    {"torch.distributed.checkpoint.metadata.ChunkStorageMetadata", Role::kObject},
    {"torch.distributed.checkpoint.metadata.TensorProperties", Role::kObject},
    {"torch.distributed.checkpoint.metadata.StorageMeta", Role::kObject},
    {"torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING", Role::kObject},
    {"torch.distributed.checkpoint.filesystem._StorageInfo", Role::kObject},
    {"torch.serialization._get_layout", Role::kObject},
    {"pathlib._local.PosixPath", Role::kObject},
    // DeepSpeed's own, of an optimizer's file
    {"deepspeed.runtime.fp16.loss_scaler.LossScaler", Role::kObject},
    {"deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler", Role::kObject},
    {"deepspeed.runtime.zero.config.ZeroStageEnum", Role::kObject},
    {"deepspeed.utils.tensor_fragment.fragment_address", Role::kObject},
    {"deepspeed.checkpoint.universal_checkpoint.SubparamShape", Role::kObject},
}};

const DtypeNames& names_of(at::ScalarType dtype) {
  for (const DtypeNames& entry : kDtypes)
    if (entry.dtype == dtype) return entry;
  throw CheckpointError(str("torch.save() has no storage for ", dtype, "; convert the tensor to another dtype"));
}

}  // namespace

std::optional<ClassEntry> find_class(std::string_view name) {
  for (const auto& [known, role] : kClasses) {
    if (known != name) continue;
    // An untyped storage counts bytes.
    return ClassEntry{role, role == Role::kStorage ? std::optional(at::kByte) : std::nullopt};
  }
  for (const DtypeNames& entry : kDtypes) {
    if (name == entry.storage) return ClassEntry{Role::kStorage, entry.dtype};
    if (name == entry.name) return ClassEntry{Role::kDtype, entry.dtype};
  }
  return std::nullopt;
}

std::string storage_class(at::ScalarType dtype) { return names_of(dtype).storage; }
std::string dtype_class(at::ScalarType dtype) { return names_of(dtype).name; }

}  // namespace trireme::pickle
