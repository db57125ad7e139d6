// The meaning of an operator, as its factors: of which the dims of its arguments and results are made.
//
// The main idea: each dim is a product of factors, outermost first. A factor that an argument and a result have passes
// through; one that no result has is reduced, as its kind says. linear is [b s k] [n k] -> [b s n], where k sums; a
// view of (6, 4) as (2, 3, 4) is [(a b) c] -> [a b c]. Where ranks cut a dim, the factors say what each of them
// computes, and what it needs of others: once, for every axis. Pure: sizes and plain arguments in, a value out.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "trireme/base/tensor_part.h"

namespace trireme {

/// How the elements along a factor belong together.
enum class FactorKind : uint8_t {
  kEach,     ///< independent of each other
  kWhole,    ///< mixed along it: a rank needs all of them (softmax, sort, norms)
  kPlaces,   ///< another argument names elements of it; ranks add up what they have
  kSum,      ///< no result has it, as all others below: ranks join what they have computed by …
  kMean,     ///< … a mean that is weighted by how much of it each has
  kMaximum,  ///< (also where the results are integers or bool)
  kMinimum,
  kProduct,
  kAny,
  kAll,
};

struct Factor {
  int64_t size = 1;
  FactorKind kind = FactorKind::kEach;
};

/// The factors of a dim, outermost first; empty: a dim of size 1, which is never cut. One of size 1 that is a piece, or
/// is made of pieces, has a factor: ranks without its element must know it.
using DimFactors = c10::SmallVector<uint8_t, 2>;
using TensorFactors = c10::SmallVector<DimFactors, 5>;

/// A stretch of a factor of an argument that a factor of a result is made of.
struct Piece {
  static constexpr uint8_t kConstant = 255;  ///< of no argument: a pad, whose factor nothing else has
  uint8_t argument = 0;                      ///< index of the tensor among Row::arguments
  uint8_t factor = 0;
  int64_t begin = 0, end = 0;
  bool is_reversed = false;
  bool operator==(const Piece&) const = default;
};
/// A factor of a result that is made of pieces of others, in their order: slices, joins, shifts, reversals.
struct PiecedFactor {
  uint8_t factor = 0;
  std::vector<Piece> pieces;
};

struct Row {
  c10::SmallVector<Factor, 8> factors;
  c10::SmallVector<TensorFactors, 4> arguments;  ///< by tensor among the arguments; those of lists count one by one
  c10::SmallVector<TensorFactors, 2> results;    ///< by tensor among the results
  std::vector<PiecedFactor> pieces;
  uint64_t unread = 0;  ///< bit i: of argument i the call takes a dtype, a device or sizes, and no element
  /// Bit i: factor i follows from others, since a window moves along it: the input's places of a convolution, which the
  /// result's and the weight's name; of a transposed one the result's.
  uint64_t windowed = 0;
  int term = -1;  ///< the argument that is added once, behind a sum (a bias); -1: none

  /// A new factor.
  uint8_t add(int64_t size, FactorKind kind = FactorKind::kEach);
  /// A dim that is one new factor; of size 1: no factor.
  DimFactors dim(int64_t size, FactorKind kind = FactorKind::kEach);
  int64_t size_of(const DimFactors& dim) const;
  std::vector<int64_t> sizes_of(const TensorFactors& tensor) const;
  /// The multiply-adds of a product, a convolution.
  double multiply_adds() const;
  /// The pieces of a factor; null: it is not made of any.
  const std::vector<Piece>* pieces_of(uint8_t factor) const;
};

/// A call of an operator as its row is made of it: whole sizes and plain arguments, and no tensor's values.
class RowCall {
 public:
  /// `sizes`: of the wholes, by tensor among the arguments, those of lists one by one and an undefined one with none;
  /// as the tensors have them where it is left out.
  RowCall(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
          std::optional<std::vector<std::vector<int64_t>>> sizes = {});

  /// "add": without its namespace and overload.
  std::string_view name() const { return name_; }
  std::string_view overload() const { return overload_; }
  /// Number of tensors among the arguments, undefined ones too.
  size_t tensors() const { return sizes_.size(); }
  bool is_defined(size_t tensor) const { return defined_[tensor]; }
  at::IntArrayRef sizes(size_t tensor) const { return sizes_[tensor]; }
  int64_t dims(size_t tensor) const { return static_cast<int64_t>(sizes_[tensor].size()); }
  bool is_floating_point(size_t tensor) const { return floating_[tensor]; }
  /// Bytes of an element.
  int64_t itemsize(size_t tensor) const { return itemsizes_[tensor]; }
  /// Number of the first tensor of the argument of this name in the schema; nothing: there is none, or it is no tensor.
  std::optional<size_t> tensor_of(const char* name) const;

  /// The argument of this name; None if the schema has none.
  const c10::IValue& value(const char* name) const;
  /// Its index among the arguments; -1: the schema has none.
  int index_of(const char* name) const;
  /// As value(), or `otherwise` where it is None.
  int64_t integer(const char* name, int64_t otherwise) const;
  bool flag(const char* name, bool otherwise) const;
  /// A list of integers, or one integer; empty for None.
  std::vector<int64_t> integers(const char* name) const;
  /// `dim` of a tensor of `dims` dims, counted from the front.
  static int64_t wrapped(int64_t dim, int64_t dims) { return dim < 0 ? dim + std::max<int64_t>(dims, 1) : dim; }
  /// The dims that the argument of this name names, from the front, ascending; all where it names none.
  std::vector<int64_t> dims_named(const char* name, int64_t dims) const;
  const c10::OperatorHandle& op() const { return op_; }
  /// The same call without its tensors, for as long as one likes: sizes stay.
  RowCall kept() const;

 private:
  c10::OperatorHandle op_;
  c10::ArrayRef<c10::IValue> arguments_;
  std::shared_ptr<const std::vector<c10::IValue>> own_;  ///< of kept()
  std::string_view name_, overload_;
  std::vector<std::vector<int64_t>> sizes_;
  std::vector<bool> defined_, floating_;
  std::vector<int64_t> itemsizes_;
  std::vector<int> first_;  ///< by argument: number of its first tensor; -1: it has none
};

/// A row on one rank, some of whose factors are cut.
struct LocalRow {
  const Row* row = nullptr;
  c10::SmallVector<int64_t, 8> sizes;        ///< of the factors, here
  std::vector<PiecedFactor> pieces;          ///< in the arguments' local indices
  std::vector<std::vector<Interval>> owned;  ///< by factor: the whole's indices of its elements here, in their order

  explicit LocalRow(const Row& of);  ///< of all factors all
  int64_t size_of(const DimFactors& dim) const;
  std::vector<int64_t> sizes_of(const TensorFactors& tensor) const;
  bool is_cut(uint8_t factor) const { return sizes[factor] != row->factors[factor].size; }
  /// The whole's indices of a factor's elements here: [sizes[factor]], int64.
  at::Tensor positions(uint8_t factor) const;
  /// `places` in the whole as places here (0 where they are not), and whether they are here; both of its sizes.
  std::pair<at::Tensor, at::Tensor> find(uint8_t factor, const at::Tensor& places) const;
};

/// A call on one rank. Where Row::term is not among its arguments (None, undefined), it gives what it would add to.
struct LocalCall {
  std::vector<c10::IValue> arguments;  ///< tensors: this rank's parts; others as the program gave them
  /// Changes the results that the operator gives: zeroes what is not here; empty: it does not.
  std::function<void(std::vector<at::Tensor>& results)> mend = {};
  /// Runs in place of the operator; empty: the operator runs.
  std::function<std::vector<at::Tensor>(const std::vector<c10::IValue>& arguments)> run = {};
};

/// The elements of a result beside those of the first argument, where neither row nor schema tells.
enum class Elements : uint8_t {
  kComputed,  ///< others, or a view of them by the schema
  kAlias,     ///< the same, in the argument's memory (detach)
  kSame,      ///< the same: the argument itself or a view of it where that is possible, else a copy (to, reshape)
  kCopied,    ///< the same, in memory of their own (clone)
  kFresh,     ///< others, and none of the argument's is read, but sizes, dtype and device (zeros_like, fill_)
};

/// An entry of the table.
struct OperatorRow {
  Row (*row)(const RowCall& call) = nullptr;
  /// Gives arguments that mean the whole what they mean here (sizes, bounds, places); null: none does. Requires  a call
  /// of which `local.row` is the row.
  void (*localise)(const RowCall& call, const LocalRow& local, LocalCall& here) = nullptr;
  const char* family = "";
  /// Computes activations from what may come with a batch: products, norms, lookups in a table, attention.
  bool makes_activations = false;
  Elements elements = Elements::kComputed;
  bool is_each() const { return std::string_view(family) == "each"; }
  bool is_reduction() const { return std::string_view(family) == "reductions"; }
};

/// Whether a call writes a tensor of which its schema says nothing: the running statistics of a norm that is trained.
bool writes_statistics(const RowCall& call, size_t tensor);

/// The row of a view: of sizes of as many elements.
Row view_row(at::IntArrayRef from, at::IntArrayRef to);

/// The entry of an operator; null: it has none.
const OperatorRow* row_of(const c10::OperatorHandle& op);
/// A cache of row_of(), which looks names up. For one thread.
class OperatorRows {
 public:
  const OperatorRow* operator()(const c10::OperatorHandle& op) {
    if (const auto found = known_.find(op); found != known_.end()) return found->second;
    return known_.emplace(op, row_of(op)).first->second;
  }

 private:
  std::unordered_map<c10::OperatorHandle, const OperatorRow*> known_;
};

/// The meaning of an operator for tensors of one shape, no dim of which it names.
struct OperatorMeaning {
  bool is_each = false;     ///< an element of the result depends on the same elements of the arguments alone
  bool is_alias = false;    ///< the result is the first argument in another tensor
  bool reads_first = true;  ///< else it takes the first argument's sizes, dtype and device alone
  std::optional<FactorKind> reduction = {};  ///< the result is one number, to which those of parts are joined so
};
OperatorMeaning meaning_of(const c10::OperatorHandle& op);

/// All names that have an entry, ascending: "add", or "max.dim" where an overload has its own.
std::vector<std::string_view> names_with_rows();

}  // namespace trireme
