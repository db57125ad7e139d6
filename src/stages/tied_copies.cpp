#include "stages/tied_copies.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/intercept.h"

namespace trireme {

TiedCopies::TiedCopies(Group& stages, const std::vector<Tie>& ties, const pipeline::Schedule& shape, Pager& pager,
                       bool each_micro_batch)
    : stages_(stages), pager_(pager), each_micro_batch_(each_micro_batch) {
  for (const Tie& tie : ties) {
    const int owner = shape.stage_of(tie.parts.front());
    for (const int part : tie.parts) {
      if (shape.stage_of(part) != stages.rank()) continue;
      const int chunk = shape.chunk_of(part);
      if (owner != stages.rank()) {
        order_.push_back({false, copies_.size()});
        copies_.push_back({chunk, owner, tie.parameter, {}});
        continue;
      }
      const auto place = find_managed(tie.parameter);
      if (!place)
        throw Error(ErrorCode::kInternal, str("pipeline: the tied parameter '", tie.name, "' is not managed"));
      Owned& owned = owned_.emplace_back(Owned{chunk, tie.parameter, place->parameter, {}});
      for (size_t i = 1; i < tie.parts.size(); ++i) owned.copies.push_back(shape.stage_of(tie.parts[i]));
      order_.push_back({true, owned_.size() - 1});
    }
  }
  cast_copies();
}

// The owners' weights may have been cast.
void TiedCopies::cast_copies() {
  const WithoutInterception own_operators;
  const at::Tensor dtype = at::empty({1}, at::kInt);
  for (const Place& place : order_) {
    if (place.is_owner) {
      dtype.fill_(static_cast<int>(pager_.parameters()[owned_[place.index].index].dtype));
      for (const int stage : owned_[place.index].copies) stages_.send(dtype, stage).wait();
    } else {
      const Copy& copy = copies_[place.index];
      stages_.recv(dtype, copy.owner).wait();
      copy.parameter.set_data(copy.parameter.detach().to(static_cast<at::ScalarType>(dtype.item<int>())).contiguous());
    }
  }
}

void TiedCopies::follow_owners() {
  const SubjectScope subject("tied parameters");
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  for (const Place& place : order_) {
    if (place.is_owner) {
      const Owned& owned = owned_[place.index];
      const at::Tensor whole = pager_.whole(owned.index).detach().clone();
      for (const int stage : owned.copies) stages_.send(whole, stage).wait();
    } else {
      const Copy& copy = copies_[place.index];
      const at::Tensor received = at::empty_like(copy.parameter);
      stages_.recv(received, copy.owner).wait();
      copy.parameter.copy_(received);
    }
  }
}

TiedCopies::Roots TiedCopies::receive(int chunk, bool is_last) {
  Roots roots;
  if (!is_last && !each_micro_batch_) return roots;
  const SubjectScope subject("gradients of tied parameters");
  for (const Owned& owned : owned_) {
    if (owned.chunk != chunk || !owned.parameter.requires_grad()) continue;
    for (const int stage : owned.copies) {
      const ParameterSpec& spec = pager_.parameters()[owned.index];
      const at::Tensor gradient = at::empty(spec.shape, at::TensorOptions().dtype(spec.dtype).device(pager_.device()));
      stages_.recv(gradient, stage).wait();
      roots.edges.push_back(torch::autograd::impl::gradient_edge(owned.parameter));
      roots.gradients.push_back(gradient);
    }
  }
  return roots;
}

void TiedCopies::send(int chunk, bool is_last) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  const SubjectScope subject("gradients of tied parameters");
  for (Copy& copy : copies_) {
    if (copy.chunk != chunk || !copy.parameter.requires_grad()) continue;
    at::Tensor gradient = std::exchange(copy.parameter.mutable_grad(), at::Tensor());
    if (!each_micro_batch_ && gradient.defined()) {
      // Sums are fp32, as those of all gradients.
      if (copy.sum.defined())
        copy.sum.add_(gradient);
      else
        copy.sum = gradient.to(at::kFloat);
      gradient = copy.sum;
    }
    if (!is_last && !each_micro_batch_) continue;
    if (!each_micro_batch_) gradient = std::exchange(copy.sum, at::Tensor());
    const at::Tensor message =
        gradient.defined() ? gradient.to(copy.parameter.scalar_type()).contiguous() : at::zeros_like(copy.parameter);
    leaving_.emplace_back(stages_.send(message, copy.owner), message);
  }
}

void TiedCopies::clear() {
  for (auto& [pending, message] : leaving_) pending.wait();
  leaving_.clear();
  for (Copy& copy : copies_) {
    copy.sum.reset();
    copy.parameter.mutable_grad().reset();
  }
}

std::set<std::string> names_of_copies(const std::vector<Tie>& ties, const pipeline::Schedule& shape, int stage,
                                      const torch::nn::Module& module) {
  std::set<const void*> copies;
  for (const Tie& tie : ties)
    if (tie.parameter.defined() && shape.stage_of(tie.parts.front()) != stage)
      copies.insert(tie.parameter.unsafeGetTensorImpl());
  std::set<std::string> names;
  for (const auto& item : module.named_parameters())
    if (copies.contains(item.value().unsafeGetTensorImpl())) names.insert(item.key());
  return names;
}

}  // namespace trireme
