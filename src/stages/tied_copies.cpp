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
    Tied& tied = ties_.emplace_back(Tied{shape.chunk_of(tie.parts.front()), tie.parameters.front(), -1, {}});
    for (size_t i = 1; i < tie.parts.size(); ++i)
      tied.copies.push_back({shape.chunk_of(tie.parts[i]), shape.stage_of(tie.parts[i]), owner, tie.parameters[i]});
    if (owner != stages.rank()) continue;
    const auto place = find_managed(tied.parameter);
    if (!place) throw Error(ErrorCode::kInternal, str("pipeline: the tied parameter '", tie.name, "' is not managed"));
    tied.index = place->parameter;
  }
  cast_copies();
}

// The owners' weights may have been cast.
void TiedCopies::cast_copies() {
  const WithoutInterception own_operators;
  const at::Tensor dtype = at::empty({1}, at::kInt);
  for (const Tied& tied : ties_) {
    if (owns(tied)) dtype.fill_(static_cast<int>(pager_.parameters()[tied.index].dtype));
    for (const Copy& copy : tied.copies) {
      if (owns(tied) && !is_here(copy)) stages_.send(dtype, copy.stage).wait();
      if (!is_here(copy)) continue;
      if (!owns(tied)) stages_.recv(dtype, copy.owner_stage).wait();
      copy.parameter.set_data(copy.parameter.detach().to(static_cast<at::ScalarType>(dtype.item<int>())).contiguous());
    }
  }
}

void TiedCopies::follow_owners() {
  const SubjectScope subject("tied parameters");
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  for (const Tied& tied : ties_) {
    const at::Tensor whole = owns(tied) ? pager_.whole(tied.index).detach().clone() : at::Tensor();
    for (const Copy& copy : tied.copies) {
      if (owns(tied) && is_here(copy)) {
        copy.parameter.copy_(whole);
      } else if (owns(tied)) {
        stages_.send(whole, copy.stage).wait();
      } else if (is_here(copy)) {
        const at::Tensor received = at::empty_like(copy.parameter);
        stages_.recv(received, copy.owner_stage).wait();
        copy.parameter.copy_(received);
      }
    }
  }
}

TiedCopies::Roots TiedCopies::receive(int chunk, bool is_last) {
  Roots roots;
  if (!is_last && !each_micro_batch_) return roots;
  const SubjectScope subject("gradients of tied parameters");
  for (Tied& tied : ties_) {
    if (!owns(tied) || tied.chunk != chunk || !tied.parameter.requires_grad()) continue;
    for (Copy& copy : tied.copies) {
      at::Tensor gradient;
      if (is_here(copy)) {
        gradient = copy.handed_over.front();
        copy.handed_over.pop_front();
      } else {
        const ParameterSpec& spec = pager_.parameters()[tied.index];
        gradient = at::empty(spec.shape, at::TensorOptions().dtype(spec.dtype).device(pager_.device()));
        stages_.recv(gradient, copy.stage).wait();
      }
      roots.edges.push_back(torch::autograd::impl::gradient_edge(tied.parameter));
      roots.gradients.push_back(gradient);
    }
  }
  return roots;
}

void TiedCopies::send(int chunk, bool is_last) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  const SubjectScope subject("gradients of tied parameters");
  for (Tied& tied : ties_)
    for (Copy& copy : tied.copies) {
      if (!is_here(copy) || copy.chunk != chunk || !copy.parameter.requires_grad()) continue;
      at::Tensor gradient = std::exchange(copy.parameter.mutable_grad(), at::Tensor());
      if (!each_micro_batch_) {
        // Sums are fp32, as those of all gradients.
        if (gradient.defined()) copy.sum = copy.sum.defined() ? copy.sum.add_(gradient) : gradient.to(at::kFloat);
        if (!is_last) continue;
        gradient = std::exchange(copy.sum, at::Tensor());
      }
      const at::Tensor message =
          gradient.defined() ? gradient.to(copy.parameter.scalar_type()).contiguous() : at::zeros_like(copy.parameter);
      if (owns(tied))
        copy.handed_over.push_back(message);
      else
        leaving_.emplace_back(stages_.send(message, copy.owner_stage), message);
    }
}

void TiedCopies::clear() {
  for (auto& [pending, message] : leaving_) pending.wait();
  leaving_.clear();
  for (Tied& tied : ties_)
    for (Copy& copy : tied.copies) {
      copy.sum.reset();
      copy.handed_over.clear();
      if (is_here(copy)) copy.parameter.mutable_grad().reset();
    }
}

std::set<std::string> names_of_copies(const std::vector<Tie>& ties, const torch::nn::Module& module) {
  std::set<const void*> copies;
  for (const Tie& tie : ties)
    for (size_t i = 1; i < tie.parameters.size(); ++i)
      if (tie.parameters[i].defined()) copies.insert(tie.parameters[i].unsafeGetTensorImpl());
  std::set<std::string> names;
  for (const auto& item : module.named_parameters())
    if (copies.contains(item.value().unsafeGetTensorImpl())) names.insert(item.key());
  return names;
}

}  // namespace trireme
