// Which dim of an activation runs along the sequence, of which each rank has some tokens.
//
// The main idea: a tensor is known by its storage, and within it by the distance from one token to the next. So a view
// is known without a rule: its dim of tokens is the one with that stride. A tensor that every rank can compute whole
// keeps its whole beside this rank's part.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "trireme/intercept/storage_table.h"

namespace trireme {

/// How many tokens each rank of a group has, in rank order: neighbouring ranks have neighbouring tokens, except tokens
/// that a mask selected.
struct TokenSplit {
  std::vector<int64_t> lengths;
  int rank = 0;

  int64_t local() const { return lengths[static_cast<size_t>(rank)]; }
  int64_t before(int rank) const;
  int64_t begin() const { return before(rank); }
  int64_t total() const { return before(static_cast<int>(lengths.size())); }
  bool is_first() const { return rank == 0; }
  bool is_last() const { return rank + 1 == static_cast<int>(lengths.size()); }
  /// Whether the two differ at most in the last rank's last tokens, as after a shift by one token.
  bool matches(const TokenSplit& other) const;
  /// This split with the last rank's length changed so that all lengths add up to `total`.
  TokenSplit with_total(int64_t total) const;
};

/// How a tensor is related to the tokens of the whole sequence.
struct Sharding {
  enum class Kind : uint8_t {
    kTokens,    ///< this rank's tokens along dims[0], in order
    kSelected,  ///< some of this rank's tokens along dims[0], in an order of their own
    kMerged,    ///< this rank's tokens, along no single dim: a view has merged part of the token dim into another one
    kWithin,    ///< as long as the whole along dims[0], but right at this rank's tokens alone
    kTotal,     ///< computed from all tokens, and the same on every rank
    kConstant,  ///< made by the program, with one value everywhere, so it is the same for all tokens
    kCounting,  ///< made by the program: 0, 1, 2, … along dims[0]
  };
  Kind kind = Kind::kTokens;
  std::shared_ptr<const TokenSplit> split;
  c10::SmallVector<int64_t, 2> dims = {};  ///< that run along tokens; two: queries by keys, only with `whole`
  /// The size of dims[0] is outer * tokens * inner, where other dims were flattened into it.
  int64_t outer = 1, inner = 1;
  at::Tensor whole = {};  ///< [as many dims]: the tensor of all tokens; undefined where it is not known
  /// The mask that selected the tokens (kSelected, or kMerged after a view). Tensors of the same mask have their tokens
  /// in the same order.
  at::Tensor selector = {};
  /// This rank's selected tokens, kept beside the tensor that the same mask selected from the whole.
  at::Tensor selected = {};
  /// Numbers of elements that a program may have counted, on this rank or another one, for a total.
  std::shared_ptr<const std::vector<double>> counts = nullptr;
  bool is_copy = false;  ///< a copy in place of a view of other ranks' tokens: a write into it would be lost

  bool has_tokens() const { return kind == Kind::kTokens || kind == Kind::kSelected; }
  /// Whether only the ranks together have all of it.
  bool is_sharded() const { return has_tokens() || kind == Kind::kMerged || kind == Kind::kWithin; }
  int64_t dim() const { return dims.empty() ? -1 : dims[0]; }
};

/// This rank's part of `whole`, a contiguous copy.
at::Tensor part_of(const at::Tensor& whole, const Sharding& sharding);

/// The sharding of each known tensor, by its storage and its place in it.
class ShardingTable {
 public:
  bool is_empty() const { return storages_.size() == 0; }
  /// Whether a tensor that still exists is sharded.
  bool has_sharded() const;
  /// The sharding of `tensor`; nothing if it was not computed from a sharded tensor.
  std::optional<Sharding> find(const at::Tensor& tensor);
  /// Records that `tensor` is sharded so; views of it follow.
  void add(const at::Tensor& tensor, const Sharding& sharding);
  /// To call after a write into `tensor`: it is no longer kConstant or kCounting.
  void forget_made(const at::Tensor& tensor);
  /// To call after a write into the storage of `whole`: updates the parts of it that still exist.
  void refresh(const at::Tensor& whole);

 private:
  /// Elements from one token to the next, in part of a storage.
  struct Layout {
    int64_t begin, end;  ///< elements of the storage
    Sharding::Kind kind;
    std::shared_ptr<const TokenSplit> split;
    c10::SmallVector<int64_t, 2> strides;
    int64_t tokens;
    at::Tensor selector, selected;
    std::shared_ptr<const std::vector<double>> counts;
    bool is_copy;
  };
  /// A tensor whose whole is known.
  struct Known {
    int64_t offset;
    std::vector<int64_t> sizes, strides;
    Sharding sharding;
  };
  struct Storage {
    std::vector<Layout> layouts;
    std::vector<Known> wholes;
  };

  static Sharding derive(const at::Tensor& tensor, const Layout& layout);

  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  StorageTable<Storage> storages_;
  StorageTable<std::vector<WeakTensor>> parts_;  // by the storage of their wholes
};

/// The dim of a view that tokens run along, where `stride` is the number of elements from one token to the next. Its
/// size is outer * tokens * inner. Nothing: a part of the token dim was merged into another dim.
struct TokenDim {
  int64_t dim, outer, inner;
};
std::optional<TokenDim> token_dim_of(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t stride, int64_t tokens);
inline std::optional<TokenDim> token_dim_of(const at::Tensor& view, int64_t stride, int64_t tokens) {
  return token_dim_of(view.sizes(), view.strides(), stride, tokens);
}

}  // namespace trireme
