#include "step/agreement.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "trireme/device/stream.h"
#include "trireme/intercept.h"

namespace trireme {

namespace {

/// The message that a rank sends.
struct Message {
  ExactSum squares;
  GradientFlags flags;
};

template <typename T>
at::Tensor bytes_of(T* messages, size_t count) {
  return at::from_blob(messages, {static_cast<int64_t>(count * sizeof(T))}, at::TensorOptions().dtype(at::kByte));
}

/// Everybody's, by rank, of which `mine` is this rank's.
template <typename T>
std::vector<T> gather(Group& group, T mine) {
  std::vector<T> all(group.size());
  all[group.rank()] = mine;
  if (group.size() > 1) group.all_gather(bytes_of(all.data(), all.size()), bytes_of(&mine, 1)).wait();
  return all;
}

/// To be called by ascending rank.
void add(Agreement& agreement, int rank, const GradientFlags& flags) {
  agreement.any_gradient |= flags.any_gradient;
  if (flags.misses_gradient && !agreement.missing_rank) agreement.missing_rank = rank;
}

GradientFlags flags_of(const Agreement& own) { return {own.any_gradient, own.missing_here.has_value()}; }

bool any(const std::vector<bool>& flags) { return std::find(flags.begin(), flags.end(), true) != flags.end(); }

}  // namespace

StepAgreement::StepAgreement(Group& model, const Pager& pager, bool is_larger)
    : model_(model), pager_(pager), is_larger_(is_larger), most_units_(static_cast<int64_t>(pager.owned().size())) {
  if (!is_larger || is_host(pager.device())) return;
  const WithoutInterception own_operators;
  const at::Tensor most = at::full({1}, most_units_, at::TensorOptions().dtype(at::kLong).device(pager.device()));
  model_.all_reduce(most, ReduceOp::kMax).wait();
  most_units_ = most.item<int64_t>();
}

Agreement StepAgreement::meet(ClosedWindow& window) const {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  Agreement agreement{.any_gradient = any(window.touched()), .missing_here = first_missing(window)};
  if (is_host(pager_.device())) {
    exchange_on_host(window, agreement);
  } else {
    exchange_flags(agreement);
    agreement.sum_of_squares = sum_on_device(window);
  }
  window.begin_update();
  return agreement;
}

void StepAgreement::exchange_on_host(const ClosedWindow& window, Agreement& agreement) const {
  const std::vector<Message> messages = gather(model_, Message{window.squares(), flags_of(agreement)});
  ExactSum sum;
  for (int rank = 0; rank < model_.size(); ++rank) {
    sum.add(messages[rank].squares);
    add(agreement, rank, messages[rank].flags);
  }
  agreement.sum_of_squares = at::scalar_tensor(sum.total(), at::kDouble);
}

// The hosts know the flags: a collective of theirs does not wait for what their devices still compute.
void StepAgreement::exchange_flags(Agreement& agreement) const {
  if (!is_larger_) return add(agreement, model_.rank(), flags_of(agreement));  // every rank has the same
  const std::vector<GradientFlags> flags = gather(model_, flags_of(agreement));
  for (int rank = 0; rank < model_.size(); ++rank) add(agreement, rank, flags[rank]);
}

at::Tensor StepAgreement::sum_on_device(const ClosedWindow& window) const {
  at::Tensor squares = window.squares_on_device();
  if (model_.size() == 1) return squares.sum();
  if (const int64_t missing = most_units_ - squares.numel(); missing > 0)
    squares = at::cat({squares, at::zeros({missing}, squares.options())});
  const at::Tensor all = at::empty({model_.size() * most_units_}, squares.options());
  model_.all_gather(all, squares).wait();
  return all.sum();
}

std::optional<int> StepAgreement::first_missing(const ClosedWindow& window) const {
  const std::vector<ParameterSpec>& parameters = pager_.parameters();
  for (size_t i = 0; i < parameters.size(); ++i)
    if (parameters[i].trainable && !window.touched()[i]) return static_cast<int>(i);
  return std::nullopt;
}

}  // namespace trireme
