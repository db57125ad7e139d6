// Which dim of a tensor runs along the sequence.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "trireme/intercept/storage_table.h"

namespace trireme::sequence {

/// How a sequence is cut over the ranks.
struct Cut {
  std::vector<int64_t> lengths;  ///< tokens of each rank
  int rank = 0;

  int64_t local() const { return lengths[static_cast<size_t>(rank)]; }
  int64_t before(int rank) const;
  int64_t total() const { return before(static_cast<int>(lengths.size())); }
  bool is_last() const { return rank + 1 == static_cast<int>(lengths.size()); }
};

/// A storage that is cut, as the table has it.
struct CutStorage {
  std::shared_ptr<const Cut> cut;
  int64_t stride = 0;     ///< elements from a token to the next one; 0: of tokens, in an order that nobody knows
  at::Tensor next_token;  ///< of labels: the next rank's first ones, [B, 1]; undefined on the last rank
};

/// A tensor that is cut: the sequence runs along `dim`, alone or inside of other dims (a batch).
struct CutTensor {
  const CutStorage* storage;
  int64_t dim = -1;  ///< none: single tokens
};

class CutTable {
 public:
  bool is_empty() const { return storages_.size() == 0; }
  /// Nothing where `tensor` does not come from one that is cut.
  std::optional<CutTensor> find(const at::Tensor& tensor);
  /// `tensor` runs along the sequence in `dim`, -1: nobody knows. A storage that is known stays what it is.
  void add(const at::Tensor& tensor, const std::shared_ptr<const Cut>& cut, int64_t dim);
  void add(const at::Tensor& tensor, CutStorage storage);

 private:
  StorageTable<CutStorage> storages_;
};

}  // namespace trireme::sequence
