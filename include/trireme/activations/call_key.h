// The key by which decisions about a call of an operator are kept: the operator, its plain
// arguments, the sizes of its tensors, and what a pass adds (how they are cut). No tensor's values.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>

#include "trireme/intercept.h"

namespace trireme {

class CallKey {
 public:
  explicit CallKey(const OperatorCall& call);
  void add(int64_t word) { words_.push_back(word); }
  /// The address of an object that outlives the key.
  void add(const void* object) { words_.push_back(reinterpret_cast<int64_t>(object)); }
  /// False: some argument is not told by numbers, so that calls which differ may have one key.
  bool is_complete() const { return is_complete_; }
  bool operator==(const CallKey& other) const { return words_ == other.words_; }

  struct Hash {
    size_t operator()(const CallKey& key) const;
  };

 private:
  void add_value(const c10::IValue& value);
  void add_tensor(const at::Tensor& tensor);

  c10::SmallVector<int64_t, 48> words_;
  bool is_complete_ = true;
};

}  // namespace trireme
