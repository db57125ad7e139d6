// The classes and functions that a pickle may name, and what becomes of them.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <string_view>

namespace trireme::pickle {

/// The meaning of a class or function in a pickle.
enum class Role {
  kObject,            ///< stays an object: class, arguments, state
  kOrderedDict,       ///< a dict that keeps its class's name
  kDefaultDict,       ///< a dict; the factory of missing values is dropped
  kSize,              ///< a tuple that keeps its class's name
  kSet,               ///< a set
  kBytes,             ///< bytes(…), bytearray(…)
  kEncode,            ///< _codecs.encode: how protocol 2 writes bytes
  kRebuildTensor,     ///< _rebuild_tensor_v2
  kRebuildTensor3,    ///< _rebuild_tensor_v3
  kRebuildParameter,  ///< the tensor it is given
  kRebuildFromType,   ///< calls another one of these
  kMember,            ///< getattr(an enum, a name), as Python 3.11.0 to 3.11.3 write an enum's member: stays an object
  kStorage,           ///< the class of a storage, which says the dtype
  kDtype,             ///< torch.float32, …
};

/// A row of the table of classes.
struct ClassEntry {
  Role role = Role::kObject;
  std::optional<at::ScalarType> dtype;  ///< kStorage, kDtype
};

/// `name` as "module.name"; nullopt: it may not stand in a pickle.
std::optional<ClassEntry> find_class(std::string_view name);

/// "torch.FloatStorage"; throws CheckpointError for dtypes that torch.save() has no storage class for.
std::string storage_class(at::ScalarType dtype);
/// "torch.float32". Throws likewise.
std::string dtype_class(at::ScalarType dtype);

}  // namespace trireme::pickle
