// The exchanges of ranks along an axis, with their adjoints under two laws of gradients.
//
// The main idea: one line decides all adjoints. Backward adds up over the ranks where the law is kWhole and a whole has
// entered or been taken, or where it is kShares and parts have been summed or gathered. Where ranks share elements,
// each has a part of their gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "trireme/activations/exchange_table.h"
#include "trireme/activations/placement.h"
#include "trireme/comm/group.h"

namespace trireme {

/// Gradients of a tensor that ranks along an axis have whole.
enum class GradientLaw : uint8_t {
  kWhole,   ///< each rank has all of it
  kShares,  ///< each has a share, as many times too large as there are ranks: each of them counts the loss once
};

/// With a record of exchanges until they are proved: of each sum the product with a fixed vector before and after,
/// which must add up over the ranks. `what`: the operator, for texts.
class AxisExchanges : public std::enable_shared_from_this<AxisExchanges> {
 public:
  /// `setting`: what switches the axis on, for texts.
  AxisExchanges(Group& group, GradientLaw law, std::string setting)
      : group_(group), law_(law), setting_(std::move(setting)) {}

  /// `whole`, from which each rank goes on to compute a part.
  at::Tensor enter(const at::Tensor& whole, const std::string& what);
  /// The sum of the ranks' parts of a sum, on every rank. Cost: one all-reduce.
  at::Tensor sum(const at::Tensor& part, const std::string& what);
  /// The sum of the ranks' products of `left` [rows, n] and `right`: [columns, n] of a layer's weight, else [n,
  /// columns]; so many rows at a time, whose all-reduce runs while the next ones are computed. Cost: as sum().
  ///
  /// Requires  kWhole.
  at::Tensor sum_product(const at::Tensor& left, const at::Tensor& right, bool is_weight, int64_t piece_rows,
                         const std::string& what);
  /// The tensor of which each rank has `part`, on every rank. Cost: one all-gather.
  at::Tensor gather(const at::Tensor& part, const Cut& cut, const std::string& what);
  /// enter(gather(part)). Cost: one all-gather; in backward one reduce-scatter.
  at::Tensor gather_and_enter(const at::Tensor& part, const Cut& cut, const std::string& what);
  /// This rank's part of the sum of the ranks' parts. Cost: one reduce-scatter; in backward one all-gather.
  at::Tensor scatter(const at::Tensor& part, const Cut& cut, const std::string& what);
  /// This rank's part by `to` of the tensor of which it has `part` by `from`, cut otherwise along the same dim or along
  /// another one. Elements that no rank has by `to` are left out, and get no gradient; of those that several ranks
  /// have, each gives a part of the gradient under both laws, and these add up on the first rank that has it by `from`.
  ///
  /// Requires  that neither gives every rank all elements: a gradient of wholes may be whole on each, and would count
  ///           several times.
  /// Cost      one all-to-all of blocks as large as the largest that leaves its rank; none where none does. So in
  ///           backward.
  at::Tensor recut(const at::Tensor& part, const Cut& from, const Cut& to, const std::string& what);
  /// `part` of a parameter, some elements of which other ranks have too, with a gradient to which all of them add.
  at::Tensor share(const at::Tensor& part, const Cut& cut, const std::string& what);

  GradientLaw law() const { return law_; }
  const std::string& setting() const { return setting_; }
  Group& group() const { return group_; }

  // Without gradients.
  at::Tensor all_reduce(const at::Tensor& part, const std::string& what, ReduceOp op = ReduceOp::kSum);
  /// The sum of the ranks' matrices of `rows` rows, `piece_rows` of which `part_of` computes at a time, given the first
  /// of them and how many. Each piece's all-reduce runs while the next piece is computed.
  at::Tensor all_reduce_rows(int64_t rows, int64_t piece_rows,
                             const std::function<at::Tensor(int64_t, int64_t)>& part_of, const std::string& what);
  at::Tensor all_gather(const at::Tensor& slice, const Cut& cut, const std::string& what);
  /// This rank's slice of the sum of the ranks' `part`, of which no two ranks have the same element.
  at::Tensor reduce_scatter(const at::Tensor& part, const Cut& cut, const std::string& what);
  /// As recut(); `adds`: the way back, from `to`, in which elements that several ranks have add up.
  at::Tensor all_to_all(const at::Tensor& part, const Cut& from, const Cut& to, bool adds, const std::string& what);
  /// `whole` is the same on every rank, or the record has a problem.
  void see(const at::Tensor& whole, const std::string& what) {
    if (is_recording_ && whole.is_floating_point()) record(what, Kind::kAlike, whole, whole);
  }
  /// From now on exchanges are counted by operator, or no longer; those so far are forgotten.
  void count(bool counts = true) { counts_ = counts ? std::make_unique<Counts>() : nullptr; }
  bool is_counting() const { return counts_ != nullptr; }
  /// `axis`: its name, for the rows.
  std::vector<ExchangeRow> counted(const std::string& axis) const;
  /// The parameter that the operator at hand computes with, for counts; "": none is known. Returns the one before.
  std::string set_parameter(std::string name) {
    return counts_ != nullptr ? std::exchange(counts_->parameter, std::move(name)) : std::string();
  }
  /// `what` with the parameter, while exchanges are counted.
  std::string named(const std::string& what) const;
  /// Calls `exchange`, which sends over the group for `what`.
  template <class Exchange>
  auto counting(ExchangeWay way, std::string_view what, const Exchange& exchange) {
    if (counts_ == nullptr) return exchange();
    const CommCounters before = group_.counters();
    auto result = exchange();
    add_count(way, what, before);
    return result;
  }
  /// No record is kept: nothing proves these exchanges.
  void forget_record() { is_recording_ = false; }
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
    at::ScalarType dtype;  ///< of the result
  };
  struct Counts {
    std::string parameter;
    std::map<std::pair<std::string, ExchangeWay>, CommCounters> of;  ///< by operator and way
  };
  void record(const std::string& what, Kind kind, const at::Tensor& part, const at::Tensor& result,
              const Cut& cut = {});
  void add_count(ExchangeWay way, std::string_view what, const CommCounters& before);
  void record_moved(const std::string& what, const at::Tensor& part, const at::Tensor& result, const Cut& from,
                    const Cut& to, bool adds);

  Group& group_;
  const GradientLaw law_;
  const std::string setting_;
  bool is_recording_ = true;
  std::unique_ptr<Counts> counts_;  // null: nobody asked
  std::vector<Entry> entries_;
};

/// This rank's slice of `whole`; a view where one interval of a dim is asked for. Local.
at::Tensor slice_of(const at::Tensor& whole, const Cut& cut, int rank);

}  // namespace trireme
