// The exchanges of a tensor group, with their gradients.
//
// Two laws: a tensor that every rank has whole has its whole gradient on every rank, the same; a slice has the gradient
// of its own elements. Where ranks share elements, each has a part of their gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tensor/slices.h"
#include "trireme/comm/group.h"

namespace trireme::tensor {

/// The exchanges of a group, with a record until they are proved: of each sum the product with a fixed vector before
/// and after, which must add up over the ranks.
class Exchanges {
 public:
  explicit Exchanges(Group& group) : group_(group) {}

  Group& group() const { return group_; }
  /// `what`: the operator, for texts.
  at::Tensor all_reduce(const at::Tensor& part, const std::string& what, ReduceOp op = ReduceOp::kSum);
  /// The sum of the ranks' matrices of `rows` rows, `piece_rows` of which `part_of` computes at a time, given the first
  /// of them and how many. Each piece's all-reduce runs while the next piece is computed.
  at::Tensor all_reduce_rows(int64_t rows, int64_t piece_rows,
                             const std::function<at::Tensor(int64_t, int64_t)>& part_of, const std::string& what);
  at::Tensor all_gather(const at::Tensor& slice, const Cut& cut, const std::string& what);
  /// This rank's slice of the sum of the ranks' `part`, of which no two ranks have the same element.
  at::Tensor reduce_scatter(const at::Tensor& part, const Cut& cut, const std::string& what);
  /// `whole` is the same on every rank, or the record has a problem.
  void see(const at::Tensor& whole, const std::string& what) {
    if (is_recording_ && whole.is_floating_point()) record(what, Kind::kAlike, whole, whole);
  }
  /// The first exchange of the record whose result is not that of all ranks' parts, "" without one; ends the record.
  /// Collective.
  std::string problem();

 private:
  enum class Kind : uint8_t {
    kSum,         ///< every rank has the sum of the parts
    kSumOfParts,  ///< the ranks together have it
    kAlike,       ///< every rank has the same
  };
  struct Entry {
    std::string what;
    double part, result, norm;
    Kind kind;
    double tolerance;
  };
  void record(const std::string& what, Kind kind, const at::Tensor& part, const at::Tensor& result,
              const Cut& cut = {});

  Group& group_;
  bool is_recording_ = true;
  std::vector<Entry> entries_;
};
using SharedExchanges = std::shared_ptr<Exchanges>;

/// `whole`, from which each rank goes on to compute a part: its gradient is the sum of the ranks'.
at::Tensor entered(const at::Tensor& whole, const SharedExchanges& exchanges, const std::string& what);
/// The sum of the ranks' parts of a sum, on every rank. Cost: one all-reduce.
at::Tensor summed(const at::Tensor& part, const SharedExchanges& exchanges, const std::string& what);
/// The sum of the ranks' products of `left` [rows, n] and `right`: [columns, n] of a layer's weight, else [n, columns];
/// so many rows at a time, whose all-reduce runs while the next ones are computed. Cost: as summed().
at::Tensor summed_product(const at::Tensor& left, const at::Tensor& right, bool is_weight, int64_t piece_rows,
                          const SharedExchanges& exchanges, const std::string& what);
/// The tensor of which each rank has `slice`, on every rank. Cost: one all-gather.
at::Tensor gathered(const at::Tensor& slice, const Cut& cut, const SharedExchanges& exchanges, const std::string& what);
/// This rank's slice of the sum of the ranks' parts. Cost: one reduce-scatter; in backward one all-gather.
at::Tensor scattered(const at::Tensor& part, const Cut& cut, const SharedExchanges& exchanges, const std::string& what);
/// entered(gathered(slice)). Cost: one all-gather; in backward one reduce-scatter.
at::Tensor gathered_and_entered(const at::Tensor& slice, const Cut& cut, const SharedExchanges& exchanges,
                                const std::string& what);
/// `slice` of a parameter, some elements of which other ranks have too, with a gradient to which all of them add.
at::Tensor shared(const at::Tensor& slice, const Cut& cut, const SharedExchanges& exchanges, const std::string& what);

/// This rank's slice of `whole`; a view where one interval of a dim is asked for. Local.
at::Tensor slice_of(const at::Tensor& whole, const Cut& cut, int rank);

/// Cross entropy [N] of `logits` [N, C], of which each rank has columns of C, beside `targets` [N] over all of C: 0
/// where a target is `ignored`.
///
/// Cost      three numbers for each of N, and the greatest logit; logits are not gathered.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets, const Cut& cut, int64_t ignored,
                         double label_smoothing, const SharedExchanges& exchanges);

}  // namespace trireme::tensor
