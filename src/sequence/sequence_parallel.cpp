#include "trireme/sequence/sequence_parallel.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "sequence/attention.h"
#include "sequence/token_rules.h"
#include "trireme/base/error.h"
#include "trireme/intercept.h"
#include "trireme/recompute/tiled.h"

namespace trireme {
namespace {

using sequence::Cut;
using sequence::CutStorage;
using sequence::CutTable;
using sequence::CutTensor;
using sequence::TokenRule;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The sum over the ranks of a group, on every rank; the gradient is that of this rank's part.
struct AddOverRanks : torch::autograd::Function<AddOverRanks> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& part, int64_t group) {
    at::Tensor sum = part.clone();
    reinterpret_cast<Group*>(group)->all_reduce(sum).wait();
    return sum;
  }
  static variable_list backward(AutogradContext*, const variable_list& gradients) { return {gradients[0], {}}; }
};

void give(OperatorCall& call, at::Tensor result) {
  torch::jit::drop(call.stack, call.traits.arguments);
  call.stack.emplace_back(std::move(result));
}

bool contains(const std::vector<int64_t>& dims, int64_t dim) {
  return std::find(dims.begin(), dims.end(), dim) != dims.end();
}

}  // namespace

ShardRange sequence_range(int64_t tokens, int size, int rank) {
  return {.begin = tokens * rank / size, .end = tokens * (rank + 1) / size};
}

class SequenceParallel::Impl final : public Pass {
 public:
  Impl(Group& group, SequenceAttention attention)
      : group_(group), attention_(attention), scope_(InterceptScope::Watch::kWrites, this) {
    RankContext::of_this_thread().streams().set_slice(static_cast<uint64_t>(group.rank()) + 1);
  }
  ~Impl() override { RankContext::of_this_thread().streams().set_slice(0); }

  PassOrder order() const override { return PassOrder::kSequence; }

  at::Tensor cut(const at::Tensor& whole, int64_t dim, bool is_label) {
    const int64_t along = dim < 0 ? dim + whole.dim() : dim;
    auto cut = std::make_shared<Cut>();
    cut->rank = group_.rank();
    for (int rank = 0; rank < group_.size(); ++rank)
      cut->lengths.push_back(sequence_range(whole.size(along), group_.size(), rank).numel());
    if (*std::min_element(cut->lengths.begin(), cut->lengths.end()) < 2)
      throw ShapeError(str("cut: ", whole.sizes(), " has ", whole.size(along), " tokens in dim ", along,
                           ", fewer than two for each of ", group_.size(),
                           " ranks; use a longer sequence or fewer ranks"));
    const WithoutInterception guard;
    const int64_t begin = cut->before(cut->rank), end = begin + cut->local();
    const at::Tensor part = whole.narrow(along, begin, cut->local()).clone(at::MemoryFormat::Contiguous);
    const at::Tensor next = is_label && !cut->is_last() ? whole.narrow(along, end, 1).clone() : at::Tensor();
    table_.add(part, {.cut = cut, .stride = part.stride(along), .next_token = next});
    return part;
  }

  /// A mask without padding is none.
  void remember_padding(const at::Tensor& mask) {
    const WithoutInterception guard;
    padding_mask_ = mask.defined() && mask.eq(0).any().item<bool>() ? mask : at::Tensor();
  }

  void run(OperatorCall& call, Next next) override {
    const bool is_forward = torch::autograd::get_current_graph_task_id() == -1 || at::GradMode::is_enabled();
    if (!is_forward || table_.is_empty()) return next(call);
    find_cut_arguments(call);
    if (found_.empty()) return next(call);
    const std::vector<Found> arguments = std::exchange(found_, {});
    if (call.traits.random) call.stream = RandomStream::kSlice;
    run_on_cut(call, next, arguments);
  }

 private:
  /// An argument that is cut.
  struct Found {
    size_t index;
    at::Tensor tensor;
    CutTensor cut;
  };

  void find_cut_arguments(const OperatorCall& call) {
    found_.clear();
    for (size_t i = 0; i < call.traits.arguments; ++i)
      for_each_tensor(call.arguments().slice(i, 1), [&](const at::Tensor& tensor) {
        if (const auto cut = table_.find(tensor)) found_.push_back({i, tensor, *cut});
      });
  }

  void run_on_cut(OperatorCall& call, Next next, const std::vector<Found>& arguments) {
    const std::shared_ptr<const Cut> cut = arguments[0].cut.storage->cut;  // the table may move
    switch (rule_of(call.op)) {
      case TokenRule::kView:
        return run_view(call, next, arguments[0]);
      case TokenRule::kPart:
        return run_part(call, next, arguments[0]);
      case TokenRule::kAttention:
        return run_attention(call, next);
      case TokenRule::kLoss:
        return run_loss(call, next, arguments);
      case TokenRule::kPad:
        return run_pad(call, next, arguments[0]);
      case TokenRule::kTotal:
        if (is_total(call, arguments[0])) return run_total(call, next, arguments[0]);
        return run_each(call, next, arguments);
      case TokenRule::kProduct: {
        const int64_t dim = product_dim_of(call, arguments);
        next(call);
        return table_.add(call.results()[0].toTensor(), cut, dim);
      }
      case TokenRule::kLookup: {
        const int64_t dim = arguments[0].cut.dim;
        next(call);
        return table_.add(call.results()[0].toTensor(), cut, dim);
      }
      case TokenRule::kNorm:
        if (is_over(call, arguments[0])) refuse(call, arguments[0], "normalizes over tokens");
        return run_each(call, next, arguments);
      case TokenRule::kMixes:
        if (has_activations(arguments)) refuse(call, arguments[0], "mixes tokens");
        [[fallthrough]];
      case TokenRule::kEach:
        return run_each(call, next, arguments);
    }
  }

  TokenRule rule_of(const c10::OperatorHandle& op) {
    if (const auto found = rules_.find(op); found != rules_.end()) return found->second;
    return rules_.emplace(op, sequence::token_rule_of(op)).first->second;
  }

  [[noreturn]] void refuse(const OperatorCall& call, const Found& argument, const std::string& reason) const {
    throw StateError(
        str(call.op.schema().name(), " ", reason, " of ", argument.tensor.sizes(), ", of which rank ", group_.rank(),
            " of group '", group_.name(), "' has ", argument.cut.storage->cut->local(), " of ",
            argument.cut.storage->cut->total(), " tokens in dim ", argument.cut.dim,
            "; attention goes over the ranks as scaled_dot_product_attention (attn_implementation=\"sdpa\"), "
            "sums as sum(), mean() or cross_entropy()"));
  }

  /// A view needs no entry of its own; where libtorch has to copy instead, tokens keep their order.
  void run_view(OperatorCall& call, Next next, const Found& argument) {
    const std::shared_ptr<const Cut> cut = argument.cut.storage->cut;
    const int64_t dim = argument.cut.dim;
    next(call);
    for_each_tensor(call.results(), [&](const at::Tensor& result) {
      if (table_.find(result)) return;
      if (dim < 0 || result.sizes() == argument.tensor.sizes()) return table_.add(result, cut, dim);
      table_.add(
          result,
          {.cut = cut, .stride = c10::multiply_integers(argument.tensor.sizes().slice(dim + 1)), .next_token = {}});
    });
  }

  /// Positions, masks and labels are integers: what a program computes of them is looked at where activations meet it.
  static bool has_activations(const std::vector<Found>& arguments) {
    return std::any_of(arguments.begin(), arguments.end(), [](const Found& argument) {
      return argument.tensor.is_floating_point() && argument.cut.dim >= 0;
    });
  }

  /// Each token by itself.
  void run_each(OperatorCall& call, Next next, const std::vector<Found>& arguments) {
    const std::shared_ptr<const Cut> cut = arguments[0].cut.storage->cut;
    const Found* first = nullptr;  // with a known dim
    bool is_mixed = false;
    for (const Found& argument : arguments) {
      if (argument.cut.dim < 0) continue;
      if (first == nullptr) first = &argument;
      const bool is_named = contains(named_dims_of(call, argument), argument.cut.dim);
      if (is_named && argument.tensor.is_floating_point()) refuse(call, argument, "mixes tokens");
      is_mixed = is_mixed || is_named;
    }
    if (first == nullptr || is_mixed) {
      next(call);
      return add_results(call, cut, [](const at::Tensor&) { return -1; });
    }
    if (first->tensor.is_floating_point()) check_others(call, *first);
    const std::vector<int64_t> named = named_dims_of(call, *first);
    const Found argument = *first;
    const bool is_stack = call.op.schema().name() == "aten::stack";
    const bool is_float = argument.tensor.is_floating_point();
    next(call);
    add_results(call, cut, [&](const at::Tensor& result) -> int64_t {
      const int64_t dim = dim_in(result, argument, named, is_stack);
      if (dim < 0 && is_float && result.is_floating_point() && !is_selection(call))
        refuse(call, argument, "mixes tokens");
      return dim;
    });
  }

  /// index(): tokens that a router picks, one by one.
  static bool is_selection(const OperatorCall& call) {
    const std::string& name = call.op.schema().name();
    return name == "aten::index" || name == "aten::masked_select" || name == "aten::take_along_dim";
  }

  std::vector<int64_t> named_dims_of(const OperatorCall& call, const Found& argument) {
    const bool is_stack = call.op.schema().name() == "aten::stack";
    return sequence::named_dims(call, argument.tensor.dim() + is_stack);
  }

  /// Where the sequence runs in a result of operators on each token; -1: unknown.
  static int64_t dim_in(const at::Tensor& result, const Found& argument, const std::vector<int64_t>& named,
                        bool is_stack) {
    const int64_t dim = argument.cut.dim, size = argument.tensor.size(dim);
    const auto fits = [&](int64_t at) { return at >= 0 && at < result.dim() && result.size(at) == size ? at : -1; };
    if (is_stack) return fits(dim + (named.at(0) <= dim));
    if (result.dim() == argument.tensor.dim()) return fits(dim);
    if (result.dim() > argument.tensor.dim()) return fits(dim + result.dim() - argument.tensor.dim());  // broadcast
    return fits(dim - std::count_if(named.begin(), named.end(), [&](int64_t one) { return one < dim; }));
  }

  template <class DimOf>
  void add_results(const OperatorCall& call, const std::shared_ptr<const Cut>& cut, const DimOf& dim_of) {
    for_each_tensor(call.results(), [&](const at::Tensor& result) {
      if (result.defined() && result.numel() > 0) table_.add(result, cut, dim_of(result));
    });
  }

  /// A tensor of this rank's length that is not cut was made by the model itself: positions from 0 on every rank.
  void check_others(const OperatorCall& call, const Found& cut) {
    const int64_t from_right = cut.tensor.dim() - cut.cut.dim;
    if (cut.tensor.size(cut.cut.dim) != cut.cut.storage->cut->local()) return;
    for_each_tensor(call.arguments(), [&](const at::Tensor& other) {
      if (!other.defined() || other.dim() < from_right || table_.find(other)) return;
      if (call.traits.written != 0 || other.size(other.dim() - from_right) != cut.cut.storage->cut->local()) return;
      throw StateError(str(call.op.schema().name(), " joins ", cut.tensor.sizes(), ", which is cut along dim ",
                           cut.cut.dim, ", with ", other.sizes(),
                           ", which is not: its rows are those of the first rank everywhere. Cut it "
                           "by cut(), or give the model position_ids that are"));
    });
  }

  int64_t product_dim_of(const OperatorCall& call, const std::vector<Found>& arguments) {
    const std::string& name = call.op.schema().name();
    const size_t left = name == "aten::addmm" || name == "aten::baddbmm" ? 1 : 0;
    const auto dim_of = [&](size_t index) {
      for (const Found& argument : arguments)
        if (argument.index == index) return argument.cut.dim;
      return int64_t{-1};
    };
    const at::Tensor &a = call.arguments()[left].toTensor(), &b = call.arguments()[left + 1].toTensor();
    if (name == "aten::linear") {  // its weight is no activation, and lies the other way round
      if (dim_of(0) >= 0 && dim_of(0) == a.dim() - 1) refuse(call, arguments[0], "sums over tokens");
      return dim_of(0);
    }
    const auto dim = sequence::product_dim(a, dim_of(left), b, dim_of(left + 1));
    if (!dim) refuse(call, arguments[0], "sums over tokens, or pairs tokens with tokens,");
    return *dim;
  }

  static bool is_over(const OperatorCall& call, const Found& argument) {
    return argument.cut.dim >= argument.tensor.dim() - static_cast<int64_t>(call.arguments()[1].toIntVector().size());
  }

  // --- attention ---

  void run_attention(OperatorCall& call, Next next) {
    const auto find = [&](size_t index) { return table_.find(call.arguments()[index].toTensor()); };
    const auto query = find(0), key = find(1), value = find(2);
    if (!key && !value) {  // the queries are cut alone, and each attends to all keys
      if (call.arguments()[5].toBool())
        refuse(call, {0, call.arguments()[0].toTensor(), *query}, "is causal, with keys that are not cut,");
      const auto cut = query->storage->cut;
      next(call);
      return table_.add(call.results()[0].toTensor(), cut, call.results()[0].toTensor().dim() - 2);
    }
    for (size_t index = 0; index < 3; ++index) {
      const at::Tensor& tensor = call.arguments()[index].toTensor();
      const auto cut = find(index);
      if (!cut || cut->dim != tensor.dim() - 2 || tensor.dim() < 3 || tensor.size(-2) != cut->storage->cut->local())
        throw StateError(str(call.op.schema().name(),
                             ": query, key and value must be [..., heads, tokens, size] and cut along "
                             "their tokens; argument ",
                             index, " is ", tensor.sizes(),
                             cut ? str(" and cut along dim ", cut->dim) : std::string(" and not cut")));
    }
    const auto queries = query->storage->cut, keys = key->storage->cut;
    if (!padding_mask_.defined()) sequence::take_causality(call, *queries, *keys);
    if (attention_ == SequenceAttention::kRing)
      sequence::run_in_ring(call, next, *queries, *keys, group_);
    else
      sequence::run_by_heads(call, next, *queries, *keys, padding_mask_, group_);
    const at::Tensor result = call.results()[0].toTensor();
    table_.add(result, queries, result.dim() - 2);
  }

  // --- losses, sums and means ---

  at::Tensor total(const at::Tensor& parts) {
    return AddOverRanks::apply(parts.to(at::kDouble), reinterpret_cast<int64_t>(&group_));
  }

  at::Tensor total_sum(const at::Tensor& sum) { return total(sum).to(sum.scalar_type()); }

  at::Tensor total_mean(const at::Tensor& sum, const at::Tensor& count) {
    const at::Tensor both = total(at::stack({sum.to(at::kDouble), count.to(at::kDouble)}));
    return (both[0] / both[1]).to(sum.scalar_type());
  }

  void run_loss(OperatorCall& call, Next next, const std::vector<Found>& arguments) {
    const at::Tensor target = call.arguments()[1].toTensor(),
                     class_weight = call.arguments()[2].isTensor() ? call.arguments()[2].toTensor() : at::Tensor();
    const int64_t reduction = call.arguments()[3].toInt(), ignore_index = call.arguments()[4].toInt();
    if (!table_.find(call.arguments()[0].toTensor()) || !table_.find(target))
      refuse(call, arguments[0], "joins logits and targets, of which only one is cut,");
    if (reduction == at::Reduction::None) {
      const auto cut = arguments[0].cut.storage->cut;
      const auto of_target = table_.find(target);
      const int64_t dim = of_target->dim;
      next(call);
      return table_.add(call.results()[0].toTensor(), cut, dim);
    }
    call.stack[call.stack.size() - call.traits.arguments + 3] = int64_t{at::Reduction::Sum};
    next(call);
    const at::Tensor sum = call.stack.back().toTensor();
    call.stack.back() = next.run(call, [&] {
      return reduction == at::Reduction::Mean ? total_mean(sum, loss_weight(target, class_weight, ignore_index))
                                              : total_sum(sum);
    });
  }

  static bool is_total(const OperatorCall& call, const Found& argument) {
    if (!argument.tensor.is_floating_point()) return false;
    const std::vector<int64_t> dims = sequence::named_dims(call, argument.tensor.dim());
    return dims.empty() || (dims.size() == static_cast<size_t>(argument.tensor.dim()));
  }

  void run_total(OperatorCall& call, Next next, const Found& argument) {
    const bool is_mean = call.op.schema().name() == "aten::mean";
    const int64_t numel = argument.tensor.numel();
    next(call);
    const at::Tensor local = call.stack.back().toTensor();
    call.stack.back() = next.run(call, [&] {
      if (!is_mean) return total_sum(local);
      return total_mean(local * numel, at::full({}, numel, local.options().dtype(at::kDouble).requires_grad(false)));
    });
  }

  // --- labels that a model shifts ---

  void run_pad(OperatorCall& call, Next next, const Found& argument) {
    const std::vector<int64_t> pad = call.arguments()[1].toIntVector();
    const auto at = static_cast<size_t>(2 * (argument.tensor.dim() - 1 - argument.cut.dim));
    const auto cut = argument.cut.storage->cut;
    const int64_t dim = argument.cut.dim;
    if (dim < 0 || at >= pad.size() || (pad[at] == 0 && pad[at + 1] == 0)) return run_each(call, next, {argument});
    if (argument.tensor.is_floating_point() || pad[at] != 0 || pad[at + 1] != 1)
      refuse(call, argument, "adds tokens at the ends of a part");
    const at::Tensor following = argument.cut.storage->next_token;
    if (following.defined())
      give(call, next.run(call, [&] { return at::cat({argument.tensor, following}, dim); }));
    else
      next(call);
    table_.add(call.results()[0].toTensor(), cut, dim);
  }

  /// slice(), select(), split(): parts of other dims; of the sequence, all but its first or last token.
  void run_part(OperatorCall& call, Next next, const Found& argument) {
    const std::vector<int64_t> named = sequence::named_dims(call, argument.tensor.dim());
    const int64_t dim = argument.cut.dim;
    const std::string& name = call.op.schema().name();
    if (dim < 0 || (!named.empty() && named[0] != dim) || (named.empty() && name != "aten::as_strided"))
      return next(call);
    if (name == "aten::slice") {
      const int64_t length = argument.tensor.size(dim);
      const auto arguments = call.arguments();
      const int64_t begin = arguments[2].isInt() ? arguments[2].toInt() : 0;
      const int64_t end = arguments[3].isInt() ? arguments[3].toInt() : length;
      const Cut& cut = *argument.cut.storage->cut;
      const bool is_whole = begin == 0 && end >= length;
      if (is_whole) return next(call);
      if (argument.tensor.is_floating_point() && begin == 0 && end == -1) {
        if (cut.is_last()) return next(call);
        return give(call, at::Tensor(argument.tensor));
      }
      if (!argument.tensor.is_floating_point() && begin == 1 && end >= length && length == cut.local()) {
        const at::Tensor following = argument.cut.storage->next_token;
        if (!following.defined()) return next(call);
        const auto shared = argument.cut.storage->cut;
        give(call, next.run(call, [&] {
          return at::cat({argument.tensor.narrow(dim, 1, length - 1), following}, dim);
        }));
        return table_.add(call.results()[0].toTensor(), shared, dim);
      }
    }
    if (argument.tensor.is_floating_point()) refuse(call, argument, "takes a part of this rank's tokens");
    next(call);
  }

  Group& group_;
  const SequenceAttention attention_;
  CutTable table_;
  std::unordered_map<c10::OperatorHandle, TokenRule> rules_;
  at::Tensor padding_mask_;
  std::vector<Found> found_;  // of the operator that is looked at
  InterceptScope scope_;
};

SequenceParallel::SequenceParallel(Group& group, SequenceAttention attention)
    : impl_(std::make_unique<Impl>(group, attention)) {}

SequenceParallel::~SequenceParallel() = default;

at::Tensor SequenceParallel::cut(const at::Tensor& whole, int64_t dim) {
  return impl_->cut(whole, dim, /*is_label=*/false);
}

SequenceInputs SequenceParallel::cut(const SequenceInputs& whole) {
  SequenceInputs result{.dim = whole.dim};
  const auto part = [&](const at::Tensor& tensor, bool is_label = false) {
    return tensor.defined() ? impl_->cut(tensor, whole.dim, is_label) : tensor;
  };
  impl_->remember_padding(whole.attention_mask);
  result.input_ids = part(whole.input_ids);
  result.labels = part(whole.labels, /*is_label=*/true);
  result.position_ids = part(whole.position_ids);
  result.attention_mask = part(whole.attention_mask);
  return result;
}

}  // namespace trireme
