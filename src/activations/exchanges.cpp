#include "trireme/activations/exchanges.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "activations/recut.h"
#include "trireme/base/error.h"
#include "trireme/intercept.h"
#include "trireme/intercept/program.h"

namespace trireme {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct Exchange final : torch::CustomClassHolder {
  Exchange(std::shared_ptr<AxisExchanges> exchanges, std::string what, Cut cut)
      : exchanges(std::move(exchanges)), what(std::move(what)), cut(std::move(cut)) {}
  Group& group() const { return exchanges->group(); }
  at::Tensor all_reduced(const at::Tensor& part, const char* pass, ReduceOp op = ReduceOp::kSum) const {
    return exchanges->all_reduce(part, str(what, pass), op);
  }
  std::shared_ptr<AxisExchanges> exchanges;
  std::string what;
  Cut cut;
};
using ExchangePointer = c10::intrusive_ptr<Exchange>;

ExchangePointer exchange(AxisExchanges& exchanges, const std::string& what, Cut cut = {}) {
  return c10::make_intrusive<Exchange>(exchanges.shared_from_this(), exchanges.named(what), std::move(cut));
}

ExchangePointer saved(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<Exchange>(context->saved_data["exchange"].toCapsule());
}

void save(AutogradContext* context, const ExchangePointer& exchange) {
  context->saved_data["exchange"] = c10::IValue::make_capsule(exchange);
}

/// Gradients of gradients would go through exchanges that do not know of them.
void refuse_graph(const Exchange& exchange) {
  if (!at::GradMode::is_enabled()) return;
  throw StateError(str("backward: create_graph=True through ", exchange.what,
                       " on parts of a tensor; gradients of gradients are not there with ",
                       exchange.exchanges->setting(), ", leave create_graph out or switch it off"));
}

constexpr size_t kMostEntries = 1 << 14;

constexpr const char* kForward = " in forward";
constexpr const char* kBackward = " in backward";

/// The dim as [.., outer, slices, ..].
at::Tensor unfolded(const at::Tensor& tensor, const Cut& cut, int64_t size) {
  return tensor.unflatten(cut.dim, {cut.outer, size});
}

at::Tensor all_gathered(const at::Tensor& slice, const Cut& cut, Group& group) {
  const Ranges& slices = *cut.ranges;
  std::vector<int64_t> sizes = slice.sizes().vec();
  int64_t most = 0, of_index = cut.outer;  // elements for each index of the ranges
  for (int rank = 0; rank < group.size(); ++rank) most = std::max(most, slices.local(rank));
  for (size_t dim = 0; dim < sizes.size(); ++dim) of_index *= static_cast<int64_t>(dim) == cut.dim ? 1 : sizes[dim];
  const int64_t numel = of_index * most;
  at::Tensor sent = slice.resolve_neg().resolve_conj().contiguous().flatten();  // as it stands in memory
  if (slice.numel() != numel) {
    const WithoutInterception own_operators;  // to the pass a copy of a slice into a whole tensor is one of all slices
    const at::Tensor padded = at::empty({numel}, slice.options());
    padded.narrow(0, 0, slice.numel()).copy_(sent);
    sent = padded;
  }
  const at::Tensor all = at::empty({group.size(), numel}, slice.options());
  group.all_gather(all.flatten(), sent.detach()).wait();
  sizes[static_cast<size_t>(cut.dim)] = cut.whole();
  const at::Tensor whole = at::empty(sizes, slice.options());
  const at::Tensor places = unfolded(whole, cut, slices.whole());
  for (int rank = 0; rank < group.size(); ++rank) {
    sizes[static_cast<size_t>(cut.dim)] = cut.local(rank);
    const int64_t local = slices.local(rank);
    const at::Tensor part = unfolded(all[rank].narrow(0, 0, of_index * local).view(sizes), cut, local);
    int64_t at = 0;
    for (const Interval& one : slices.of_rank(rank)) {
      places.narrow(cut.dim + 1, one.begin, one.size()).copy_(part.narrow(cut.dim + 1, at, one.size()));
      at += one.size();
    }
  }
  return whole;
}

/// The rows of each rank one behind the other, as long as the longest one.
at::Tensor reduce_scattered(const at::Tensor& part, const Cut& cut, Group& group) {
  if (cut.whole() == 0) return part.clone();
  int64_t most = 0;
  for (int rank = 0; rank < group.size(); ++rank) most = std::max(most, cut.local(rank));
  const int64_t row = part.numel() / cut.whole();
  at::Tensor sent = at::empty({group.size(), most * row}, part.options());
  std::vector<int64_t> sizes = part.sizes().vec();
  for (int rank = 0; rank < group.size(); ++rank) {
    const int64_t local = cut.local(rank);
    sizes[static_cast<size_t>(cut.dim)] = local;
    sent[rank].narrow(0, 0, local * row).view(sizes).copy_(slice_of(part, cut, rank));
    sent[rank].narrow(0, local * row, (most - local) * row).zero_();
  }
  const int64_t local = cut.local(group.rank());
  sizes[static_cast<size_t>(cut.dim)] = local;
  at::Tensor own = at::empty(sizes, part.options());  // no view, so that programs may write into it
  const at::Tensor received = local == most ? own.flatten() : at::empty({most * row}, part.options());
  group.reduce_scatter(received, sent.flatten()).wait();
  if (local != most) own.flatten().copy_(received.narrow(0, 0, local * row));
  return own;
}

struct Enter : Function<Enter> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& whole, const ExchangePointer& exchange) {
    save(context, exchange);
    return whole.view_as(whole);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const ExchangePointer of = saved(context);
    refuse_graph(*of);
    return {of->all_reduced(gradients[0], kBackward), {}};
  }
};

struct Sum : Function<Sum> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& part, const ExchangePointer& exchange) {
    save(context, exchange);
    return exchange->all_reduced(part, kForward);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_graph(*saved(context));
    return {gradients[0], {}};
  }
};

/// Each rank's gradient of the sum is a share, and each rank's part gets all of them.
struct SumOfShares : Function<SumOfShares> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& part, const ExchangePointer& exchange) {
    save(context, exchange);
    return exchange->all_reduced(part, kForward);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const ExchangePointer of = saved(context);
    refuse_graph(*of);
    return {of->all_reduced(gradients[0], kBackward), {}};
  }
};

struct SummedProduct : Function<SummedProduct> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& left, const at::Tensor& right, bool is_weight,
                            int64_t piece_rows, const ExchangePointer& exchange) {
    save(context, exchange);
    context->save_for_backward({left, right});
    context->saved_data["is_weight"] = is_weight;
    const auto part_of = [&](int64_t first, int64_t rows) {
      const at::Tensor piece = left.narrow(0, first, rows);
      return is_weight ? at::linear(piece, right) : at::matmul(piece, right);
    };
    return exchange->exchanges->all_reduce_rows(left.size(0), piece_rows, part_of, str(exchange->what, kForward));
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_graph(*saved(context));
    const variable_list factors = context->get_saved_variables();
    const ProgramScope local(ProgramScope::Whose::kOurs);
    const at::Tensor &left = factors[0], &right = factors[1], &gradient = gradients[0];
    const bool is_weight = context->saved_data["is_weight"].toBool();
    at::Tensor of_left, of_right;
    if (context->needs_input_grad(0)) of_left = gradient.matmul(is_weight ? right : right.t());
    if (context->needs_input_grad(1)) of_right = is_weight ? gradient.t().matmul(left) : left.t().matmul(gradient);
    return {of_left, of_right, {}, {}, {}};
  }
};

struct Scatter : Function<Scatter> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& part, const ExchangePointer& exchange) {
    save(context, exchange);
    return exchange->exchanges->reduce_scatter(part, exchange->cut, str(exchange->what, kForward));
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const ExchangePointer of = saved(context);
    refuse_graph(*of);
    return {of->exchanges->all_gather(gradients[0], of->cut, str(of->what, kBackward)), {}};
  }
};

struct GatherAndEnter : Function<GatherAndEnter> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& slice, const ExchangePointer& exchange) {
    save(context, exchange);
    return exchange->exchanges->all_gather(slice, exchange->cut, str(exchange->what, kForward));
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const ExchangePointer of = saved(context);
    refuse_graph(*of);
    return {of->exchanges->reduce_scatter(gradients[0], of->cut, str(of->what, kBackward)), {}};
  }
};

/// The gradient of an element goes to the first rank that has it: of shared ones each rank's is a part.
struct Gather : Function<Gather> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& slice, const ExchangePointer& exchange) {
    save(context, exchange);
    return exchange->exchanges->all_gather(slice, exchange->cut, str(exchange->what, kForward));
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const ExchangePointer of = saved(context);
    const int rank = of->group().rank();
    const Ranges& slices = *of->cut.ranges;
    at::Tensor own = slice_of(gradients[0], of->cut, rank);
    if (!slices.overlaps()) return {own, {}};
    const at::Tensor kept = at::zeros_like(own, at::MemoryFormat::Contiguous);
    const int64_t local = slices.local(rank);
    const at::Tensor to = unfolded(kept, of->cut, local), from = unfolded(own, of->cut, local);
    for (const Interval& one : slices.first_of(rank)) {
      const Interval at = slices.place_of(rank, {one.begin, one.end});
      to.narrow(of->cut.dim + 1, at.begin, at.size()).copy_(from.narrow(of->cut.dim + 1, at.begin, at.size()));
    }
    return {kept, {}};
  }
};

/// An element that several ranks have by `to` has a part of its gradient on each; of those that have it by `from`, the
/// others' copies were not used.
struct Recut : Function<Recut> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& part, const ExchangePointer& exchange,
                            const ExchangePointer& other) {
    save(context, exchange);
    context->saved_data["other"] = c10::IValue::make_capsule(other);
    return exchange->exchanges->all_to_all(part, exchange->cut, other->cut, /*adds=*/false,
                                           str(exchange->what, kForward));
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const ExchangePointer of = saved(context);
    refuse_graph(*of);
    const Cut& to = c10::static_intrusive_pointer_cast<Exchange>(context->saved_data["other"].toCapsule())->cut;
    return {of->exchanges->all_to_all(gradients[0], of->cut, to, /*adds=*/true, str(of->what, kBackward)), {}, {}};
  }
};

struct Share : Function<Share> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& slice, const ExchangePointer& exchange) {
    save(context, exchange);
    return slice.view_as(slice);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const ExchangePointer of = saved(context);
    const Cut& cut = of->cut;
    std::vector<int64_t> sizes = gradients[0].sizes().vec();
    sizes[static_cast<size_t>(cut.dim)] = cut.whole();
    const at::Tensor whole = at::zeros(sizes, gradients[0].options());
    const int rank = of->group().rank();
    const at::Tensor to = unfolded(whole, cut, cut.ranges->whole());
    const at::Tensor from = unfolded(gradients[0], cut, cut.ranges->local(rank));
    int64_t at = 0;
    for (const Interval& one : cut.ranges->of_rank(rank)) {
      to.narrow(cut.dim + 1, one.begin, one.size()).copy_(from.narrow(cut.dim + 1, at, one.size()));
      at += one.size();
    }
    const at::Tensor sum = of->all_reduced(whole, kBackward);
    return {slice_of(sum, cut, rank).contiguous(), {}};
  }
};

}  // namespace

at::Tensor slice_of(const at::Tensor& whole, const Cut& cut, int rank) {
  const std::vector<Interval>& own = cut.ranges->of_rank(rank);
  if (cut.outer == 1 && own.size() == 1) return whole.narrow(cut.dim, own[0].begin, own[0].size());
  if (own.empty()) return whole.narrow(cut.dim, 0, 0);
  const at::Tensor places = unfolded(whole, cut, cut.ranges->whole());
  std::vector<at::Tensor> parts;
  for (const Interval& one : own) parts.push_back(places.narrow(cut.dim + 1, one.begin, one.size()));
  return (parts.size() == 1 ? parts[0] : at::cat(parts, cut.dim + 1)).flatten(cut.dim, cut.dim + 1);
}

at::Tensor AxisExchanges::enter(const at::Tensor& whole, const std::string& what) {
  return law_ == GradientLaw::kWhole ? Enter::apply(whole, exchange(*this, what)) : whole;
}
at::Tensor AxisExchanges::sum(const at::Tensor& part, const std::string& what) {
  const ExchangePointer made = exchange(*this, what);
  return law_ == GradientLaw::kWhole ? Sum::apply(part, made) : SumOfShares::apply(part, made);
}
at::Tensor AxisExchanges::sum_product(const at::Tensor& left, const at::Tensor& right, bool is_weight,
                                      int64_t piece_rows, const std::string& what) {
  if (law_ != GradientLaw::kWhole) throw Error(ErrorCode::kInternal, "sum_product: of shares");
  return SummedProduct::apply(left, right, is_weight, piece_rows, exchange(*this, what));
}
at::Tensor AxisExchanges::gather(const at::Tensor& part, const Cut& cut, const std::string& what) {
  if (law_ == GradientLaw::kShares) return gather_and_enter(part, cut, what);
  return Gather::apply(part, exchange(*this, what, cut));
}
at::Tensor AxisExchanges::gather_and_enter(const at::Tensor& part, const Cut& cut, const std::string& what) {
  return GatherAndEnter::apply(part, exchange(*this, what, cut));
}
at::Tensor AxisExchanges::scatter(const at::Tensor& part, const Cut& cut, const std::string& what) {
  return Scatter::apply(part, exchange(*this, what, cut));
}
at::Tensor AxisExchanges::recut(const at::Tensor& part, const Cut& from, const Cut& to, const std::string& what) {
  if (from.ranges->is_whole_everywhere() || to.ranges->is_whole_everywhere())
    throw Error(ErrorCode::kInternal, str("recut: ", what, " of a tensor that every rank has whole"));
  return Recut::apply(part, exchange(*this, what, from), exchange(*this, what, to));
}
at::Tensor AxisExchanges::share(const at::Tensor& part, const Cut& cut, const std::string& what) {
  return Share::apply(part, exchange(*this, what, cut));
}

at::Tensor AxisExchanges::all_reduce(const at::Tensor& part, const std::string& what, ReduceOp op) {
  const at::NoGradGuard no_grad;  // else the copy, which is written here, counts as one that may be made again
  const at::Tensor result = counting(ExchangeWay::kSum, what, [&] {
    at::Tensor sum = part.clone(at::MemoryFormat::Contiguous);
    group_.all_reduce(sum, op).wait();
    return sum;
  });
  if (is_recording_) record(what, op == ReduceOp::kSum ? Kind::kSum : Kind::kAlike, part, result);
  return result;
}

at::Tensor AxisExchanges::all_reduce_rows(int64_t rows, int64_t piece_rows,
                                          const std::function<at::Tensor(int64_t, int64_t)>& part_of,
                                          const std::string& what) {
  at::Tensor sum, parts;
  std::vector<Pending<void>> pending;
  for (int64_t first = 0; first < rows; first += piece_rows) {
    const int64_t count = std::min(piece_rows, rows - first);
    const at::Tensor part = part_of(first, count);
    const WithoutInterception own_operators;
    if (!sum.defined()) {
      sum = at::empty({rows, part.size(1)}, part.options());
      if (is_recording_) parts = at::empty_like(sum);
    }
    const at::Tensor piece = sum.narrow(0, first, count).copy_(part);
    if (is_recording_) parts.narrow(0, first, count).copy_(part);
    pending.push_back(counting(ExchangeWay::kSum, what, [&] { return group_.all_reduce(piece); }));
  }
  for (Pending<void>& one : pending) one.wait();
  if (is_recording_) record(what, Kind::kSum, parts, sum);
  return sum;
}

at::Tensor AxisExchanges::all_gather(const at::Tensor& slice, const Cut& cut, const std::string& what) {
  const at::Tensor whole = counting(ExchangeWay::kGather, what, [&] { return all_gathered(slice, cut, group_); });
  if (is_recording_) record(what, Kind::kAlike, whole, whole);
  return whole;
}

at::Tensor AxisExchanges::reduce_scatter(const at::Tensor& part, const Cut& cut, const std::string& what) {
  at::Tensor own = counting(ExchangeWay::kScatter, what, [&] { return reduce_scattered(part, cut, group_); });
  if (is_recording_) record(what, Kind::kSumOfParts, part, own, cut);
  return own;
}

at::Tensor AxisExchanges::all_to_all(const at::Tensor& part, const Cut& from, const Cut& to, bool adds,
                                     const std::string& what) {
  const at::Tensor own = part.detach();
  at::Tensor result;
  {
    const WithoutInterception own_operators;  // to the pass a copy of a slice into a whole tensor is one of all slices
    result = counting(ExchangeWay::kRecut, what, [&] { return recut_blocks(own, from, to, adds, group_); });
  }
  if (is_recording_) record_moved(what, own, result, from, to, adds);
  return result;
}

std::string AxisExchanges::named(const std::string& what) const {
  return counts_ != nullptr && !counts_->parameter.empty() ? str(what, " of \"", counts_->parameter, "\"") : what;
}

void AxisExchanges::add_count(ExchangeWay way, std::string_view what, const CommCounters& before) {
  const CommCounters after = group_.counters();
  if (after.calls == before.calls) return;  // no element left its rank
  CommCounters& count = counts_->of[{std::string(what), way}];
  count.calls += after.calls - before.calls;
  count.bytes_sent += after.bytes_sent - before.bytes_sent;
}

std::vector<ExchangeRow> AxisExchanges::counted(const std::string& axis) const {
  std::vector<ExchangeRow> rows;
  if (counts_ == nullptr) return rows;
  for (const auto& [of, count] : counts_->of)
    rows.push_back(
        {.axis = axis, .what = of.first, .way = of.second, .exchanges = count.calls, .bytes_sent = count.bytes_sent});
  return rows;
}

/// The product of both with one number for each index of each dim: a vector of all elements would be as large as the
/// whole.
void AxisExchanges::record_moved(const std::string& what, const at::Tensor& part, const at::Tensor& result,
                                 const Cut& from, const Cut& to, bool adds) {
  if (entries_.size() == kMostEntries || !part.is_floating_point()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor sent = part.to(at::kDouble), got = result.to(at::kDouble);
  const WithoutInterception own_operators;
  const int rank = group_.rank();
  const auto number_of = [](const at::Tensor& index) { return index.to(at::kDouble).mul_(0.7).add_(0.3).sin_(); };
  const auto times = [](const Cut& cut) {
    const at::Tensor count = at::zeros({cut.whole()}, at::kDouble);
    for (int one = 0; one < cut.ranges->ranks(); ++one) {
      const at::Tensor index = cut.index_of(one);
      count.index_add_(0, index, at::ones({index.numel()}, at::kDouble));
    }
    return count;
  };
  const auto product = [&](const at::Tensor& tensor, const Cut& cut, bool is_sent) {
    if (tensor.numel() == 0) return 0.0;
    at::Tensor left = tensor;
    for (int64_t dim = tensor.dim() - 1; dim >= 0; --dim) {
      const at::Tensor index = dim == cut.dim ? cut.index_of(rank) : at::arange(tensor.size(dim), at::kLong);
      at::Tensor numbers = number_of(index);
      if (is_sent && dim == from.dim) {  // what the first rank has is sent, or what some rank is to get
        Cut first = from;
        std::vector<std::vector<Interval>> own;
        for (int one = 0; one < from.ranges->ranks(); ++one) own.push_back(from.ranges->first_of(one));
        first.ranges = std::make_shared<const Ranges>(from.ranges->whole(), std::move(own));
        const at::Tensor is_first = at::zeros({from.whole()}, at::kDouble);
        is_first.index_fill_(0, first.index_of(rank), 1);
        numbers.mul_((adds ? times(first) : is_first).index_select(0, index));
      }
      if (is_sent && !adds && dim == to.dim) numbers.mul_(times(to).index_select(0, index));
      left = left.reshape({-1, tensor.size(dim)}).mv(numbers.to(left.device()));
    }
    return left.sum().item<double>();
  };
  entries_.push_back({.what = what,
                      .part = product(sent, adds ? to : from, /*is_sent=*/true),
                      .result = product(got, adds ? from : to, /*is_sent=*/false),
                      .norm = got.norm().item<double>(),
                      .kind = Kind::kSumOfParts,
                      .dtype = result.scalar_type()});
}

void AxisExchanges::record(const std::string& what, Kind kind, const at::Tensor& part, const at::Tensor& result,
                           const Cut& cut) {
  if (entries_.size() == kMostEntries) return;
  const at::NoGradGuard no_grad;
  // Through the passes that follow: a parameter may have to be gathered first.
  const at::Tensor wide = result.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true).flatten();
  const WithoutInterception own_operators;
  const at::Tensor vector = at::arange(part.numel(), wide.options()).mul_(0.7).add_(0.3).sin_();
  const at::Tensor of_result =
      kind == Kind::kSumOfParts ? slice_of(vector.view(part.sizes()), cut, group_.rank()).flatten() : vector;
  entries_.push_back({.what = what,
                      .part = kind == Kind::kAlike ? 0 : part.to(at::kDouble).flatten().dot(vector).item<double>(),
                      .result = wide.dot(of_result).item<double>(),
                      .norm = wide.norm().item<double>(),
                      .kind = kind,
                      .dtype = result.scalar_type()});
}

std::string AxisExchanges::problem() {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  const at::Tensor count = at::full({1}, static_cast<int64_t>(entries_.size()), at::kLong);
  group_.all_reduce(count, ReduceOp::kMin).wait();
  const auto most = count.item<int64_t>();
  constexpr int64_t kNumbers = 3;
  at::Tensor own = at::zeros({most, kNumbers}, at::kDouble),
             all = at::empty({group_.size(), most, kNumbers}, at::kDouble);
  for (int64_t i = 0; i < most; ++i) {
    const Entry& entry = entries_[static_cast<size_t>(i)];
    own[i][0] = entry.part;
    own[i][1] = entry.result;
    own[i][2] = entry.norm;
  }
  if (most > 0) group_.all_gather(all.flatten(), own.flatten()).wait();
  std::string problem;
  for (int64_t i = 0; i < most && problem.empty(); ++i) {
    const Entry& entry = entries_[static_cast<size_t>(i)];
    const at::Tensor numbers = all.select(1, i);
    const double norm = numbers.select(1, 2).max().item<double>();
    if (!std::isfinite(norm)) continue;
    const at::Tensor expected = entry.kind == Kind::kAlike ? numbers[0][1] : numbers.select(1, 0).sum();
    const at::Tensor got = entry.kind == Kind::kSumOfParts ? numbers.select(1, 1).sum() : numbers.select(1, 1);
    const double apart = got.sub(expected).abs().max().item<double>();
    // Each rank's part is exact; the sum is rounded once to its dtype.
    const double tolerance = at::isFloatingType(entry.dtype) && c10::elementSize(entry.dtype) < 4 ? 2e-2 : 1e-4;
    if (apart > tolerance * norm + 1e-30)
      problem =
          str(entry.what, ": ",
              entry.kind == Kind::kAlike ? "ranks got other tensors" : "what ranks got is not the sum of their parts",
              ", ", apart, " of a norm of ", norm);
  }
  is_recording_ = false;
  entries_.clear();
  return problem;
}

}  // namespace trireme
