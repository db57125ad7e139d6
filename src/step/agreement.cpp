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

/// What a rank sends.
struct Message {
  ExactSum squares;
  bool any_gradient = false;
  bool misses_gradient = false;
};

at::Tensor bytes_of(Message* messages, size_t count) {
  return at::from_blob(messages, {static_cast<int64_t>(count * sizeof(Message))}, at::TensorOptions().dtype(at::kByte));
}

bool any(const std::vector<bool>& flags) { return std::find(flags.begin(), flags.end(), true) != flags.end(); }

}  // namespace

StepAgreement::StepAgreement(Group& model, const Pager& pager, bool is_larger)
    : model_(model), pager_(pager), most_units_(static_cast<int64_t>(pager.owned().size())) {
  if (!is_larger || is_host(pager.device())) return;
  const WithoutInterception own_operators;
  const at::Tensor most = at::full({1}, most_units_, at::TensorOptions().dtype(at::kLong).device(pager.device()));
  model_.all_reduce(most, ReduceOp::kMax).wait();
  most_units_ = most.item<int64_t>();
}

Agreement StepAgreement::meet(ClosedWindow& window) const {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  Agreement agreement;
  if (is_host(pager_.device())) {
    agreement = meet_on_host(window);
  } else {
    agreement = {.sum_of_squares = sum_on_device(window),
                 .any_gradient = any(window.touched()),
                 .missing_here = first_missing(window)};
    if (agreement.missing_here) agreement.missing_rank = model_.rank();
  }
  window.begin_update();
  return agreement;
}

Agreement StepAgreement::meet_on_host(const ClosedWindow& window) const {
  std::vector<Message> messages(model_.size());
  Message& mine = messages[model_.rank()];
  Agreement agreement{.missing_here = first_missing(window)};
  mine = {.squares = window.squares(),
          .any_gradient = any(window.touched()),
          .misses_gradient = agreement.missing_here.has_value()};
  if (model_.size() > 1) model_.all_gather(bytes_of(messages.data(), messages.size()), bytes_of(&mine, 1)).wait();
  ExactSum sum;
  for (int rank = 0; rank < model_.size(); ++rank) {
    const Message& message = messages[rank];
    sum.add(message.squares);
    agreement.any_gradient |= message.any_gradient;
    if (message.misses_gradient && !agreement.missing_rank) agreement.missing_rank = rank;
  }
  agreement.sum_of_squares = at::scalar_tensor(sum.total(), at::kDouble);
  return agreement;
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
