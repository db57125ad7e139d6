// Which dim of an activation runs along the sequence, of which each rank has some tokens.
//
// The main idea: a tensor is known by its storage, and within it by the distance from one token to the next. So a view
// is known without a rule: the token's digit is found among its strides. A tensor that every rank can compute whole
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

/// How many tokens each rank of a group has. Neighbours have neighbouring tokens, but for those that a mask selected.
struct TokenSplit {
  std::vector<int64_t> lengths;
  int rank = 0;

  int64_t local() const { return lengths[static_cast<size_t>(rank)]; }
  int64_t before(int rank) const;
  int64_t begin() const { return before(rank); }
  int64_t total() const { return before(static_cast<int>(lengths.size())); }
  bool is_first() const { return rank == 0; }
  bool is_last() const { return rank + 1 == static_cast<int>(lengths.size()); }
  /// The same tokens but for the last rank's last ones: where a shift by one token has left some out.
  bool matches(const TokenSplit& other) const;
  /// The split of `total` tokens that differs in the last rank's alone.
  TokenSplit with_total(int64_t total) const;
};

struct Sharding {
  enum class Kind : uint8_t {
    kTokens,    ///< this rank's tokens along dims[0], in order
    kSelected,  ///< some of this rank's tokens along dims[0], in an order of their own
    kMerged,    ///< this rank's tokens, in a dim that is not to be had: part of a token dim went into another one
    kWithin,    ///< as long as the whole along dims[0], and of it this rank's tokens alone are known
    kTotal,     ///< of all tokens, and the same on every rank
    kConstant,  ///< made by the program, with one value everywhere, so it is the same for all tokens
    kCounting,  ///< made by the program: 0, 1, 2, … along dims[0]
  };
  Kind kind = Kind::kTokens;
  std::shared_ptr<const TokenSplit> split;
  c10::SmallVector<int64_t, 2> dims = {};  ///< two: this rank's queries by its keys, only with `whole`
  /// The size of a single dim is outer * tokens * inner, since dims were flattened.
  int64_t outer = 1, inner = 1;
  at::Tensor whole = {};  ///< [as many dims]: the tensor of all tokens; undefined where it is not known
  /// The mask that took the tokens of kSelected, or of what a view has made kMerged of them. Those that one mask took
  /// are in one order.
  at::Tensor selector = {};
  /// This rank's selection (kSelected), beside a total that the same mask took of the whole.
  at::Tensor selected = {};
  /// Numbers of elements that a program may have counted, on this rank or another one, for a total.
  std::shared_ptr<const std::vector<double>> counts = nullptr;
  bool is_copy = false;  ///< stands for a view of other ranks' tokens: what is written into it would be lost

  bool has_tokens() const { return kind == Kind::kTokens || kind == Kind::kSelected; }
  /// Whether only ranks together have it.
  bool is_sharded() const { return has_tokens() || kind == Kind::kMerged || kind == Kind::kWithin; }
  int64_t dim() const { return dims.empty() ? -1 : dims[0]; }
};

/// This rank's part of `whole`, a contiguous copy.
at::Tensor part_of(const at::Tensor& whole, const Sharding& sharding);

class ShardingTable {
 public:
  bool is_empty() const { return storages_.size() == 0; }
  /// Whether some tensor that is still there is sharded.
  bool has_sharded() const;
  /// Nothing where `tensor` comes from nothing that is sharded.
  std::optional<Sharding> find(const at::Tensor& tensor);
  /// `tensor` is sharded so, and views of it accordingly.
  void add(const at::Tensor& tensor, const Sharding& sharding);
  /// After a write that makes a kConstant or kCounting tensor another one.
  void forget_made(const at::Tensor& tensor);
  /// After a write to the storage of `whole`: parts of it that are still there follow.
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

/// The dims of a view that tokens run along, from the elements between tokens of what it is a view of: [dim, outer,
/// inner]. Nothing: part of the token dim went into another one.
struct TokenDim {
  int64_t dim, outer, inner;
};
std::optional<TokenDim> token_dim_of(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t stride, int64_t tokens);
inline std::optional<TokenDim> token_dim_of(const at::Tensor& view, int64_t stride, int64_t tokens) {
  return token_dim_of(view.sizes(), view.strides(), stride, tokens);
}

}  // namespace trireme
