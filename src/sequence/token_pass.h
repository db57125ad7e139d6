// The pass that runs operators on this rank's tokens of a sequence, so that results are those of all tokens.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "trireme/activations/call_arguments.h"
#include "trireme/activations/sharding.h"
#include "trireme/comm/group.h"
#include "trireme/intercept.h"
#include "trireme/operators/rules.h"
#include "trireme/sequence/sequence_parallel.h"

namespace trireme::sequence {

/// An argument of an operator, or a tensor of a list among its arguments, that is sharded.
struct Found {
  size_t index;
  at::Tensor tensor;
  Sharding sharding;
};
using FoundArguments = std::vector<Found>;

/// Handlers by an operator's role. Each runs the operator in one of three ways, or refuses it by name:
///   on wholes: all arguments are known whole and no gradient is asked for; the result's part is a slice of the whole
///   result; on this rank's tokens: the result's are this rank's, too; on this rank's tokens, then over ranks:
///   attention, totals, the token that a program picks.
/// Each decision is by schemas, shapes and wholes, which are alike on all ranks.
class TokenPass : public Pass {
 public:
  TokenPass(Group& group, SequenceAttention attention);
  ~TokenPass() override;
  TokenPass(const TokenPass&) = delete;
  TokenPass& operator=(const TokenPass&) = delete;

  PassOrder order() const override { return PassOrder::kSequence; }
  void run(OperatorCall& call, Next next) override;

  at::Tensor cut(const at::Tensor& whole, int64_t dim);
  /// Nothing where `tensor` is not sharded, or on another thread than this pass's.
  std::optional<Sharding> find(const at::Tensor& tensor) {
    return std::this_thread::get_id() == thread_ ? table_.find(tensor) : std::nullopt;
  }
  bool has_cut() const { return has_cut_; }
  std::optional<std::vector<int64_t>> whole_sizes(const at::Tensor& tensor);
  void speak_of_wholes() { speaks_of_wholes_ = true; }
  /// From now on `part` is cut so.
  void mark(const at::Tensor& part, const Sharding& sharding);

 private:
  void find_arguments(const OperatorCall& call);
  void check_transform(const OperatorCall& call, const at::Tensor& tensor);
  [[noreturn]] void refuse_transform(const OperatorCall& call, const Found& part) const;
  void run_found(OperatorCall& call, Next next, FoundArguments found);
  void run_sharded(OperatorCall& call, Next next, FoundArguments found);
  void take_selected(OperatorCall& call, FoundArguments& found);
  void run_known(OperatorCall& call, Next next, const OperatorRule& rule, FoundArguments given);
  void run_opened(OperatorCall& call, Next next, const FoundArguments& found);
  void check_lengths(const OperatorCall& call, const Found& total) const;
  void check_made_by_length(const OperatorCall& call, const FoundArguments& found) const;
  void run_unsharded(OperatorCall& call, Next next, const FoundArguments& found);
  void run_new(OperatorCall& call, Next next);
  void run_factory(OperatorCall& call, Next next);

  // each.cpp
  void run_each(OperatorCall& call, Next next, const FoundArguments& found);
  void run_each_whole(OperatorCall& call, const FoundArguments& found);
  const Found& check_aligned(const OperatorCall& call, const FoundArguments& found) const;
  void check_unsharded(OperatorCall& call, const Found& lead);
  void run_find(OperatorCall& call, Next next, const FoundArguments& found);
  bool is_alike(const at::Tensor& other, int64_t dim);
  bool counts(const at::Tensor& other, int64_t dim);
  void run_cat(OperatorCall& call, Next next, const FoundArguments& found, bool is_stack);
  void run_triangle(OperatorCall& call, Next next, const FoundArguments& found);
  void run_pad(OperatorCall& call, Next next, const FoundArguments& found);
  void run_scan(OperatorCall& call, Next next, const FoundArguments& found);

  // views.cpp
  void run_view(OperatorCall& call, Next next, const FoundArguments& found);
  void run_copy(OperatorCall& call, Next next, const FoundArguments& found);
  void run_repeat(OperatorCall& call, Next next, const FoundArguments& found);
  void run_part(OperatorCall& call, Next next, const FoundArguments& found);
  void run_slice(OperatorCall& call, Next next, const Found& argument, int64_t dim);
  void run_select(OperatorCall& call, Next next, const Found& argument);
  at::Tensor token_at(const Found& argument, int64_t place);
  at::Tensor whole_view(const OperatorCall& call, const Found& argument, const at::Tensor& local) const;

  // wholes.cpp
  /// Whether sizes and places among the arguments are the whole's. Code of libtorch's own reads a part's.
  bool takes_wholes() const { return speaks_of_wholes_ && opened_.empty(); }
  /// Whether all ranks have the same numbers in a tensor that is found so, or is not sharded.
  bool is_of_all(const std::optional<Sharding>& sharding) const {
    return sharding ? sharding->kind == Sharding::Kind::kTotal : takes_wholes();
  }
  std::vector<int64_t> sizes_of(const Found& argument) const;
  void run_sized_view(OperatorCall& call, Next next, const Found& one);
  bool run_view_within(OperatorCall& call, Next next, const FoundArguments& found);
  void take_within(OperatorCall& call, Next next, FoundArguments& found);
  void run_written_within(OperatorCall& call, Next next, const Found& lead, const at::Tensor& written);
  FoundArguments cut_wholes(OperatorCall& call, Next next, OperatorRole role, FoundArguments found);
  at::Tensor own_tokens(const OperatorCall& call, Next next, const at::Tensor& whole, int64_t dim,
                        const Sharding& like);
  std::shared_ptr<const TokenSplit> selected_split(const Found& mask, int64_t selected);

  // totals.cpp
  void run_reduction(OperatorCall& call, Next next, const OperatorRule& rule, const FoundArguments& found);
  void run_class_loss(OperatorCall& call, Next next, const FoundArguments& found);
  void run_loss_of_total(OperatorCall& call, Next next, size_t reduction_at, const Found& like,
                         const std::function<at::Tensor(const at::TensorOptions& number)>& weight);
  void run_each_loss(OperatorCall& call, Next next, const FoundArguments& found);
  at::Tensor total(const at::Tensor& parts);
  at::Tensor total_sum(const at::Tensor& sum);
  at::Tensor total_mean(const at::Tensor& sum, const at::Tensor& count);
  /// In place of the arguments, and in place of the result of an operator that has run.
  void give_total(OperatorCall& call, const at::Tensor& result, const Found& argument);
  static std::shared_ptr<const std::vector<double>> counts_of(const Found& argument);
  void check_number(const OperatorCall& call, const FoundArguments& found);
  void replace_by_total(OperatorCall& call, const at::Tensor& result, const Found& argument);

  // products.cpp
  void run_product(OperatorCall& call, Next next, const FoundArguments& found);
  void run_convolution(OperatorCall& call, Next next, const FoundArguments& found);
  void run_lookup(OperatorCall& call, Next next, const FoundArguments& found);
  void run_norm(OperatorCall& call, Next next, const FoundArguments& found);
  void run_attention(OperatorCall& call, Next next);
  Sharding cut_queries(OperatorCall& call, Next next);
  at::Tensor whole_mask(const OperatorCall& call, const TokenSplit& queries, const TokenSplit* keys);
  void check_lost(const OperatorCall& call);

  // indices.cpp
  void run_index(OperatorCall& call, Next next, const FoundArguments& found);
  /// The arguments of an operator that takes elements of `tensor` at `places` in its dim `along`.
  struct ByPlaces {
    at::Tensor tensor, places;
    std::optional<Sharding> self = {}, of_places = {};
    bool has_self = false, has_places = false;
    int64_t along = 0;
  };
  ByPlaces by_places(const OperatorCall& call);
  void give_selected(OperatorCall& call, const at::Tensor& whole, int64_t dim, const FoundArguments& found);
  void run_select_index(OperatorCall& call, Next next, const FoundArguments& found);
  void run_gather(OperatorCall& call, Next next, const FoundArguments& found);
  void run_masked_select(OperatorCall& call, Next next, const FoundArguments& found);
  void run_nonzero(OperatorCall& call, Next next, const FoundArguments& found);
  void run_written(OperatorCall& call, const FoundArguments& found);
  void run_put(OperatorCall& call, Next next, const FoundArguments& found);
  void run_scatter(OperatorCall& call, Next next, const FoundArguments& found);
  void run_set(OperatorCall& call, const FoundArguments& found);
  void run_read(OperatorCall& call, const FoundArguments& found);
  void check_places(const OperatorCall& call, const Found& own, const at::Tensor& places);
  at::Tensor picked(const Found& argument, const at::Tensor& places, int64_t at,
                    const std::function<at::Tensor(const at::Tensor& local_places)>& pick);

  // Helpers of the handlers.
  /// Whether all that is sharded is known whole and no gradient is asked for.
  static bool is_whole(const OperatorCall& call, const FoundArguments& found);
  /// The results of the operator on `wholes` in place of its arguments, without a pass.
  static std::vector<c10::IValue> run_on(const OperatorCall& call, std::vector<c10::IValue> arguments);
  /// The arguments with the wholes of those that are sharded.
  std::vector<c10::IValue> whole_arguments(const OperatorCall& call, const FoundArguments& found) const;
  /// This rank's part of `whole`, whose tokens run along `dims` of it; the whole itself, as a total, where `dims` is
  /// empty.
  at::Tensor part(const at::Tensor& whole, const Sharding& like, c10::ArrayRef<int64_t> dims);
  void add(const at::Tensor& tensor, const Found& like, int64_t dim);
  template <class DimOf>
  void add_results(const OperatorCall& call, const Found& like, const DimOf& dim_of) {
    for_each_tensor(call.results(), [&](const at::Tensor& result) {
      if (result.defined()) add(result, like, dim_of(result));
    });
  }
  [[noreturn]] void refuse(const OperatorCall& call, const Found& argument, const std::string& reason,
                           const std::string& fix = {}) const;
  std::string name_of(const OperatorCall& call) const;

  Group& group_;
  const SequenceAttention attention_;
  const std::thread::id thread_ = std::this_thread::get_id();
  const c10::OperatorHandle attention_operator_;
  ShardingTable table_;
  OperatorRules rules_;
  std::vector<std::string> opened_;     // composite operators around the one that runs, outermost first
  std::map<int64_t, int64_t> lengths_;  // this rank's tokens of what has been cut, and all
  bool speaks_of_wholes_ = false;
  bool has_cut_ = false;
  bool has_tensors_ = false;  // the operator that is looked at
  FoundArguments found_;      // of the operator that is looked at
  InterceptScope scope_;
};

/// The mask of a new selection by `mask`.
at::Tensor selector_of(const Found& mask);
/// Whether two tensors of selected tokens have the same ones, in one order.
bool is_same_selection(const Sharding& one, const Sharding& other);
bool contains(c10::ArrayRef<int64_t> dims, int64_t dim);
/// Operators whose arguments are sizes, which a program computes from the lengths that it sees.
bool takes_sizes(const std::string& name);
bool expands(const std::string& name);
/// Broadcasting counts dims from the right.
inline int64_t from_right(const Found& argument) { return argument.tensor.dim() - argument.sharding.dim(); }
/// `tensor` of other sizes, by the operator `name` that takes them from another tensor (view_as, reshape_as,
/// expand_as).
at::Tensor of_sizes(const std::string& name, const at::Tensor& tensor, at::IntArrayRef sizes);
/// The same elements in a storage of their own, which keeps that of `tensor`: they are known as other tokens.
at::Tensor in_own_storage(const at::Tensor& tensor);

}  // namespace trireme::sequence
