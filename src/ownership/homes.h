// Which stage runs an operator.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "trireme/intercept.h"
#include "trireme/operators/rules.h"
#include "trireme/ownership/home.h"

namespace trireme::ownership {

class CutTensors;

/// The memory of a tensor; null: it has none. Of a part it is that of this rank's elements.
const c10::StorageImpl* storage_of(const at::Tensor& tensor);

/// Facts of an operator that decide where it runs and what the other stages have to be told.
struct OperatorFacts {
  std::string name;             ///< with its overload
  uint64_t hash = 0;            ///< of the name: the same in every process
  bool is_each = false;         ///< element by element (OperatorRole::kEach)
  bool reads_nothing = false;   ///< OperatorRole::kNone
  bool gives_values = false;    ///< its results are numbers, not tensors: a program reads a value
  int view_of = -1;             ///< the argument of which the result is a view, by the schema
  bool always_views = false;    ///< `view_of`, whatever strides it has
  uint64_t written = 0;         ///< as OperatorTraits::written, and what is written without the schema saying so
  bool tells_each = false;      ///< the sizes of results depend on values
  bool tells_by_index = false;  ///< they do where an index is a mask
  uint64_t statistics = 0;      ///< of `written` those that a norm writes while it is trained alone
  int draws_unless = -1;        ///< it draws no random numbers where this argument is false or 0; a norm is not trained
  size_t results = 0;           ///< how many
  bool is_numbers = false;      ///< numbers_of()
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
  /// Throws    Error(kUnsupported): it stands for a tensor with a home in a transform of torch.func.
  const Home* find(const at::Tensor& tensor);
  HomedArguments arguments_of(const OperatorCall& call);

 private:
  /// Keeps the storage's address from being used again, but not its bytes.
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    Home home;
  };
  /// By storage, each at the first free place from its hash on: an entry of a StorageTable is an allocation.
  std::vector<std::optional<Entry>> table_{64};
  size_t size_ = 0;
  size_t hand_ = 0;  ///< where the next dead storage is looked for

  void refuse_transformed(const at::Tensor& tensor);
  size_t place_of(const c10::StorageImpl* storage) const;
  const c10::StorageImpl* at(size_t place) const;
  size_t after(size_t place) const { return (place + 1) & (table_.size() - 1); }
  size_t first_place_of(const c10::StorageImpl* storage) const;
  void drop_dead(int looks);
  void erase(size_t place);
  void grow();
};

/// The stage that runs a call with these arguments, by the first rule that holds; nothing: every stage runs it.
/// `entered`: the stage of the module that the call is in, where activations are computed without parameters.
/// `cut`: where ranks share layers.
/// Throws    Error(kUnsupported): it writes tensors of two stages; it cuts a view by values of another tensor.
std::optional<Home> home_of(const OperatorFacts& facts, const HomedArguments& arguments,
                            std::optional<int> entered = {}, const CutTensors* cut = nullptr);

}  // namespace trireme::ownership
