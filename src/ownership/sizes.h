// Sizes of results, which the stage that runs an operator tells the others, and the key by which they find them again.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "trireme/intercept.h"

namespace trireme::ownership {

class CutTensors;

/// One tensor among the results of a call, as it is told.
struct ToldTensor {
  at::DimVector sizes = {}, strides = {};
  at::ScalarType dtype = at::kFloat;
  bool is_defined = true;
  bool requires_grad = false;
  bool is_conjugated = false, is_negated = false;  ///< the lazy bits of views of complex numbers
  uint64_t cut = 0;                                ///< how ranks that share layers have cut it: CutTensors::cut_of()
  int is_argument = -1;                            ///< it is this one of the tensors among the arguments
  int shares_with = -1;                            ///< it is another tensor over this one's memory
  bool is_all = false;                             ///< and is all of that one, as CutTensors tell places apart
  bool operator==(const ToldTensor&) const = default;
};

/// The results of a call, as they are told.
struct ToldCall {
  struct Return {
    bool is_list = false;
    c10::SmallVector<ToldTensor, 1> tensors = {};
    bool operator==(const Return&) const = default;
  };
  c10::SmallVector<Return, 1> returns = {};
  bool operator==(const ToldCall&) const = default;

  /// Whether all results are views of arguments, so that the operator needs no numbers.
  bool is_view() const;
  /// "[2, 16] of strides [16, 1] in float", by result.
  std::string text() const;
};

/// 128 bits of an operator, of what it was called with, numbers in tensors aside, and of the state that it depends on
/// (gradients, autocast). Equal on all stages for equal calls.
struct Key {
  uint64_t first = 0, second = 0;
  bool operator==(const Key&) const = default;
};
struct KeyHash {
  size_t operator()(const Key& key) const { return key.first; }
};
/// Told calls by their keys.
class ToldCalls {
 public:
  /// Null: nothing was told.
  const ToldCall* find(const Key& key) const {
    const auto found = calls_.find(key);
    return found != calls_.end() ? found->second.get() : nullptr;
  }
  const ToldCall& add(const Key& key, ToldCall told) {
    return *calls_.emplace(key, std::make_unique<ToldCall>(std::move(told))).first->second;
  }

 private:
  ska::flat_hash_map<Key, std::unique_ptr<const ToldCall>, KeyHash> calls_;
};

/// `operator_hash`: of its name, the same in every process. `is_complete` gets false where an argument is of a kind
/// that cannot be part of a key. `cut`: where ranks share layers.
Key key_of(uint64_t operator_hash, c10::ArrayRef<c10::IValue> arguments, bool& is_complete,
           const CutTensors* cut = nullptr);

/// The tensors among the arguments of a call, those in lists included, by their numbers: what its results are compared
/// with when the arguments are gone.
class ArgumentTensors {
 public:
  explicit ArgumentTensors(c10::ArrayRef<c10::IValue> arguments, const CutTensors* cut = nullptr);
  /// Whether `result`, which shares memory with the tensor of this number, lies as that one does.
  bool is_all_of(int number, const at::Tensor& result) const;
  /// The numbers of the one that `result` is, and of the one whose memory it shares; -1: none. Not both.
  std::pair<int, int> relation_of(const at::Tensor& result) const;

 private:
  c10::SmallVector<std::pair<const c10::TensorImpl*, const c10::StorageImpl*>, 8> tensors_;
  const CutTensors* const cut_;
  c10::SmallVector<uint64_t, 4> places_;  ///< where ranks share layers
  c10::SmallVector<at::Tensor, 2> kept_;  ///< those that nobody else has: another one could get their address
};

/// The results to be told of a call with `arguments`, as the program gave them, that had `results`.
/// Throws    Error(kUnsupported) that names `op`: a result without a storage, such as a sparse one.
ToldCall told_of(const std::string& op, const ArgumentTensors& arguments, c10::ArrayRef<c10::IValue> results,
                 const CutTensors* cut = nullptr);

/// Whether `told` describes `results`. As told_of(), without making anything.
bool holds(const ToldCall& told, const ArgumentTensors& arguments, c10::ArrayRef<c10::IValue> results,
           const CutTensors* cut = nullptr);

/// As bytes, and back. Throws CommError(kDiverged): other bytes.
std::string bytes_of(const ToldCall& told);
ToldCall told_from(const std::string& bytes);

}  // namespace trireme::ownership
