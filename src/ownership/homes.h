// Which stage runs an operator.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <optional>
#include <string>

#include "trireme/intercept.h"
#include "trireme/operators/rules.h"
#include "trireme/ownership/home.h"

namespace trireme::ownership {

/// Facts of an operator that decide where it runs and what the other stages have to be told.
struct OperatorFacts {
  std::string name;             ///< with its overload
  uint64_t hash = 0;            ///< of the name: the same in every process
  bool is_each = false;         ///< element by element (OperatorRole::kEach)
  bool reads_nothing = false;   ///< OperatorRole::kNone
  bool gives_values = false;    ///< its results are numbers, not tensors: a program reads a value
  int view_of = -1;             ///< the argument of which the result is a view, by the schema
  uint64_t written = 0;         ///< as OperatorTraits::written, and what is written without the schema saying so
  bool tells_each = false;      ///< the sizes of results depend on values
  bool tells_by_index = false;  ///< they do where an index is a mask
  int range_from = -1;          ///< the first argument in which the range of a view is, as values
};
OperatorFacts facts_of(const OperatorCall& call);

/// An argument of an operator, or a tensor of a list among its arguments, that has a home.
struct HomedArgument {
  size_t argument = 0;                 ///< index among the arguments
  size_t item = 0;                     ///< in its list, else 0
  const at::Tensor* tensor = nullptr;  ///< where the arguments have it, until one of them is replaced
  Home home = {};
};
struct HomedArguments : c10::SmallVector<HomedArgument, 4> {
  bool has_others = false;  ///< a tensor among the arguments has no home
};

/// The home of each storage that has one on this stage: by its RemoteStorage, or by a table.
class Homes {
 public:
  void set(const c10::Storage& storage, const Home& home);
  /// Null: it has none.
  const Home* find(const at::Tensor& tensor);
  HomedArguments arguments_of(const OperatorCall& call);
  /// Drops the homes of storages that are gone.
  void sweep();

 private:
  /// Keeps the storage's address from being used again.
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    Home home;
  };
  struct Hash {
    using hash_policy = ska::fibonacci_hash_policy;
    size_t operator()(const c10::StorageImpl* storage) const { return reinterpret_cast<uintptr_t>(storage) >> 4; }
  };
  static constexpr size_t kSweepAt = 512;
  ska::flat_hash_map<const c10::StorageImpl*, Entry, Hash>
      table_;  // a StorageTable is slower by half of an operator's cost
  size_t sweep_at_ = kSweepAt;
};

/// The stage that runs a call with these arguments, by the first rule that holds; nothing: every stage runs it.
/// `entered`: the stage of the module that the call is in, where activations are computed without parameters.
/// Throws    Error(kUnsupported): it writes tensors of two stages; it cuts a view by values of another tensor.
std::optional<Home> home_of(const OperatorFacts& facts, const HomedArguments& arguments,
                            std::optional<int> entered = {});

}  // namespace trireme::ownership
